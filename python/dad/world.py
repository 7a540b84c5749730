"""This process's place in the world: its rank, and where it meets the others.

The first of these that has left its variables in the environment decides: dadrun (DAD_*),
horovodrun (HOROVOD_*), mpirun, torchrun, srun. Without any of them the process is alone.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

# Ports that rank 0 tries in turn when no launcher has a server for us.
_NUM_PORTS = 16
# srun's variables in an sbatch script or an salloc shell, which are one process and not a rank.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class WorldError(ValueError):
    """The variables of a launcher are incomplete or contradict each other, or ranks do not meet."""


@dataclass(frozen=True)
class Meeting:
    """How the ranks find the key-value server."""

    how: Literal["alone", "url", "ports", "torchelastic", "mpi"] = "alone"
    # ports, torchelastic: rank 0's host; ports: where its server may listen, in the order tried.
    host: str = ""
    ports: tuple[int, ...] = ()
    # Equal on all ranks of a job, different for another job on the same host.
    token: str = ""


@dataclass(frozen=True)
class World:
    """None in a place means that the launcher did not say; it is found out when the ranks meet."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    cross_rank: int | None = 0
    cross_size: int | None = 1
    hostname: str = ""
    rendezvous: str = ""
    launcher: str = "none"
    transport: str = "gloo"
    meeting: Meeting = field(default_factory=Meeting)
    # Whether the launcher named the host; else the machine itself tells who shares it.
    has_named_host: bool = False
    # torchrun may run several agents on one host, each with local ranks of its own.
    agent: str = ""
    start_timeout: float = 60.0
    # Of the whole job, for reports; the same on all ranks.
    job: str = ""
    # This rank's share of the cores of its host, if the ranks have told each other what they may use.
    threads: int | None = None

    @property
    def is_complete(self) -> bool:
        return None not in (self.local_rank, self.local_size, self.cross_rank, self.cross_size)


class _Variables:
    """Reads the environment; errors name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these that is set and not empty."""
        return next((value for name in names if (value := self._environ.get(name))), None)

    def has_any(self, *names: str) -> bool:
        return self.text(*names) is not None

    def number(self, *names: str) -> int | None:
        for name in names:
            value = self._environ.get(name)
            if value:
                if not re.fullmatch(r"\d+", value):
                    raise WorldError(f"{name}={value}: expected a whole number of at least 0")
                return int(value)
        return None

    def needed(self, launcher: str, *names: str) -> int:
        value = self.number(*names)
        if value is None:
            raise WorldError(f"{launcher} has set some of its variables, but {names[0]} is missing")
        return value

    def needed_text(self, launcher: str, *names: str) -> str:
        value = self.text(*names)
        if value is None:
            raise WorldError(f"{launcher} has set some of its variables, but {names[0]} is missing")
        return value


def discover(environ: Mapping[str, str]) -> World:
    """What the environment says. Talks to nobody."""
    variables = _Variables(environ)
    for read in (_from_dad, _from_horovod, _from_mpi, _from_torchrun, _from_slurm):
        world = read(variables)
        if world is not None:
            return _finish(world, variables)
    return _finish(World(), variables)


def _finish(world: World, variables: _Variables) -> World:
    if world.size < 1:
        raise WorldError(f"the launcher ({world.launcher}) says that there are {world.size} ranks")
    # The local rank of an elastic worker is its slot, and who has lower slots may be lost.
    is_elastic = "1" in (variables.text("DAD_ELASTIC"), variables.text("HOROVOD_ELASTIC"))
    for name, index, count in (
        ("rank", world.rank, world.size),
        ("local rank", world.local_rank, None if is_elastic else world.local_size),
        ("cross rank", world.cross_rank, world.cross_size),
    ):
        if index is not None and count is not None and index >= count:
            raise WorldError(f"the launcher ({world.launcher}) says {name} {index} of {count}")
    if world.local_size is not None and world.local_size > world.size:
        raise WorldError(
            f"the launcher ({world.launcher}) says {world.local_size} ranks on this host, "
            f"but {world.size} in all"
        )
    if world.size == 1:
        world = replace(
            world, local_rank=0, local_size=1, cross_rank=0, cross_size=1, meeting=Meeting(), rendezvous=""
        )
    url = variables.text("DAD_RENDEZVOUS")
    if url is not None and world.size > 1:
        if not url.startswith(("http://", "file:///")):
            raise WorldError(f"DAD_RENDEZVOUS={url}: expected http://HOST:PORT or file:///DIR")
        world = replace(world, rendezvous=url, meeting=Meeting("url"))
    named_host = variables.text("DAD_HOSTNAME", "HOROVOD_HOSTNAME")
    default_transport = "mpi" if world.launcher == "mpi" else "gloo"
    return replace(
        world,
        hostname=named_host or socket.gethostname(),
        has_named_host=named_host is not None,
        transport=(variables.text("DAD_TRANSPORT", "HOROVOD_CPU_OPERATIONS") or default_transport).lower(),
        start_timeout=_start_timeout(variables),
        job=variables.text("DAD_JOB_ID") or "",
    )


