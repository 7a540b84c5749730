"""Adds up what gcov says of each object file (JSON on standard input) and prints a table by folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def merge(documents: Iterable[str], source: str) -> dict[str, dict[int, bool]]:
    """Of each file below `source`, whether a line is reached by any object that contains it."""
    reached: dict[str, dict[int, bool]] = defaultdict(dict)
    for document in documents:
        if not document.strip():
            continue
        read = json.loads(document)
        for file in read["files"]:
            path = (Path(read["current_working_directory"]) / file["file"]).resolve()
            if not path.is_relative_to(ROOT / source):
                continue
            lines = reached[str(path.relative_to(ROOT))]
            for line in file["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, False) or line["count"] > 0
    return reached


def ranges(numbers: list[int]) -> str:
    """3, 5-8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="only files below this folder")
    parser.add_argument("--show", help="the lines that nothing reaches, of files below this one")
    arguments = parser.parse_args()
    reached = merge(sys.stdin, arguments.source)
    if not reached:
        print("coverage: gcov has said nothing", file=sys.stderr)
        return 1
    folders: dict[str, list[bool]] = defaultdict(list)
    for path, lines in reached.items():
        for folder in ("all", str(Path(path).parent)):
            folders[folder] += lines.values()
    for folder, lines_of_folder in sorted(folders.items(), key=lambda one: sum(one[1]) / len(one[1])):
        share = sum(lines_of_folder) / len(lines_of_folder)
        print(f"{100 * share:5.1f} %  {sum(lines_of_folder):6} of {len(lines_of_folder):6}  {folder}")
    for path, lines in sorted(reached.items()):
        missed = sorted(number for number, is_reached in lines.items() if not is_reached)
        if arguments.show and path.startswith(arguments.show) and missed:
            print(f"{path}: {ranges(missed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
