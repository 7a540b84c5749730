"""What a job has sent and reached over time, for its report.

Rank 0 notes a few numbers every second; whenever there are MOST of them, every other one is dropped and the
interval doubles, so a job of any length has between half as many and MOST.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dad._lib import _core

MOST = 240


class Samples:
    """Takes samples of the core's statistics on a thread of its own, from start() to stop()."""

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self._samples: list[dict[str, Any]] = []
        self._began = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

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
            self.note(time.monotonic() - self._began, _core.stats())
        return self._samples

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
            self._interval *= 2

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            if _core.is_initialized():
                self.note(time.monotonic() - self._began, _core.stats())
