"""The command dad."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dad._version import __version__
from dad.suggest import Parser

OVERLAY = Path(__file__).parent / "_overlay"


def main(argv: list[str] | None = None) -> int:
    args = _make_parser().parse_args(argv)
    result: int = args.run(args)
    return result


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dad",
        description="Small tools around dad; dadrun (dadrun --help) starts jobs.",
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    timeline = commands.add_parser("timeline", help="work with traces of DAD_TIMELINE or start_timeline()")
    actions = timeline.add_subparsers(required=True, metavar="action")
    merge = actions.add_parser(
        "merge",
        help="join the traces of several ranks on one clock",
        epilog="example: dad timeline merge all.json trace.json trace.json.1",
    )
    merge.add_argument("output", help="file to write; open it in chrome://tracing or ui.perfetto.dev")
    merge.add_argument("inputs", nargs="+", help="one trace per rank")
    merge.set_defaults(run=_merge)
    overlay = commands.add_parser(
        "overlay",
        help="print the PYTHONPATH with which horovodrun and import horovod.torch run on dad",
        epilog="example: PYTHONPATH=$(dad overlay) horovodrun -np 2 python train.py",
    )
    overlay.set_defaults(run=_overlay)
    plan = commands.add_parser(
        "plan",
        help="run a script for a few steps in one process: what would every method send and take?",
        epilog="example: dad plan --size 8 --link 100mbit,25ms train.py --batch-size 64",
    )
    plan.add_argument("--size", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    plan.add_argument(
        "--link",
        default="100mbit",
        metavar="RATE[,DELAY]",
        help="what a rank can send, and the delay one way: 100mbit,25ms (default: %(default)s)",
    )
    plan.add_argument(
        "--methods", nargs="+", default=[], metavar="METHOD", help="only these, such as rank_dad:rank=8"
    )
    plan.add_argument("--width", type=int, metavar="N", help="of the table (default: the terminal's)")
    plan.add_argument("command", nargs=argparse.REMAINDER, help="the script, and its arguments")
    plan.set_defaults(run=_plan)
    report = commands.add_parser(
        "report",
        help="make a page of what dadrun --report has written",
        epilog="example: dadrun --report run.jsonl python train.py; dad report run.jsonl -o report.html",
    )
    report.add_argument("file", help="what dadrun --report (DAD_REPORT) has written")
    report.add_argument("-o", "--output", default="report.html", help="the page (default: %(default)s)")
    report.add_argument("--job", help="which job of the file (default: the last one)")
    report.set_defaults(run=_report)
    inspect = commands.add_parser(
        "inspect",
        help="print what all ranks of a running job are doing: open collectives, and where their scripts are",
        epilog="on a host of the job, as its user; kill -USR1 to dadrun or to a rank prints the same there",
    )
    inspect.add_argument("--pid", type=int, help="of dadrun, or of a rank (default: the only job here)")
    inspect.add_argument("--job", help="the name of the job")
    inspect.set_defaults(run=_inspect)
    top = commands.add_parser(
        "top",
        help="show what a running job sends",
        epilog="example: dadrun --report run.jsonl python train.py & dad top run.jsonl",
    )
    top.add_argument("file", help="the one that dadrun --report (DAD_REPORT) was given")
    top.add_argument("--once", action="store_true", help="print the present state, and end")
    top.add_argument("--wait", type=float, default=0.0, metavar="S", help="for a job to begin")
    top.set_defaults(run=_top)
    env = commands.add_parser("env", help="print what a bug report needs to say of this machine")
    env.set_defaults(run=_env)
    options = commands.add_parser("options", help="print the table of settings")
    options.set_defaults(run=_options)
    return parser


def _merge(args: argparse.Namespace) -> int:
    from dad.timeline import TimelineError, merge

    try:
        count = merge(args.output, args.inputs)
    except (OSError, TimelineError) as error:
        print(f"dad: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {count} events of {len(args.inputs)} ranks")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from dad.planning.script import plan_script

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    # After the script there may be our own options, too: it is told the rest.
    try:
        return plan_script(command, args.size, args.link, args.methods, args.width)
    except ValueError as error:
        print(f"dad: {error}", file=sys.stderr)
        return 2


def _report(args: argparse.Namespace) -> int:
    from dad.observe.page import ReportError, page, read_report

    try:
        jobs = read_report(args.file)
        job = args.job or list(jobs)[-1]
        if job not in jobs:
            raise ReportError(f"{args.file}: no job {job}; there are {', '.join(jobs)}")
        Path(args.output).write_text(page(job, jobs[job]))
    except (OSError, ReportError) as error:
        print(f"dad: {error}", file=sys.stderr)
        return 1
    others = f"; {len(jobs) - 1} more in the file (--job)" if len(jobs) > 1 else ""
    print(f"{args.output}: job {job}, {len(jobs[job])} ranks{others}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from dad.observe.inspect import inspect

    return inspect(args.job, args.pid)


def _top(args: argparse.Namespace) -> int:
    from dad.observe.top import TopError, top

    try:
        top(args.file, args.once, args.wait)
    except TopError as error:
        print(f"dad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _env(_args: argparse.Namespace) -> int:
    from dad.observe.environment import environment

    found = environment()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name.ljust(width)}  {value}")
    return 0


def _overlay(_args: argparse.Namespace) -> int:
    # What is on the path already stays: the caller is about to replace PYTHONPATH.
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    print(os.pathsep.join([str(OVERLAY), *(entry for entry in rest if entry != str(OVERLAY))]))
    return 0


def _options(_args: argparse.Namespace) -> int:
    from dad.variables import Variable, sections

    try:
        tables = sections()
    except ImportError as error:
        print(f"dad: the core is not built here ({error}); build it: pip install .", file=sys.stderr)
        return 1
    head = Variable("name", "default", "variable", "Horovod's variable", "meaning")
    rows = [head, *(row for table in tables.values() for row in table)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print("  ".join([*cells, row.meaning]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
