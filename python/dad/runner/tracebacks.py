"""Equal tracebacks of several ranks are shown once: `[0-3]<stderr>:Traceback (most recent call last):`.

A stream in which a traceback begins holds its lines back from there on. After a short while, or at the end of
the job, they are shown, together with those of other ranks that hold the same traceback.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dad.runner.output import RankStream

# A rank that prints a traceback and continues must not seem silent.
HOLD_SECONDS = 2.0
_BEGIN = b"Traceback (most recent call last):"
_BETWEEN = (b"During handling of the above exception", b"The above exception was the direct cause")


def begins(line: bytes) -> bool:
    return line.rstrip() == _BEGIN


def split(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The traceback at the front, with the exceptions that it is chained to, and what follows it."""
    end = 0
    while True:
        end += 1
        while end < len(lines) and lines[end].startswith(b" "):  # its frames
            end += 1
        end = min(end + 1, len(lines))  # the exception
        following = end
        while following < len(lines) and (
            not lines[following].strip() or lines[following].startswith(_BETWEEN)
        ):
            following += 1
        if following == end or following == len(lines) or not begins(lines[following]):
            return lines[:end], lines[end:]
        end = following


class TracebackFolder:
    """Shared by the stderr streams of a job; used by one thread."""

    def __init__(self, hold_seconds: float = HOLD_SECONDS) -> None:
        self._hold_seconds = hold_seconds
        self._held: dict[RankStream, list[bytes]] = {}
        self._since: dict[RankStream, float] = {}
        self._shown_with: dict[RankStream, list[int]] = {}

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def holds(self, stream: RankStream) -> bool:
        return stream in self._held

    def hold(self, stream: RankStream, line: bytes) -> None:
        if stream not in self._held:
            self._held[stream] = []
            self._since[stream] = time.monotonic()
        self._held[stream].append(line)

    def ranks_with(self, stream: RankStream) -> list[int]:
        """The ranks whose last traceback was the same as this rank's, including this rank."""
        return self._shown_with.get(stream, [stream.rank])

    def show_due(self) -> None:
        """Shows what has been held for long enough."""
        now = time.monotonic()
        self._show([stream for stream in self._held if now - self._since[stream] >= self._hold_seconds])

    def show_all(self, first: RankStream | None = None) -> None:
        """Shows everything; the traceback of `first` comes first."""
        streams = sorted(self._held, key=lambda stream: (stream is not first, self._since[stream]))
        self._show(streams)

    def _show(self, streams: list[RankStream]) -> None:
        for stream in streams:
            if stream not in self._held:  # shown with an earlier one
                continue
            traceback, _ = split(self._held[stream])
            same = [other for other in self._held if split(self._held[other])[0] == traceback]
            ranks = sorted({other.rank for other in same})
            rests = {other: split(self._held.pop(other))[1] for other in same}
            stream.write(traceback, ranks)
            for other in same:
                self._shown_with[other] = ranks
                if (rest := rests.get(other)) is None:
                    continue
                equal = [peer for peer in rests if rests[peer] == rest]
                for peer in equal:
                    del rests[peer]
                other.write(rest, sorted({peer.rank for peer in equal}))
