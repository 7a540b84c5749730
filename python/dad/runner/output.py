"""The output of the ranks: prefixed line by line, copied to files, the last lines remembered."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TextIO

from dad.runner.tracebacks import TracebackFolder, begins

TAIL_LINES = 20
# A line without an end is passed on in pieces of this size.
MAX_LINE_BYTES = 1 << 16


def ranges(numbers: list[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class ByteSink(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class Nowhere:
    """A destination for output that is discarded."""

    def write(self, data: bytes, /) -> None: ...
    def flush(self) -> None: ...


class _TextSink:
    """A notebook's stdout takes text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> None:
        self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()


def bytes_of(stream: TextIO) -> ByteSink:
    """Where bytes for this text stream can be written."""
    return getattr(stream, "buffer", None) or _TextSink(stream)


class RankStream:
    """stdout or stderr of one rank."""

    def __init__(
        self,
        rank: int,
        name: str,
        destination: ByteSink,
        *,
        prefix: bool = True,
        timestamps: bool = False,
        copy: BinaryIO | None = None,
        tracebacks: TracebackFolder | None = None,
    ) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._name = name
        self._prefix = prefix
        self._tracebacks = tracebacks
        self._timestamps = timestamps and prefix
        self._destination = destination
        self._copy = copy
        self._rest = b""

    def feed(self, data: bytes) -> None:
        if self._copy is not None:
            self._copy.write(data)
            self._copy.flush()
        # A carriage return ends a line too, so that progress bars move.
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        # "\r" at the end of the input so far may be the first half of "\r\n".
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        if len(self._rest) >= MAX_LINE_BYTES:
            lines.append(self._rest + b"\n")
            self._rest = b""
        self._emit(lines)

    def close(self) -> None:
        if self._rest:
            self._emit([self._rest if self._rest.endswith((b"\r", b"\n")) else self._rest + b"\n"])
            self._rest = b""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _emit(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.rstrip(b"\r\n")
            if text:
                self.tail.append(text.decode(errors="replace"))
        folder = self._tracebacks
        if folder is not None:
            shown = []
            for line in lines:
                if folder.holds(self) or begins(line):
                    folder.hold(self, line)
                else:
                    shown.append(line)
            lines = shown
        self.write(lines, [self.rank])

    def write(self, lines: list[bytes], ranks: list[int]) -> None:
        """Writes lines of these ranks, with their prefix."""
        if not lines:
            return
        stamp = time.asctime() if self._timestamps else ""
        label = f"{stamp}[{ranges(ranks)}]<{self._name}>:".encode() if self._prefix else b""
        self._destination.write(b"".join(label + line for line in lines))
        self._destination.flush()


def open_copies(directory: str, rank: int, size: int, append: bool = False) -> tuple[BinaryIO, BinaryIO]:
    """`<directory>/rank.<padded rank>/stdout` and `…/stderr`."""
    place = Path(directory) / f"rank.{rank:0{len(str(size - 1))}d}"
    place.mkdir(parents=True, exist_ok=True)
    mode: Literal["ab", "wb"] = "ab" if append else "wb"
    return (place / "stdout").open(mode), (place / "stderr").open(mode)
