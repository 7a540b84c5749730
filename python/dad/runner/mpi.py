"""`dadrun --mpi`: mpirun starts the ranks; dadrun makes its command and serves the rendezvous."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dad.runner import network, remote, secret
from dad.runner.errors import LaunchError
from dad.runner.hosts import Slot, assign_ranks
from dad.runner.job import Job
from dad.runner.launch import (
    LaunchPlan,
    Network,
    interface_variables,
    plan_network,
    serving,
    working_directory,
)
from dad.runner.output import RankStream, bytes_of
from dad.runner.processes import RankProcess
from dad.runner.rendezvous import RendezvousServer
from dad.runner.ssh import check_hosts
from dad.world import new_job_id

# Variables for the place of a rank in an outer job, which would be taken for those of this one.
_PLACE = re.compile(r"(DAD|HOROVOD)_(LOCAL_|CROSS_)?(RANK|SIZE)|(OMPI|PMI|PMIX|PRTE)_.*|MPI_LOCAL.*")


@dataclass(frozen=True)
class MpiJob:
    """The parts of an mpirun command."""

    mpirun: str
    plan: LaunchPlan
    slots: list[Slot]
    net: Network
    environment: dict[str, str]  # of mpirun itself; the commands may add to it
    mpi_args: str | None = None
    binding_args: str | None = None


def launch_with_mpirun(
    plan: LaunchPlan,
    mpi_args: str | None = None,
    binding_args: str | None = None,
    server: RendezvousServer | None = None,
) -> int:
    """Like launch(): returns the exit code of dadrun; a given `server` is not stopped."""
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    if mpirun is None:
        raise LaunchError("--mpi: there is no mpirun on PATH; install one: apt-get install openmpi-bin")
    kind = detect_kind(mpirun)
    slots = assign_ranks(plan.hosts, plan.num_proc)
    net = plan_network([slot.host for slot in slots], plan.interfaces)
    check_hosts(net.remote_hosts, plan.ssh, plan.start_timeout)
    is_open = not has_secret(net, {**plan.environment, **plan.variables})
    with serving(server, net, plan, is_open) as ours:
        environment = mpi_environment(plan, net, ours.port)
        ours.job = environment["DAD_JOB_ID"]
        job = MpiJob(mpirun, plan, slots, net, environment, mpi_args, binding_args)
        command = openmpi_command(job) if kind == "openmpi" else mpich_command(job)
        if plan.verbose:
            print(f"dadrun: {shlex.join(command)}", file=sys.stderr)
        process = RankProcess(
            label="mpirun",
            host="localhost",
            remote=False,
            process=remote.start_local(
                command, environment, working_directory(), secret=b"" if net.remote_hosts else ours.secret
            ),
            stdout=RankStream(0, "stdout", bytes_of(sys.stdout), prefix=False),
            stderr=RankStream(0, "stderr", bytes_of(sys.stderr), prefix=False),
        )
        return Job([process]).run()


def has_secret(net: Network, environment: Mapping[str, str]) -> bool:
    """mpirun hands nothing to other hosts that other users there could not see; a secret file may exist
    already."""
    return not net.remote_hosts or bool(environment.get(secret.FILE_VARIABLE))


def detect_kind(mpirun: str) -> str:
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30)
    text = (answer.stdout + answer.stderr).lower()
    if "open mpi" in text or "openrte" in text or "prte" in text:
        return "openmpi"
    if "hydra" in text or "mpich" in text or "intel(r) mpi" in text:
        return "mpich"
    raise LaunchError(f"--mpi: {mpirun} is neither Open MPI nor MPICH: {text.strip().splitlines()[:1]}")


def mpi_environment(plan: LaunchPlan, net: Network, port: int) -> dict[str, str]:
    base = {**plan.environment, **plan.variables}
    # Settings for Open MPI are the user's, unless an outer mpirun has made them.
    settings = "OMPI_MCA_" if "OMPI_COMM_WORLD_RANK" not in base else ()
    environment = {
        name: value for name, value in base.items() if name.startswith(settings) or not _PLACE.fullmatch(name)
    }
    environment.update(interface_variables(net, environment, given=plan.interfaces is not None))
    environment.setdefault("DAD_JOB_ID", new_job_id())
    environment["DAD_RENDEZVOUS"] = f"http://{net.address}:{port}"
    environment.setdefault("DAD_TRANSPORT", "mpi")
    environment["HOROVOD_CONTROLLER"] = environment["HOROVOD_CPU_OPERATIONS"] = "mpi"
    environment["PYTHONUNBUFFERED"] = "1"
    if os.geteuid() == 0:
        # Without these, Open MPI refuses to run as root; a user who calls dadrun as root means it.
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def _slots_by_host(slots: list[Slot]) -> str:
    counts = {slot.host: slot.local_size for slot in slots}
    return ",".join(f"{host}:{count}" for host, count in counts.items())


def openmpi_command(job: MpiJob) -> list[str]:
    plan = job.plan
    command = [job.mpirun, "-np", str(len(job.slots)), "--host", _slots_by_host(job.slots)]
    binding = job.binding_args
    command += shlex.split(binding) if binding else ["--bind-to", "none", "--map-by", "slot"]
    command += ["--timestamp-output"] if plan.timestamps else []
    command += ["--tag-output"] if plan.output == "tagged" else []
    if plan.output_dir is not None:
        command += ["--output-filename", plan.output_dir]
    if job.net.remote_hosts:
        command += ["--mca", "plm_rsh_args", shlex.join(plan.ssh.arguments())]
    if (networks := _networks(job)) is not None:
        for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", layer, networks]
    for name in sorted(remote.exportable(job.environment)):
        # mpirun does not take names like those of shell functions.
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and not name.startswith("OMPI_"):
            command += ["-x", name]
    return [*command, *shlex.split(job.mpi_args or ""), *plan.command]


def _networks(job: MpiJob) -> str | None:
    """By default Open MPI uses every network that it sees. A docker0 has the same address on all hosts,
    so that a host which looks for another one there finds itself, and hangs."""
    if job.plan.interfaces is not None:
        return job.plan.interfaces
    given = [job.mpi_args or "", *job.environment]
    if not job.net.remote_hosts or any("tcp_if_" in text for text in given):
        return None
    return network.common_subnet(job.net.remote_hosts)


def mpich_command(job: MpiJob) -> list[str]:
    plan = job.plan
    # Hydra passes the whole environment by itself.
    command = [job.mpirun, "-np", str(len(job.slots)), "-hosts", _slots_by_host(job.slots)]
    command += ["-prepend-rank"] if plan.output == "tagged" else []
    command += shlex.split(job.binding_args or "")
    if plan.output_dir is not None:
        os.makedirs(plan.output_dir, exist_ok=True)
        command += ["-outfile-pattern", f"{plan.output_dir}/rank.%r.stdout"]
        command += ["-errfile-pattern", f"{plan.output_dir}/rank.%r.stderr"]
    if job.net.remote_hosts:
        job.environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(plan.ssh.arguments())
    if plan.interfaces is not None:
        command += ["-iface", plan.interfaces.partition(",")[0]]
    elif job.net.remote_hosts:
        # By default the others are told this machine's name, which they may not know.
        command += ["-localhost", job.net.address]
    return [*command, *shlex.split(job.mpi_args or ""), *plan.command]
