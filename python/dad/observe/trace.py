"""The timeline of one step, for the report: a trace of one second, of which the slowest step is kept."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dad._lib import _core

_WAITS = ("WAIT_FOR_BATCH", "NEGOTIATE_")
_MOST_TENSORS = 600


class StepTrace:
    """Traces from start() to stop(). There is one trace at a time; a user's own trace takes precedence."""

    def __init__(self) -> None:
        self._file: Path | None = None

    @property
    def is_running(self) -> bool:
        return self._file is not None

    def start(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="dad_trace_")
        os.close(descriptor)
        self._file = Path(name)
        _core.start_timeline(name, False)

    def stop(self) -> dict[str, Any] | None:
        """The slowest traced step; None if there was none."""
        if self._file is None:
            return None
        _core.stop_timeline()
        file, self._file = self._file, None
        try:
            return slowest_step(json.loads(file.read_text()))
        except ValueError:
            return None
        finally:
            file.unlink(missing_ok=True)


def slowest_step(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """A trace as {"step", "tensors": [[name, submitted, first byte, result, last rank], …]}, times in µs from
    the first submit. The first and the last step of a trace may be cut off."""
    names: dict[int, str] = {}
    steps: dict[int, dict[str, list[Any]]] = {}
    for event in events:
        arguments = event.get("args", {})
        if event.get("ph") == "M":
            if "tensor" in arguments:
                names[event["pid"]] = arguments["tensor"]
            continue
        step, name = arguments.get("step"), names.get(event.get("pid", -1))
        if event.get("ph") != "X" or step is None or name is None:
            continue
        row = steps.setdefault(step, {}).setdefault(name, [name, None, None, None, -1])
        if event["name"].startswith(_WAITS):
            row[1] = event["ts"]
        elif not event["name"].startswith("ROUND_"):
            row[2], row[3] = event["ts"], event["ts"] + event["dur"]
            row[4] = arguments.get("last_rank", -1)
    whole = {
        step: complete
        for step, rows in steps.items()
        if (complete := [row for row in rows.values() if None not in row[1:4]])
    }
    most = max(map(len, whole.values()), default=0)
    whole = {step: rows for step, rows in whole.items() if len(rows) == most}
    inner = sorted(whole)[1:-1] or sorted(whole)
    if not inner:
        return None

    def length(step: int) -> int:
        return int(max(row[3] for row in whole[step]) - min(row[1] for row in whole[step]))

    slowest = max(inner, key=length)
    begin = min(row[1] for row in whole[slowest])
    rows = sorted(whole[slowest], key=lambda row: row[1])
    shifted = [[name, a - begin, b - begin, c - begin, last] for name, a, b, c, last in rows]
    return {"step": slowest, "tensors": shifted[:_MOST_TENSORS]}
