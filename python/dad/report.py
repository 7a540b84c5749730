"""DAD_REPORT=FILE: every rank adds a line of JSON with its statistics when it ends.

    {"job": "20261118-162233-5f3a9c", "time": "2026-11-18T16:25:01+00:00", "rank": 0, "size": 2, "stats": {…}}

job is the same for all ranks of a job, time is when the line was written, stats is what dad.stats() returns.
A rank that was stopped by a signal adds "ended_by". Rank 0 adds "samples" (observe/samples.py) and, where
there is a plan, "plan": its rows when it had been measured, and "exposed_ms", which a step waited then;
"step" is the trace of one step. "events" are warnings of this rank, and on rank 0 the plans that were made.
`dad report` makes a page of the file. While the job runs, FILE.live has its present state, for `dad top`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from dad._lib import _core
from dad.observe.files import live_path
from dad.observe.samples import Samples
from dad.world import job_id

_pid: int | None = None  # the process that listens for the signal
_samples: Samples | None = None
_plan: list[dict[str, Any]] | None = None
_exposed_ms: float | None = None
_events: list[dict[str, Any]] = []
_began = time.monotonic()
_listens = False  # to warnings
_has_own_timeline = False  # the script, or its user
_MOST_EVENTS = 200


def path() -> str | None:
    return os.environ.get("DAD_REPORT") or None


def begin() -> None:
    """Called when ranks have met. Rank 0 takes samples from now on."""
    global _samples, _listens, _began
    file = path()
    if file is None:
        return
    if not _listens:
        _listens, _began = True, time.monotonic()
        logging.getLogger("dad").addHandler(_Warnings())
    if _core.rank() == 0:
        settings = (os.environ.get("DAD_TIMELINE"), os.environ.get("HOROVOD_TIMELINE"))
        traces = not (_has_own_timeline or any(settings))
        _samples = Samples(_live, live_path(file), traces)
        _samples.start()


class _Warnings(logging.Handler):
    """What dad warns of belongs to the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        note_event("warning" if record.levelno < logging.ERROR else "error", record.getMessage())


def note_event(kind: str, text: str) -> None:
    """Something that happened on this rank: a plan, or a warning."""
    if path() is not None and len(_events) < _MOST_EVENTS:
        _events.append({"seconds": round(time.monotonic() - _began, 1), "kind": kind, "text": text})


def leave_timeline_to_user() -> None:
    """There is one trace at a time, and a user's comes first."""
    global _has_own_timeline
    _has_own_timeline = True
    if _samples is not None:
        _samples.end_trace()


def note_plan(rows: Sequence[dict[str, Any]], exposed_ms: float | None = None) -> None:
    """Keeps the rows of a plan for the report, beside those of other optimizers."""
    global _plan, _exposed_ms
    if path() is not None:
        _plan = [*(_plan or []), *(dict(row) for row in rows)]
        if exposed_ms is not None:
            _exposed_ms = exposed_ms + (_exposed_ms or 0.0)


def _live(stats: dict[str, Any], seconds: float) -> dict[str, Any]:
    methods = {row["name"]: row["method"] for row in _plan or ()}
    return {
        "job": job_id(),
        "pid": os.getpid(),
        "size": _core.size(),
        "seconds": seconds,
        "stats": stats,
        "methods": methods,
        "events": _events[-5:],
    }


def write(ended_by: str | None = None) -> None:
    """`ended_by`: the signal that stopped this rank before its end."""
    global _samples, _plan, _exposed_ms
    file = path()
    if file is None:
        return
    report = {
        "job": job_id(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rank": _core.rank(),
        "size": _core.size(),
        "stats": _core.stats(),
    }
    if ended_by is not None:
        report["ended_by"] = ended_by
    if _samples is not None:
        report["samples"] = _samples.stop()
        if _samples.step is not None:
            report["step"] = _samples.step
        _samples = None
    if _plan is not None:
        report["plan"], _plan = _plan, None
    if _exposed_ms is not None:
        report["exposed_ms"], _exposed_ms = _exposed_ms, None
    if _events:
        report["events"] = list(_events)
        _events.clear()
    # One write() in append mode: lines of ranks that end together do not mix.
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(report, default=str) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        from dad.log import log

        # The others still wait for our goodbye.
        log.error("DAD_REPORT=%s could not be written: %s", file, error.strerror)


def write_when_stopped() -> None:
    """SIGTERM, with which a launcher stops its ranks, ends a process without a word; unless it has other
    plans for the signal, it writes its report first."""
    global _pid
    if path() is None or _pid == os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    others = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(read_end)
        os.close(write_end)
        return
    _pid = os.getpid()
    # Python's handlers wait for the main thread, which may be in a collective: a byte in the pipe does not.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A child that gets the signal before it has dropped the handler would write to our pipe.
    os.register_at_fork(before=_hold_signal, after_in_parent=_let_signal_in, after_in_child=_leave_to_parent)
    threading.Thread(target=_listen, args=(read_end,), name="dad report", daemon=True).start()


def _listen(read_end: int) -> None:
    while signal.SIGTERM not in os.read(read_end, 64):
        pass
    try:
        if _core.is_initialized():
            write(ended_by="SIGTERM")
    finally:
        os._exit(128 + signal.SIGTERM)


def _hold_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_signal_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _leave_to_parent() -> None:
    global _pid
    if _pid is not None:
        _pid = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_signal_in()
