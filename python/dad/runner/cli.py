"""The command dadrun."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace

from dad._version import __version__
from dad.runner.elastic.launch import ElasticPlan, launch_elastic
from dad.runner.elastic.options import elastic_plan
from dad.runner.errors import LaunchError
from dad.runner.flags import make_parser
from dad.runner.hosts import Host, parse_hostfile, parse_hosts
from dad.runner.launch import DEFAULT_START_TIMEOUT_SECONDS, LaunchPlan, launch
from dad.runner.settings import read_config_file, variables_from
from dad.runner.ssh import SshOptions

# Exit codes of a job that --restarts must not start again.
STOPPED_BY_USER = tuple(
    128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except LaunchError as error:
        print(f"dadrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.version:
        print(__version__)
        return 0
    if args.check_build:
        from dad.runner.check_build import describe_build

        print(describe_build())
        return 0
    if args.config_file:
        read_config_file(args)
    if args.controller == "jsrun":
        raise LaunchError("--jsrun is not supported; use --gloo (the default) or --mpi")
    if args.doctor and args.gpu:
        from dad.runner.doctor_gpu import examine_gpu

        return examine_gpu(args.num_proc)
    if args.doctor:
        from dad.runner.doctor import examine

        hosts = _hosts(args) if args.hosts or args.hostfile else []
        return examine(hosts, _ssh(args), _interfaces(args))
    before = _lines(args.report)
    code = _launch(args)
    if args.report and code != 0:
        ranks = _lines(args.report) - before
        print(f"dadrun: {args.report} has the report of {ranks} ranks, up to their end", file=sys.stderr)
    return code


def _lines(report: str | None) -> int:
    """The number of lines of a report: one line per rank, earlier jobs included."""
    try:
        with open(report or "") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def _launch(args: argparse.Namespace) -> int:
    plan = _plan(args)
    elastic = elastic_plan(args)
    for attempt in range(1 + (args.restarts or 0)):
        if attempt > 0:
            print(f"dadrun: restart {attempt} of {args.restarts}", file=sys.stderr, flush=True)
        variables = {**plan.variables, "DAD_RESTART_COUNT": str(attempt)} if args.restarts else plan.variables
        code = _launch_once(args, replace(plan, variables=variables), elastic)
        if code == 0 or code in STOPPED_BY_USER:
            break
    return code


def _launch_once(args: argparse.Namespace, plan: LaunchPlan, elastic: ElasticPlan | None) -> int:
    if args.controller == "mpi":
        from dad.runner.mpi import launch_with_mpirun

        return launch_with_mpirun(plan, args.mpi_args, args.binding_args)
    if elastic is not None:
        return launch_elastic(plan, elastic).code
    return launch(plan)


def _plan(args: argparse.Namespace) -> LaunchPlan:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LaunchError("no command given; for example: dadrun -np 2 python train.py (dadrun --help)")
    if args.output == "split" and args.output_filename is None:
        raise LaunchError("--output split needs --output-filename DIR, where the output goes")
    if args.output == "split" and args.controller == "mpi":
        raise LaunchError("--output split does not work with --mpi: take --output-filename alone")
    return LaunchPlan(
        hosts=_hosts(args),
        command=command,
        num_proc=args.num_proc,
        variables=variables_from(args),
        ssh=_ssh(args),
        interfaces=_interfaces(args),
        output_dir=args.output_filename,
        timestamps=args.prefix_output_with_timestamp,
        output=args.output,
        start_timeout=args.start_timeout or DEFAULT_START_TIMEOUT_SECONDS,
        verbose=args.verbose,
    )


def _hosts(args: argparse.Namespace) -> list[Host]:
    slots = args.slots_per_host or 1
    if args.hosts:
        return parse_hosts(args.hosts, slots)
    if args.hostfile:
        return parse_hostfile(args.hostfile, slots)
    if args.host_discovery_script:
        return []
    given = [count for count in (args.max_np, args.num_proc, args.min_np) if count is not None]
    count = max(given, default=None)
    if count is None:
        raise LaunchError("how many processes? For example: dadrun -np 2 python train.py")
    if count < 1:
        raise LaunchError(f"-np {count}: at least one process is needed")
    return [Host("localhost", count)]


def _interfaces(args: argparse.Namespace) -> str | None:
    given = [args.network_interfaces, *(args.network_interface or [])]
    return ",".join(filter(None, given)) or None


def _ssh(args: argparse.Namespace) -> SshOptions:
    return SshOptions(args.ssh_port, args.ssh_identity_file, args.ssh_strict_host_key_checking)


if __name__ == "__main__":
    sys.exit(main())
