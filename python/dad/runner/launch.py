"""Turns hosts and a command into a running job."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from dad.runner import network, remote, secret
from dad.runner.errors import LaunchError
from dad.runner.hosts import Host, Slot, assign_ranks
from dad.runner.job import Job
from dad.runner.output import Nowhere, RankStream, bytes_of, open_copies
from dad.runner.processes import RankProcess
from dad.runner.rendezvous import RendezvousServer
from dad.runner.ssh import SshOptions, check_hosts
from dad.runner.tracebacks import TracebackFolder
from dad.world import new_job_id

DEFAULT_START_TIMEOUT_SECONDS = 30.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchPlan:
    """All that a launch needs to know."""

    hosts: list[Host]
    command: list[str]
    num_proc: int | None = None
    # On top of the launcher's own environment.
    variables: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    ssh: SshOptions = SshOptions()
    interfaces: str | None = None
    output_dir: str | None = None
    timestamps: bool = False
    output: str = "tagged"  # or merged, split: see flags.py
    start_timeout: float = DEFAULT_START_TIMEOUT_SECONDS
    verbose: bool = False


@dataclass(frozen=True)
class Network:
    """Where the ranks find the rendezvous server, and which interfaces they use."""

    remote_hosts: list[str]
    address: str
    interfaces: str | None


def plan_network(hosts: list[str], interfaces: str | None) -> Network:
    remote_hosts = [host for host in dict.fromkeys(hosts) if not network.is_local(host)]
    if not remote_hosts:
        if interfaces is not None:
            listening_address(interfaces)  # checks that at least one of these exists
        return Network([], _LOOPBACK, interfaces or network.loopback_interface())
    if interfaces is None:
        return Network(remote_hosts, network.address_towards(remote_hosts[0]), None)
    return Network(remote_hosts, listening_address(interfaces), interfaces)


def listening_address(interfaces: str) -> str:
    """Our address on the first of these interfaces that this machine has."""
    ours = network.interface_addresses()
    for name in interfaces.split(","):
        if name in ours:
            return ours[name]
    raise LaunchError(
        f"--network-interfaces {interfaces}: this machine has none of them; it has {', '.join(ours)}"
    )


def launch(plan: LaunchPlan, server: RendezvousServer | None = None) -> int:
    """Starts the ranks, waits for them, and returns the exit code of dadrun.

    A `server` that is given must be reachable from all hosts; it is not stopped.
    """
    working_directory()
    slots = assign_ranks(plan.hosts, plan.num_proc)
    net = plan_network([slot.host for slot in slots], plan.interfaces)
    check_hosts(net.remote_hosts, plan.ssh, plan.start_timeout)
    with serving(server, net, plan) as ours:
        tracebacks = TracebackFolder()
        return Job(_start_all(plan, slots, net, ours, tracebacks), tracebacks=tracebacks).run()


def working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the working directory has been deleted; cd to one that exists") from error


@contextlib.contextmanager
def serving(
    server: RendezvousServer | None, net: Network, plan: LaunchPlan, is_open: bool = False
) -> Iterator[RendezvousServer]:
    """The given server, or a new one that lives as long as the context."""
    if server is not None:
        yield server
        return
    with start_server(net, {**plan.environment, **plan.variables}, is_open) as own:
        yield own


def start_server(net: Network, environment: Mapping[str, str], is_open: bool = False) -> RendezvousServer:
    """Listens only on the address that the ranks use; with the secret of the job, unless it is to be open."""
    port = _port(environment)
    try:
        return RendezvousServer(net.address, port, secret=b"" if is_open else secret.of_launcher(environment))
    except secret.SecretError as error:
        raise LaunchError(str(error)) from error
    except OSError as error:
        cure = "name another interface with --network-interfaces"
        if port:
            cure = f"DAD_PORT={port} may be taken by another job"
        raise LaunchError(
            f"cannot listen on {net.address}, where the ranks would look for us: {error.strerror}; {cure}"
        ) from error


def _port(environment: Mapping[str, str]) -> int:
    text = environment.get("DAD_PORT") or "0"
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"DAD_PORT={text}: expected a port, or 0")
    return int(text)


def worker_variables(slot: Slot, net: Network, port: int) -> dict[str, str]:
    """The place of a rank, for dad and, under Horovod's names, for other libraries."""
    place = {
        "RANK": slot.rank,
        "SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
        "HOSTNAME": slot.host,
    }
    variables = {
        f"{family}_{name}": str(value) for family in ("DAD", "HOROVOD") for name, value in place.items()
    }
    variables["DAD_RENDEZVOUS"] = f"http://{net.address}:{port}"
    variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = net.address
    variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    variables["HOROVOD_CONTROLLER"] = "gloo"
    variables["HOROVOD_CPU_OPERATIONS"] = "gloo"
    variables["DAD_TRANSPORT"] = "gloo"
    variables["PYTHONUNBUFFERED"] = "1"
    return variables