def _start_timeout(variables: _Variables) -> float:
    for name in ("DAD_START_TIMEOUT", "HOROVOD_START_TIMEOUT"):
        value = variables.text(name)
        if value is not None:
            try:
                return float(value)
            except ValueError:
                raise WorldError(f"{name}={value}: expected a number of seconds") from None
    return World.start_timeout


# ---- one reader per launcher


def _from_dad(variables: _Variables) -> World | None:
    return _from_family(variables, "DAD", "dadrun")


def _from_horovod(variables: _Variables) -> World | None:
    return _from_family(variables, "HOROVOD", "horovodrun")


def _from_family(variables: _Variables, family: str, launcher: str) -> World | None:
    if not variables.has_any(f"{family}_RANK", f"{family}_SIZE"):
        return None
    world = World(
        rank=variables.needed(launcher, f"{family}_RANK"),
        size=variables.needed(launcher, f"{family}_SIZE"),
        local_rank=variables.number(f"{family}_LOCAL_RANK"),
        local_size=variables.number(f"{family}_LOCAL_SIZE"),
        cross_rank=variables.number(f"{family}_CROSS_RANK"),
        cross_size=variables.number(f"{family}_CROSS_SIZE"),
        launcher=launcher,
        meeting=Meeting("url"),
    )
    if world.size == 1 or variables.has_any("DAD_RENDEZVOUS"):
        return world
    if family == "DAD" and not variables.has_any("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        raise WorldError(f"DAD_SIZE={world.size}, but DAD_RENDEZVOUS (http://HOST:PORT) is missing")
    address = variables.needed_text(launcher, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = variables.needed(launcher, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return replace(world, rendezvous=f"http://{address}:{port}")


def _from_mpi(variables: _Variables) -> World | None:
    if variables.has_any("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        program, family = "mpirun", "OMPI_COMM_WORLD"
        local_rank, local_size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    # srun sets PMI_* too, for programs that are not MPI programs. MPICH's mpirun has srun start one proxy
    # per host, which starts the ranks: their SLURM_PROCID is the proxy's.
    elif variables.has_any("PMI_RANK", "PMI_SIZE") and (
        variables.has_any("MPI_LOCALNRANKS") or not variables.has_any("SLURM_PROCID")
    ):
        program, family = "mpiexec", "PMI"
        local_rank, local_size = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    else:
        return None
    return World(
        rank=variables.needed(program, f"{family}_RANK"),
        size=variables.needed(program, f"{family}_SIZE"),
        local_rank=variables.number(local_rank),
        local_size=variables.number(local_size),
        cross_rank=None,
        cross_size=None,
        launcher="mpi",
        meeting=Meeting("mpi"),
    )


def _from_torchrun(variables: _Variables) -> World | None:
    # RANK alone is too common a name to mean anything.
    if not (variables.has_any("RANK") and variables.has_any("WORLD_SIZE")):
        if variables.has_any("LOCAL_RANK") and variables.has_any("MASTER_ADDR"):
            missing = "WORLD_SIZE" if variables.has_any("RANK") else "RANK"
            raise WorldError(f"torchrun has set some of its variables, but {missing} is missing")
        return None
    world = World(
        rank=variables.needed("torchrun", "RANK"),
        size=variables.needed("torchrun", "WORLD_SIZE"),
        local_rank=variables.number("LOCAL_RANK"),
        local_size=variables.number("LOCAL_WORLD_SIZE"),
        cross_rank=None,
        cross_size=None,
        launcher="torchrun",
    )
    if world.size == 1 or variables.has_any("DAD_RENDEZVOUS"):
        return world
    host = variables.needed_text("torchrun", "MASTER_ADDR")
    port = variables.needed("torchrun", "MASTER_PORT")
    if not 0 < port < 65536:
        raise WorldError(f"MASTER_PORT={port}: expected a port from 1 to 65535")
    run = variables.text("TORCHELASTIC_RUN_ID") or ""
    attempt = variables.text("TORCHELASTIC_RESTART_COUNT") or "0"
    token = f"torchrun {host}:{port} {run} {attempt} {world.size}"
    if (variables.text("TORCHELASTIC_USE_AGENT_STORE") or "").lower() == "true":
        meeting = Meeting("torchelastic", host, (port,), token)
    else:
        # MASTER_PORT itself comes last: it belongs to torch.distributed, which the script may use too.
        ports = (*range(port + 1, port + 1 + _NUM_PORTS), port)
        meeting = Meeting("ports", host, tuple(p for p in ports if p < 65536), token)
    return replace(world, meeting=meeting, agent=variables.text("GROUP_RANK") or "")


def _from_slurm(variables: _Variables) -> World | None:
    if not variables.has_any("SLURM_PROCID"):
        return None
    step = variables.number("SLURM_STEP_ID", "SLURM_STEPID")
    in_batch_script = variables.text("ENVIRONMENT") == "BATCH" and step is None
    if in_batch_script or (step is not None and step >= _SLURM_FIRST_SPECIAL_STEP):
        return None
    job = variables.text("SLURM_JOB_ID", "SLURM_JOBID") or "0"
    token = f"slurm {job}.{step or 0}"
    node_list = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    host = first_host(node_list) if node_list else variables.text("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    # Below the range from which Linux takes ports for outgoing connections.
    port = 20000 + zlib.crc32(token.encode()) % 10000
    return World(
        rank=variables.needed("srun", "SLURM_PROCID"),
        size=variables.needed("srun", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=None,
        cross_rank=None,
        cross_size=None,
        launcher="slurm",
        meeting=Meeting("ports", host, tuple(range(port, port + _NUM_PORTS)), token),
    )


def first_host(node_list: str) -> str:
    """`gpu[03-07,9],login` -> `gpu03`."""
    match = re.match(r"([^\[,\s]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", node_list)
    if not match:
        raise WorldError(f"SLURM_STEP_NODELIST={node_list}: expected names such as node[1-4]")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


# ---- for init()


class _Session:
    """What this process has met, kept over any number of init() and shutdown()."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.asked: World | None = None
        self.met: World | None = None
        self.num_inits = 0
        self.has_said_open = False
        self.place_taken_at = 0.0  # by time.monotonic(), in an elastic job


_session = _Session()
_session_lock = threading.Lock()


def new_job_id() -> str:
    """Tells jobs apart, and sorts by their start: `20261118-162233-5f3a9c`."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


def job_id() -> str:
    """The name of the job that this process joined last."""
    return "" if _session.met is None else _session.met.job


def place_taken_at() -> float:
    """When the launcher of an elastic job last said which rank this process has; 0.0 if it never has."""
    return _session.place_taken_at


def _warn_of_misspelt_variables(world: World) -> None:
    from dad.log import log
    from dad.variables import misspelt

    if world.rank == 0:
        for message in misspelt(os.environ):
            log.warning(message)


def open_world() -> dict[str, Any]:
    """Finds the place of this process and meets the others; the fields of the core's World.

    `generation` tells this meeting of ranks from all others. Where the number of ranks is fixed it counts the
    calls in this process, since all ranks call init() equally often; else the ranks agree on a new one.
    """
    global _session
    from dad import threads
    from dad.elastic.launcher import is_elastic

    with _session_lock:
        if _session.pid != os.getpid():
            _session = _Session()  # a forked child is not its parent
        met, generation = _meet_in_round() if is_elastic(os.environ) else _meet_once()
    return {
        "rank": met.rank,
        "size": met.size,
        "local_rank": met.local_rank,
        "local_size": met.local_size,
        "cross_rank": met.cross_rank,
        "cross_size": met.cross_size,
        "hostname": met.hostname,
        "rendezvous": met.rendezvous,
        "generation": generation,
        "transport": met.transport,
        "threads": threads.choose(met, os.environ),
        "plugin_dir": str(Path(__file__).parent / "_lib"),
        **_credentials(met),
    }


def _credentials(world: World) -> dict[str, Any]:
    """By which the ranks of a job, and its store, know each other (runner/secret.py)."""
    from dad.log import log
    from dad.runner import secret

    try:
        known = secret.of_rank(os.environ) if world.size > 1 else b""
        key = secret.key_of_rank(os.environ) if world.size > 1 else b""
    except secret.SecretError as error:
        raise WorldError(str(error)) from error
    if world.size > 1 and world.rank == 0 and not known and not _session.has_said_open:
        _session.has_said_open = True
        log.warning(
            "this job (%s) is open: who reaches its ports can take part in it. To close it, set %s to a file "
            "that only you can read, the same on all hosts (docs/security.md)",
            world.launcher,
            secret.FILE_VARIABLE,
        )
    # The job as the environment names it: a name that the ranks agree on later is not known to all yet.
    job = os.environ.get("DAD_JOB_ID", "")
    return {"job": job, "secret": known, "store_key": key}


def _meet_once() -> tuple[World, str]:
    """The place of a rank does not change."""
    from dad.runner.meeting import meet

    world = discover(os.environ)
    if world != _session.asked or _session.met is None:
        _warn_of_misspelt_variables(world)
        _session.met = meet(world)
        _session.asked = world
    _session.num_inits += 1
    return _session.met, str(_session.num_inits)


def _meet_in_round() -> tuple[World, str]:
    """Meets the other ranks of an elastic job. The environment has the first place of a process."""
    from dad.elastic import launcher
    from dad.elastic.round import meet_round
    from dad.runner.meeting import meet

    if _session.asked is not None or not launcher.has_place(os.environ):
        if _session.asked is None:
            launcher.import_late_modules()
        place = launcher.ask_place(os.environ)
        _session.place_taken_at = time.monotonic()
        launcher.take_place(place, os.environ)
    world = discover(os.environ)
    if _session.asked is None:
        _warn_of_misspelt_variables(world)
    _session.asked = world
    known_job = replace(world, job=world.job or ("" if _session.met is None else _session.met.job))
    met = meet_round(known_job)
    world = replace(world, job=met.job)
    _session.met = world if world.is_complete else meet(world)
    _session.num_inits += 1
    return _session.met, met.token
