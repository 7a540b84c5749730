"""Joins the traces of several ranks on one clock.

Each rank's trace counts microseconds from its own start. Its first event says when that was
(`start_unix_us`) and how far the rank's clock is from rank 0's (`offset_to_rank0_us`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
CLOCK_EVENT = "dad_clock"
# Apart from other ranks' numbers, where a trace uses process ids of its own.
_PIDS_PER_RANK = 1_000_000


class TimelineError(ValueError):
    """A file is not a trace of dad."""


def merge(output: str, inputs: list[str]) -> int:
    """Writes the joined trace and returns the number of its events."""
    traces = {}
    for path in inputs:
        events = read_trace(path)
        clock = _clock_of(path, events)
        rank = int(clock["rank"])
        if rank in traces:
            raise TimelineError(f"{path}: a trace of rank {rank} was given already")
        traces[rank] = (events, float(clock["start_unix_us"]) + float(clock["offset_to_rank0_us"]))
    zero = min(start for _, start in traces.values())
    merged: list[Event] = []
    for rank, (events, start) in sorted(traces.items()):
        merged += _shifted(rank, events, start - zero)
    # Metadata first, then in order of time: some viewers want it so.
    merged.sort(key=lambda event: event.get("ts", -1))
    Path(output).write_text(json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}))
    return len(merged)


def read_trace(path: str) -> list[Event]:
    """The events of a file; also of one whose writer was killed in the middle of a line."""
    text = Path(path).read_text(errors="replace").strip()
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = _whole_events(path, text)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise TimelineError(f"{path} is not a Chrome trace: expected a list of events")
    return [event for event in events if isinstance(event, dict) and event]


def _whole_events(path: str, text: str) -> list[Event]:
    """What can be read of an unfinished list."""
    start = text.find("[")
    if start < 0:
        raise TimelineError(f"{path} is not a Chrome trace: no list of events")
    decoder = json.JSONDecoder()
    events: list[Event] = []
    position = start + 1
    while True:
        while position < len(text) and text[position] in ", \r\n\t":
            position += 1
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return events
        events.append(event)


def _clock_of(path: str, events: list[Event]) -> dict[str, Any]:
    for event in events:
        if event.get("name") == CLOCK_EVENT:
            clock = event.get("args", {})
            missing = {"rank", "start_unix_us", "offset_to_rank0_us"} - set(clock)
            if missing:
                raise TimelineError(f"{path}: the event {CLOCK_EVENT} lacks {', '.join(sorted(missing))}")
            return dict(clock)
    raise TimelineError(f"{path} has no event {CLOCK_EVENT}; was it written by dad?")


def _shifted(rank: int, events: list[Event], shift_us: float) -> list[Event]:
    own_pids = any(event.get("pid", rank) != rank for event in events)
    named = any(event.get("name") == "process_name" for event in events)
    out: list[Event] = []
    if not named and not own_pids:
        name = {"name": f"rank {rank}"}
        out.append({"name": "process_name", "ph": "M", "pid": rank, "args": name})
    for event in events:
        event = dict(event)
        if own_pids and "pid" in event:
            event["pid"] = (rank + 1) * _PIDS_PER_RANK + int(event["pid"])
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
        if "ts" in event:
            event["ts"] = event["ts"] + shift_us
        if "id" in event:
            event["id"] = f"{rank}:{event['id']}"  # ids are shared by all processes of a trace
        out.append(event)
    return out
