"""`dadrun --doctor`: is everything there, and does it work?

One line per check. ✓ is fine, ✗ is broken, – is absent and not needed; what is missing comes
with the command that brings it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator

from dad._version import __version__
from dad.runner import network, remote
from dad.runner.check_build import FRAMEWORKS, framework_status, plugin_status, rebuild_command
from dad.runner.doctor_pairs import examine_pairs
from dad.runner.findings import ABSENT, BROKEN, OK, Finding, report
from dad.runner.hosts import Host
from dad.runner.kv import KeyValueClient
from dad.runner.rendezvous import RendezvousServer
from dad.runner.ssh import SshOptions, check_host, cure

_EXCHANGE_SECONDS = 120
_REMOTE_SECONDS = 60
_DADRUN = (sys.executable, "-m", "dad.runner.cli")


def examine(hosts: list[Host], ssh: SshOptions, interfaces: str | None = None) -> int:
    """Prints the findings; 0 if nothing is broken."""
    broken = report(_python())
    without_core = report(_core())
    # Without the core, these checks could only repeat its error.
    if not without_core:
        broken += report(_frameworks()) + report(_plugins())
    broken += without_core + report(_rendezvous()) + report(_ports())
    unreachable = report(_ssh_hosts(hosts, ssh))
    broken += unreachable
    if len(hosts) >= 2 and not unreachable:
        lines = report(examine_pairs(hosts, _between(hosts, ssh, interfaces, "doctor_pairs_worker")))
        broken += lines
        unreachable += lines
    if not (without_core or unreachable):
        broken += report(_exchange(hosts, ssh, interfaces))
    print(
        "everything works"
        if broken == 0
        else f"{broken} {'thing is' if broken == 1 else 'things are'} broken"
    )
    return 0 if broken == 0 else 1


def _python() -> Iterator[Finding]:
    fine = sys.version_info >= (3, 10)
    text = f"Python {platform.python_version()} ({sys.executable}), dad {__version__}"
    yield Finding(OK if fine else BROKEN, text if fine else f"{text}: dad needs Python 3.10 or newer")


def _core() -> Iterator[Finding]:
    error = _import_error("dad._lib._core")
    if error is None:
        yield Finding(OK, "the core loads")
    else:
        yield Finding(BROKEN, f"the core does not load: {error}; build it: {rebuild_command()}")


def _frameworks() -> Iterator[Finding]:
    found = 0
    for name, module in FRAMEWORKS.items():
        there, why = framework_status(module)
        if not there:
            yield Finding(ABSENT, f"{name}: {why}")
            continue
        found += 1
        error = _import_error(f"dad.{module}")
        if error is None:
            yield Finding(OK, f"{name}: {why}, dad.{module} loads")
        else:
            yield Finding(BROKEN, f"{name}: dad.{module} does not load: {error}; {rebuild_command()}")
    if found == 0:
        yield Finding(BROKEN, f"no framework: pip install torch, then {rebuild_command()}")


def _plugins() -> Iterator[Finding]:
    there, why = plugin_status("gloo")
    cure = f"apt-get install libgloo-dev, then {rebuild_command()}"
    yield Finding(OK, f"gloo: {why}") if there else Finding(BROKEN, f"gloo: {why}; {cure}")
    there, why = plugin_status("mpi")
    cure = f"wanted only for --mpi and mpirun: apt-get install libopenmpi-dev, then {rebuild_command()}"
    yield Finding(OK, f"mpi: {why}") if there else Finding(ABSENT, f"mpi: {why}; {cure}")


def _rendezvous() -> Iterator[Finding]:
    token = secrets.token_hex(8)
    with RendezvousServer("", token=token) as server:  # on all addresses, to try each of them
        addresses = dict.fromkeys(["127.0.0.1", *network.interface_addresses().values()])
        for address in addresses:
            client = KeyValueClient(f"http://{address}:{server.port}", request_timeout=5.0, key=b"")
            if not client.is_server_of(token):
                cure = (
                    "does a firewall or a proxy (http_proxy) stand between? Choose with --network-interfaces"
                )
                yield Finding(BROKEN, f"the rendezvous server does not answer at {address}; {cure}")
                return
    yield Finding(OK, f"the rendezvous server answers at {', '.join(addresses)}")


def _ports() -> Iterator[Finding]:
    wanted = 16
    servers: list[RendezvousServer] = []
    try:
        for _ in range(wanted):
            servers.append(RendezvousServer("127.0.0.1"))
    except OSError as error:
        cure = "see: ss -s; sysctl net.ipv4.ip_local_port_range; ulimit -n"
        yield Finding(
            BROKEN, f"only {len(servers)} of {wanted} ports could be opened: {error.strerror}; {cure}"
        )
        return
    finally:
        for server in servers:
            server.stop()
    yield Finding(OK, "ports can be opened")


def _ssh_hosts(hosts: list[Host], ssh: SshOptions) -> Iterator[Finding]:
    for host in hosts:
        if network.is_local(host.name):
            yield Finding(OK, f"{host.name} is this machine")
            continue
        reason = check_host(host.name, ssh)
        if reason is not None:
            attempt = shlex.join([*ssh.command(host.name), "true"])
            what = "; ".join(filter(None, [reason, cure(reason, host.name, ssh), f"try: {attempt}"]))
            yield Finding(BROKEN, f"{host.name}: {what}")
            continue
        yield _remote_dad(host.name, ssh)


def _remote_dad(host: str, ssh: SshOptions) -> Finding:
    """The other side needs the same dad, and the same interpreter."""
    command = [sys.executable, "-c", "import dad; print(dad.__version__)"]
    try:
        # Run it as a rank would: dad may be found only through PYTHONPATH.
        code, out, err = remote.run_remote(host, ssh, command, dict(os.environ), _REMOTE_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(BROKEN, f"{host}: no answer within {_REMOTE_SECONDS} s to: {shlex.join(command)}")
    if code != 0:
        why = (err.strip().splitlines() or ["no message"])[-1]
        return Finding(BROKEN, f"{host}: dad is not there ({why}); install it for {sys.executable} on {host}")
    version = (out.strip().splitlines() or ["nothing"])[-1]
    if version != __version__:
        return Finding(
            BROKEN, f"{host} has dad {version}, this machine {__version__}; install the same on both"
        )
    return Finding(OK, f"{host}: ssh works, dad {version} is there")


def _between(hosts: list[Host], ssh: SshOptions, interfaces: str | None, worker: str) -> list[str]:
    """The command that starts one worker of the doctor on each host."""
    command = [*_DADRUN, "-H", ",".join(f"{host.name}:1" for host in hosts)]
    command += ["-p", str(ssh.port)] if ssh.port is not None else []
    command += ["-i", ssh.identity_file] if ssh.identity_file is not None else []
    command += ["--network-interfaces", interfaces] if interfaces is not None else []
    return [*command, sys.executable, "-m", f"dad.runner.{worker}"]


def _exchange(hosts: list[Host], ssh: SshOptions, interfaces: str | None) -> Iterator[Finding]:
    """Runs a real allreduce, started by dadrun itself; between hosts if there are several."""
    if len(hosts) >= 2:
        command = _between(hosts, ssh, interfaces, "doctor_worker")
        what = f"an allreduce between {len(hosts)} hosts"
    else:
        command = [*_DADRUN, "-np", "2", sys.executable, "-m", "dad.runner.doctor_worker"]
        what = "an allreduce between 2 processes"
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_EXCHANGE_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding(BROKEN, f"{what}: no result within {_EXCHANGE_SECONDS} s; try: {shlex.join(command)}")
        return
    if answer.returncode == 0:
        yield Finding(OK, f"{what}: the result is right")
        return
    tail = "\n".join(f"    {line}" for line in answer.stderr.strip().splitlines()[-8:])
    yield Finding(BROKEN, f"{what} failed; try: {shlex.join(command)}\n{tail}")


def _import_error(module: str) -> str | None:
    """Runs in a process of its own: a library that does not fit may crash its process."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"no module {module}"
    answer = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    if answer.returncode == 0:
        return None
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with code {answer.returncode}"
