"""The command dad."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

OVERLAY = Path(__file__).parent / "_overlay"


def main(argv: list[str] | None = None) -> int:
    args = _make_parser().parse_args(argv)
    result: int = args.run(args)
    return result


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dad",
        description="Small tools around dad; dadrun (dadrun --help) starts jobs.",
        allow_abbrev=False,
    )
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


def _overlay(_args: argparse.Namespace) -> int:
    # What is on the path already stays: the caller is about to replace PYTHONPATH.
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    print(os.pathsep.join([str(OVERLAY), *(entry for entry in rest if entry != str(OVERLAY))]))
    return 0


def _options(_args: argparse.Namespace) -> int:
    try:
        from dad._lib import _core
    except ImportError as error:
        print(f"dad: the core is not built here ({error}); build it: pip install .", file=sys.stderr)
        return 1
    head = ("name", "default", "variable", "Horovod's variable")
    rows = [tuple(row) for row in _core.option_table()]
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [(*head, "meaning"), *rows]:
        print("  ".join([*(str(row[i]).ljust(widths[i]) for i in range(len(head))), str(row[4])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
