"""What a job has sent and reached over time, for its report and for `dad top`.

Rank 0 records a few numbers every second. When there are MOST of them, every other one is dropped and the
interval doubles, so a job of any length has between half of MOST and MOST. One step is traced in an early
second. If there is a live file, it has the state of the last second.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dad._lib import _core
from dad.observe.trace import StepTrace

MOST = 240
_SECONDS = 1.0
# Before this step, ranks still settle on what travels together.
_TRACED_AFTER_STEPS = 5


class Samples:
    """Takes samples of the core's statistics on a thread of its own, from start() to stop().

    live: gets the content of the live file, and the seconds since the start.
    """

    def __init__(
        self,
        live: Callable[[dict[str, Any], float], dict[str, Any]] | None = None,
        live_file: Path | None = None,
        traces: bool = False,
    ) -> None:
        self._every = 1  # one sample is kept of this many seconds
        self._seconds = 0  # seconds that have passed
        self._samples: list[dict[str, Any]] = []
        self._began = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live = live
        self._live_file = live_file
        self._trace = StepTrace() if traces else None
        self._lock = threading.Lock()  # of the trace
        self.step: dict[str, Any] | None = None  # the step that was traced

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dad report samples", daemon=True)
        self._thread.start()

    def stop(self) -> list[dict[str, Any]]:
        """The samples, with a last one of now. The core must still be there."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.end_trace()
            self.note(time.monotonic() - self._began, _core.stats())
        if self._live_file is not None:
            self._live_file.unlink(missing_ok=True)
        return self._samples

    def end_trace(self) -> None:
        """Ends a running trace, and starts no other: the user wants another one."""
        with self._lock:
            if self._trace is not None and self._trace.is_running:
                self.step = self._trace.stop()
            self._trace = None

    def note(self, seconds: float, stats: dict[str, Any]) -> None:
        effective = {
            name: tensor["effective"] for name, tensor in stats["tensors"].items() if "effective" in tensor
        }
        self._samples.append(
            {
                "seconds": round(seconds, 3),
                "steps": stats["steps"],
                "wire_bytes_sent": stats["wire_bytes_sent"],
                "effective": effective,
            }
        )
        if len(self._samples) >= MOST:
            del self._samples[1::2]
            self._every *= 2

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            if not _core.is_initialized():
                continue
            self._seconds += 1
            seconds, stats = time.monotonic() - self._began, _core.stats()
            if self._seconds % self._every == 0:
                self.note(seconds, stats)
            self._trace_a_second(stats["steps"])
            self._write_live(stats, seconds)

    def _trace_a_second(self, steps: int) -> None:
        with self._lock:
            if self._trace is None or steps < _TRACED_AFTER_STEPS:
                return
            if not self._trace.is_running:
                self._trace.start()
                return
        self.end_trace()

    def _write_live(self, stats: dict[str, Any], seconds: float) -> None:
        if self._live_file is None or self._live is None:
            return
        # A reader sees either the previous file or this one.
        beside = self._live_file.with_name(self._live_file.name + ".new")
        try:
            beside.write_text(json.dumps(self._live(stats, seconds), default=str))
            os.replace(beside, self._live_file)
        except OSError:
            self._live_file = None  # for example a full disk; the report itself reports that
