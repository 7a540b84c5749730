"""A progress line for training loops that have none."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from dad.basics import is_initialized, rank, stats
from dad.observe.scalars import number_of
from dad.planning.text import format_bytes

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0  # how often lines are written to a file or behind dadrun


class Progress:
    """Shows on rank 0 a line with the step, the loss, the bytes sent and the time that is left.

    On a terminal the line moves; elsewhere a new one comes every ten seconds:

        step 1,200 of 4,000 (30 %)  loss 0.4312  39.2 MB sent  12.1 ms/step  0:34 left

    Args:
        total: how many steps there will be; None: nobody knows.
        file: where the line goes; None: stderr.

    Example::

        progress = dad.Progress(total=4000)
        for x, y in loader:
            ...
            optimizer.step()
            progress.step(loss)
    """

    def __init__(self, total: int | None = None, file: TextIO | None = None) -> None:
        self._total = total
        self._file = file
        self._began = self._shown = time.monotonic()
        self._steps = 0
        self._moves = False

    def step(self, loss: Any = None) -> None:
        """Call it after each step. The loss is read only when the line is drawn."""
        if self._steps == 0:
            # The first step is slower than the others: it makes connections and plans.
            self._began = time.monotonic()
        self._steps += 1
        out = self._file or sys.stderr
        self._moves = out.isatty()
        due = time.monotonic() - self._shown > (_REDRAW_SECONDS if self._moves else _LINE_SECONDS)
        if (due or self._steps == self._total) and is_initialized() and rank() == 0:
            self._shown = time.monotonic()
            self._draw(out, None if loss is None else number_of(loss))
            if self._steps == self._total:
                self.close()

    def text(self, loss: float | None, sent_bytes: float, now: float) -> str:
        parts = [f"step {self._steps:,}"]
        if self._total:
            parts[0] += f" of {self._total:,} ({100 * self._steps / self._total:.0f} %)"
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(f"{format_bytes(sent_bytes)} sent")
        if self._steps > 1:
            seconds = (now - self._began) / (self._steps - 1)
            parts.append(f"{1e3 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step")
            if self._total and self._total >= self._steps:
                parts.append(f"{_clock(seconds * (self._total - self._steps))} left")
        return "  ".join(parts)

    def _draw(self, out: TextIO, loss: float | None) -> None:
        line = self.text(loss, stats()["wire_bytes_sent"], time.monotonic())
        out.write(f"\r\x1b[K{line}" if self._moves else f"{line}\n")
        out.flush()

    def close(self) -> None:
        """Ends a line that moves."""
        if self._moves and is_initialized() and rank() == 0:
            (self._file or sys.stderr).write("\n")
        self._moves = False


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
