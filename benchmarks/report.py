"""What a benchmark gives back, how it is printed, and the command line of each script."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab import LaunchError, Link, launch, why_not

Row = dict[str, Any]


AddOptions = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Settings:
    quick: bool = False
    # A script's own flags, where it was called by itself.
    options: argparse.Namespace | None = None

    def options_or_defaults(self, add_options: AddOptions) -> argparse.Namespace:
        if self.options is not None:
            return self.options
        parser = argparse.ArgumentParser()
        add_options(parser)
        return parser.parse_args([])


@dataclass
class Result:
    """The rows of a table, all with the same keys; and what was not measured, with the reason."""

    title: str
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [self.title, *_table(self.rows)]
        lines += [f"left out: {reason}" for reason in self.left_out]
        lines += [f"failed: {reason}" for reason in self.failed]
        return "\n".join(lines)


def measure_on(
    links: Iterable[Link],
    benchmark: str,
    parameters: Callable[[Link], dict[str, Any]],
    result: Result,
    timeout: float = 900,
) -> None:
    """Adds the rows that rank 0 of 4 reports on each link; notes where that was not possible."""
    for link in links:
        reason = why_not(link)
        if reason:
            result.left_out.append(f"{link}: {reason}")
            continue
        progress(f"{benchmark}: 4 ranks, link {link}")
        try:
            rows = launch(benchmark, parameters(link), link=link, timeout=timeout)[0]
        except LaunchError as error:
            result.failed.append(f"{link}: {error}")
            continue
        result.rows += [{"link": str(link)} | row for row in rows]


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def exit_on_sigterm() -> None:
    """So that a lab is taken down whichever way the run is ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main(
    run: Callable[[Settings], Result], description: str | None, add_options: AddOptions | None = None
) -> int:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells and less time for each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args()
    exit_on_sigterm()
    result = run(Settings(quick=arguments.quick, options=arguments))
    print(result.text())
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 1 if result.failed else 0


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return ["nothing was measured"]
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    is_text = [isinstance(rows[0][column], str) for column in columns]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
