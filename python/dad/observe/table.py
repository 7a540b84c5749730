"""The table of `dad inspect`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dad.rank_groups import name_ranks

Snapshot = dict[str, Any]


def table(snapshots: Sequence[Snapshot], job: str, asked: int, size: int) -> str:
    """What the ranks that answered are doing, as text. asked: the rank that asked the others."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [f"job {job} at {now}: {len(snapshots)} of {size} ranks have answered rank {asked}"]
    silent = sorted(set(range(size)) - {one["rank"] for one in snapshots})
    if silent:
        lines.append(
            f"no answer from {name_ranks(silent)}: stopped, overloaded, gone, or its host cannot be reached"
        )
    lines += ["", *_overview(snapshots), *_open(snapshots), *_stacks(snapshots)]
    return "\n".join(lines) + "\n"


def _overview(snapshots: Sequence[Snapshot]) -> list[str]:
    rows = [
        ("rank", "process", "queue", "batches", "last cycle", "last result", "last submitted", "main thread")
    ]
    for one in snapshots:
        last = one["last_submitted"]
        rows.append(
            (
                str(one["rank"]),
                f"{one['hostname']}:{one['pid']}",
                str(one["num_requests"]),
                str(one["num_batches"]),
                _ago(one["since_cycle"]),
                _ago(one["since_result"]),
                f"{last} {_ago(one['since_submit'])}" if last else "nothing",
                one["error"] and f"FAILED: {one['error']}" or one["where"] or "not known",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _ago(seconds: float) -> str:
    return "never" if seconds < 0 else f"{seconds:.1f} s ago"


def _open(snapshots: Sequence[Snapshot]) -> list[str]:
    lines = []
    for one in snapshots:
        number = one["rank"]
        for kind, total in (("requests", one["num_requests"]), ("batches", one["num_batches"])):
            shown = one[kind]
            for entry in shown:
                waits = f", waits for {name_ranks(entry['waits_for'])}" if entry["waits_for"] else ""
                part = f", round {entry['round'] + 1} of {entry['num_rounds']}" if kind == "batches" else ""
                what = entry["what"] if kind == "requests" else f"batch of {entry['what']}"
                lines.append(f"  rank {number}: {what}, for {entry['seconds']:.1f} s{part}{waits}")
            if total > len(shown):
                lines.append(f"  rank {number}: and {total - len(shown)} more {kind}")
        for name, ranks in one["missing"]:
            verb = "has" if len(ranks) == 1 else "have"
            lines.append(f'  rank {number}: {name_ranks(ranks)} {verb} submitted "{name}", this rank has not')
        if one["joined"]:
            lines.append(f"  rank {number}: has called join()")
    return ["", "open:", *lines] if lines else ["", "open: nothing"]


def _stacks(snapshots: Sequence[Snapshot]) -> list[str]:
    """Ranks with the same stack share an entry."""
    groups: dict[str, list[int]] = {}
    for one in snapshots:
        groups.setdefault(one["stack"], []).append(one["rank"])
    lines = []
    for stack, ranks in groups.items():
        lines += ["", f"main thread of {name_ranks(ranks)}, the innermost line last:"]
        lines += [f"  {line}" for line in stack.splitlines()] or ["  not known"]
    return lines