def interface_variables(net: Network, environment: dict[str, str], given: bool) -> dict[str, str]:
    """Keeps what the user has set, unless a flag overrides it."""
    if net.interfaces is None:
        return {}
    wanted = {
        "DAD_GLOO_IFACE": net.interfaces,
        "HOROVOD_GLOO_IFACE": net.interfaces.partition(",")[0],
        "NCCL_SOCKET_IFNAME": net.interfaces,
    }
    if given:
        return wanted
    if "DAD_GLOO_IFACE" in environment or "HOROVOD_GLOO_IFACE" in environment:
        del wanted["DAD_GLOO_IFACE"], wanted["HOROVOD_GLOO_IFACE"]
    return {name: value for name, value in wanted.items() if name not in environment}


def _start_all(
    plan: LaunchPlan, slots: list[Slot], net: Network, server: RendezvousServer, tracebacks: TracebackFolder
) -> list[RankProcess]:
    base = base_environment(plan, net)
    server.job = base["DAD_JOB_ID"]
    started: list[RankProcess] = []
    try:
        for slot in slots:
            environment = {**base, **worker_variables(slot, net, server.port)}
            is_remote = slot.host in net.remote_hosts
            started.append(start_rank(plan, slot, environment, is_remote, tracebacks, secret=server.secret))
    except BaseException:
        for rank in started:
            if rank.process.stdin is not None:
                rank.process.stdin.close()  # this ends it
        raise
    return started


def base_environment(plan: LaunchPlan, net: Network) -> dict[str, str]:
    """What all ranks have in common."""
    base = {**plan.environment, **plan.variables}
    base.update(interface_variables(net, base, given=plan.interfaces is not None))
    base.setdefault("DAD_JOB_ID", new_job_id())
    return base


def start_rank(
    plan: LaunchPlan,
    slot: Slot,
    environment: dict[str, str],
    is_remote: bool,
    tracebacks: TracebackFolder,
    *,
    is_again: bool = False,
    silence_seconds: float = remote.SILENCE_SECONDS,
    **more: Any,
) -> RankProcess:
    """`is_again`: the copies of its output are continued. The rest is that of remote.start_remote()."""
    cwd = working_directory()
    out: BinaryIO | None = None
    err: BinaryIO | None = None
    if plan.output_dir is not None:
        try:
            out, err = open_copies(plan.output_dir, slot.rank, slot.size, append=is_again)
        except OSError as error:
            raise LaunchError(f"--output-filename {plan.output_dir}: {error}") from error
    if is_remote:
        process = remote.start_remote(
            slot.host, plan.ssh, plan.command, environment, cwd, silence_seconds, **more
        )
    else:
        process = remote.start_local(plan.command, environment, cwd, **more)
    if plan.verbose:
        how = "over ssh" if is_remote else "here"
        print(f"dadrun: rank {slot.rank} on {slot.host} ({how}): {shlex.join(plan.command)}", file=sys.stderr)
    shown: dict[str, Any] = {"timestamps": plan.timestamps, "prefix": plan.output == "tagged"}
    is_split = plan.output == "split"
    streams = [Nowhere() if is_split else bytes_of(stream) for stream in (sys.stdout, sys.stderr)]
    return RankProcess(
        label=f"rank {slot.rank}",
        host=slot.host,
        remote=is_remote,
        process=process,
        stdout=RankStream(slot.rank, "stdout", streams[0], copy=out, **shown),
        stderr=RankStream(slot.rank, "stderr", streams[1], copy=err, tracebacks=tracebacks, **shown),
    )
