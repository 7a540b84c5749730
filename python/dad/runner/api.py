"""dad.run(): a function on every rank, the results as a list."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dad.errors import DadInternalError
from dad.runner.elastic.launch import plan_elastic_network, run_elastic
from dad.runner.elastic.options import make_plan
from dad.runner.errors import LaunchError
from dad.runner.hosts import Host, assign_ranks, parse_hostfile, parse_hosts
from dad.runner.launch import (
    DEFAULT_START_TIMEOUT_SECONDS,
    LaunchPlan,
    launch,
    plan_network,
    start_server,
    working_directory,
)
from dad.runner.mpi import has_secret, launch_with_mpirun
from dad.runner.payload import FUNCTION, RESULT_SCOPE, SECRET_VARIABLE, pack, unpack
from dad.runner.rendezvous import RendezvousServer
from dad.runner.ssh import SshOptions


class RankTraceback(Exception):
    """Cause of an exception that was raised on a rank: tells where that was."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text}")
        self.rank = rank


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    ssh_strict_host_key_checking: str = "accept-new",
) -> list[Any]:
    """Runs func(*args, **kwargs) on several ranks and returns the results by rank.

    The output of the ranks is shown as dadrun shows it. Names, order and meaning of the arguments are those
    of horovod.run. With `min_num_proc` or `host_discovery_script` the job is elastic: func calls what
    hvd.elastic.run decorates, ranks are lost and gained, and the results are those of the ranks that exist at
    the end.

    Args:
        func: what every rank calls. It may be a lambda or a closure.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc, np: the number of ranks.
        min_num_proc, min_np: an elastic job continues with at least this many ranks.
        max_num_proc, max_np: it grows to at most this many.
        slots: of hosts that do not say how many they have.
        reset_limit: an elastic job ends when its ranks have changed more often.
        cooldown_range: seconds after which a host that has failed is tried again: (least, most).
        hosts: "node1:2,node2:2". Without it and without hostfile all ranks run here.
        hostfile: a file with lines "node1 slots=2".
        host_discovery_script: prints the hosts of an elastic job.
        start_timeout: seconds for hosts to answer and for ranks to meet.
        ssh_port, ssh_identity_file, ssh_strict_host_key_checking: as ssh's -p, -i and
            StrictHostKeyChecking.
        output_filename: a folder for the output of each rank.
        verbose: whether to say what is started where.
        use_mpi, mpi_args: whether to start with mpirun, and what to give it.
        network_interface, network_interfaces: what ranks use to talk.
        executable: another Python.
        env: replaces os.environ as the environment of the ranks.
        use_gloo, disable_cache: accepted for Horovod's sake.

    Returns:
        what func has returned on rank 0, 1, ….

    Raises:
        ValueError: arguments exclude each other.
        RuntimeError: a rank has died. An exception of a rank is raised as it is; its cause has rank and
            traceback.

    Example::

        results = dad.run(train, args=(10,), num_proc=2)
        dad.run(train, num_proc=4, min_num_proc=2, hosts="node1:2,node2:2")
    """
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other")
    count = num_proc if np is None else np
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    secret = secrets.token_hex(32)
    try:
        working_directory()
        where = _hosts(hosts, hostfile, max(count, most or 0), slots or 1)
        elastic = None
        if least is not None or host_discovery_script is not None:
            if use_mpi:
                raise ValueError("an elastic job needs use_gloo: mpirun cannot lose or gain ranks")
            elastic = make_plan(
                num_proc=None if num_proc == 1 and np is None else count,
                min_np=least,
                max_np=most,
                slots=slots,
                reset_limit=reset_limit,
                cooldown=cooldown_range,
                timeout=None,
                script=host_discovery_script,
                start_timeout=start_timeout,
            )
        elif most is not None or reset_limit is not None or cooldown_range is not None:
            raise ValueError(
                "max_num_proc, reset_limit and cooldown_range are for elastic jobs: give min_num_proc, too"
            )
        interfaces = network_interfaces or network_interface
        if elastic is not None:
            where, net = plan_elastic_network(where, elastic, interfaces)
        else:
            placed = assign_ranks(where, count)
            net = plan_network([slot.host for slot in placed], interfaces)
        environment = dict(os.environ if env is None else env)
        is_open = bool(use_mpi) and not has_secret(net, environment)
        with start_server(net, environment, is_open) as server:
            server.put(*FUNCTION, pack((func, tuple(args), dict(kwargs or {})), secret))
            command = [
                executable or sys.executable,
                "-m",
                "dad.runner.run_task",
                net.address,
                str(server.port),
            ]
            plan = LaunchPlan(
                hosts=where,
                command=command,
                num_proc=count,
                variables={SECRET_VARIABLE: secret, **_variables(environment, start_timeout)},
                environment=environment,
                ssh=SshOptions(ssh_port, ssh_identity_file, ssh_strict_host_key_checking),
                interfaces=interfaces,
                output_dir=output_filename,
                start_timeout=start_timeout or DEFAULT_START_TIMEOUT_SECONDS,
                verbose=bool(verbose),
            )
            if elastic is not None:
                outcome = run_elastic(plan, elastic, net, server)
                code, count = outcome.code, outcome.num_ranks
            elif use_mpi:
                code = launch_with_mpirun(plan, mpi_args, server=server)
            else:
                code = launch(plan, server)
            return _results(server, secret, count, code)
    except LaunchError as error:
        raise RuntimeError(str(error)) from None


def _hosts(hosts: str | None, hostfile: str | None, count: int, slots: int) -> list[Host]:
    if hosts is not None:
        return parse_hosts(hosts, slots)
    if hostfile is not None:
        return parse_hostfile(hostfile, slots)
    if count < 1:
        raise LaunchError(f"num_proc={count}: at least one process is needed")
    return [Host("localhost", count)]


def _variables(environment: dict[str, str], start_timeout: float | None) -> dict[str, str]:
    """The ranks must be able to import what this process has imported."""
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    installed = (sys.prefix, sys.base_prefix)
    ours = [os.path.abspath(entry) for entry in sys.path]
    ours = [entry for entry in ours if not entry.startswith(installed)]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*ours, *inherited])))}
    if start_timeout is not None:
        variables["DAD_START_TIMEOUT"] = variables["HOROVOD_START_TIMEOUT"] = f"{start_timeout:g}"
    return variables


def _results(server: RendezvousServer, secret: str, count: int, code: int) -> list[Any]:
    if code == 130:
        raise KeyboardInterrupt
    packed = [server.get(RESULT_SCOPE, str(rank)) for rank in range(count)]
    answers = [None if data is None else unpack(data, secret) for data in packed]
    failures = [(rank, answer) for rank, answer in enumerate(answers) if answer and answer[0] == "error"]
    # A rank that only noticed the end of another rank is not to blame.
    failures.sort(key=lambda failure: isinstance(failure[1][1], DadInternalError))
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if failures and not (silent and isinstance(failures[0][1][1], DadInternalError)):
        rank, (_, error, text) = failures[0]
        raise error from RankTraceback(rank, text)
    if silent or code != 0:
        raise RuntimeError(
            f"dad.run failed with exit code {code}: no result from {len(silent)} of {count} ranks "
            f"({', '.join(map(str, silent))}); their output is above"
        )
    return [answer[1] for answer in answers if answer is not None]
