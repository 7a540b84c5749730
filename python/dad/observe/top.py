"""`dad top run.jsonl`: shows in the terminal what a job sends now. Rank 0 of a job with `dadrun --report
FILE` writes FILE.live every second. Nothing else is read, so it works on the host of rank 0."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dad.observe.files import live_path
from dad.planning.text import format_bytes

State = dict[str, Any]
_CLEAR = "\x1b[H\x1b[2J"
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"
_SECONDS = 1.0
_STALE_SECONDS = 5.0


class TopError(ValueError):
    """There is no running job with this report."""


def read_live(report: str | Path) -> State | None:
    """The state of the job that writes this report; None if none is running."""
    try:
        text = live_path(report).read_text()
    except OSError:
        return None
    state: State = json.loads(text)
    return state


def is_alive(state: State) -> bool:
    """Whether the rank that wrote it still exists."""
    try:
        os.kill(int(state["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def show(state: State, before: State | None, width: int, height: int, colour: bool = True) -> str:
    """The screen. before: an earlier state of the same job, for rates; None: rates of the whole job."""
    bold, red, plain = (_BOLD, _RED, _PLAIN) if colour else ("", "", "")
    stats, old = state["stats"], before["stats"] if before else None
    over = state["seconds"] - (before["seconds"] if before else 0.0)

    def rate(now: float, then: float) -> float:
        return max(0.0, now - then) / over if over > 0 else 0.0

    steps = rate(stats["steps"], old["steps"] if old else 0)
    sent = rate(stats["wire_bytes_sent"], old["wire_bytes_sent"] if old else 0)
    received = rate(stats["wire_bytes_received"], old["wire_bytes_received"] if old else 0)
    ratio = stats["dense_bytes"] / stats["wire_bytes_sent"] if stats["wire_bytes_sent"] else 0.0
    lines = [
        f"{bold}{state['job']}{plain}: {state['size']} ranks, {_clock(state['seconds'])}, "
        f"step {stats['steps']:,}, {steps:.3g} steps/s",
        f"rank 0 sends {format_bytes(sent)}/s, receives {format_bytes(received)}/s; "
        f"{format_bytes(stats['wire_bytes_sent'])} sent, {ratio:.3g}x fewer than dense"[:width],
    ]
    for event in state["events"][-2:]:
        mark = "" if event["kind"] == "plan" else red
        lines.append(
            f"{mark}{event['seconds']:g} s {event['kind']}: {event['text']}"[: width + len(mark)] + plain
        )
    tensors = stats["tensors"]
    then = old["tensors"] if old else {}

    def grown(name: str) -> float:
        return rate(tensors[name]["wire_bytes_sent"], then.get(name, {}).get("wire_bytes_sent", 0))

    names = sorted(tensors, key=lambda name: (-grown(name), -tensors[name]["wire_bytes_sent"]))
    header = ("tensor", "method", "sent/s", "sent", "fewer", "effective", "worst ms", "last rank")
    rows = [_row(name, tensors[name], state["methods"].get(name, ""), grown(name)) for name in names]
    room = max(1, height - len(lines) - 3)
    left = len(rows) - room
    lines.append("")
    lines += [line[:width] for line in _columns(header, rows[:room], width)]
    if left > 0:
        lines.append(f"and {left} more tensors")
    return "\n".join(lines)


def _row(name: str, tensor: State, method: str, per_second: float) -> list[str]:
    effective, worst = tensor.get("effective"), tensor.get("worst") or {}
    late = worst.get("last_rank", -1)
    reached = "" if effective is None else f"rank {effective:.0f}" if effective >= 1 else f"{effective:.2%}"
    return [
        name,
        method,
        format_bytes(per_second),
        format_bytes(tensor["wire_bytes_sent"]),
        f"{tensor['ratio']:.3g}x" if tensor.get("ratio") else "",
        reached,
        f"{1e3 * worst['seconds']:.3g}" if worst else "",
        str(late) if late >= 0 else "",
    ]


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    # Long names are cut so that the numbers fit.
    others = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = max(12, min(widths[0], width - others))
    lines = []
    for row in [header, *rows]:
        name = row[0] if len(row[0]) <= widths[0] else f"…{row[0][-(widths[0] - 1) :]}"
        cells = [name.ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(size) for cell, size in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def top(
    report: str, once: bool = False, wait: float = 0.0, pause: Callable[[float], None] = time.sleep
) -> None:
    """Shows the job until it ends, or until Ctrl-C.

    Args:
        report: the file of dadrun --report.
        once: prints the state once, and returns.
        wait: for a job that begins, so many seconds at most.
        pause: between two looks.

    Raises:
        TopError: no job with this report is running.
    """
    ends = time.monotonic() + wait
    while (state := read_live(report)) is None and time.monotonic() < ends:
        pause(0.2)
    if state is None:
        raise TopError(
            f"{report}: no job with this report is running on this host; start one with dadrun --report "
            f"{report} …, or see one that has ended: dad report {report}"
        )
    if not is_alive(state):
        raise TopError(f"{report}: its job was killed at step {state['stats']['steps']}: dad report {report}")
    before: State | None = None
    changed = time.monotonic()
    while state is not None:
        size = shutil.get_terminal_size((100, 30))
        if once:
            print(show(state, None, max(size.columns, 60), 10_000, colour=False))
            return
        screen = show(state, before, size.columns, size.lines)
        if time.monotonic() - changed > _STALE_SECONDS:
            if not is_alive(state):
                break
            screen += f"\n{_RED}no news for {time.monotonic() - changed:.0f} s{_PLAIN}"
        sys.stdout.write(_CLEAR + screen + "\n")
        sys.stdout.flush()
        pause(_SECONDS)
        latest = read_live(report)
        if latest is not None and latest["seconds"] != state["seconds"]:
            before, changed = state, time.monotonic()
        state = latest
    print(f"the job has ended: dad report {report}")
