"""A job of fixed size: its processes live together and end together."""

from __future__ import annotations

import signal
import sys
import time
from typing import TextIO

from dad.runner.processes import ProcessPool, RankProcess
from dad.runner.remote import GRACE_SECONDS
from dad.runner.tracebacks import TracebackFolder
from dad.runner.verdict import PEER_ENDED, advice, by_signal, how_it_ended, last_lines, lost_peer

# A peer that has closed its connections has this long to end by itself, because it may have much to tear
# down; then its exit code is known. A silent peer does not end by itself.
_CULPRIT_SECONDS = 5.0
# The most ranks to name that failed as well.
_MOST_NAMED = 8


class Job:
    """Runs until every process has ended. One failure ends the others."""

    def __init__(
        self,
        processes: list[RankProcess],
        messages: TextIO = sys.stderr,
        tracebacks: TracebackFolder | None = None,
    ) -> None:
        self._pool = ProcessPool(messages, tracebacks)
        self._processes = processes
        self._failed_at: float | None = None
        for rank in processes:
            self._pool.add(rank)

    def run(self) -> int:
        """The exit code: 0, that of the rank that failed first, or 128 + the signal that stopped us."""
        with self._pool.in_charge():
            while self._pool.ranks:
                for rank in self._pool.step(0.1 if self._failed_at is not None else None):
                    if rank.exit_code and self._failed_at is None:
                        self._failed_at = rank.ended_at
                self._stop_after_failure()
        return self._verdict()

    def _stop_after_failure(self) -> None:
        if self._failed_at is None:
            return
        # What a rank has printed is complete when its pipes are closed.
        failed = [rank for rank in self._processes if rank.exit_code and (rank.open_pipes == 0 or rank.done)]
        running = {rank.label for rank in self._processes if rank.exit_code is None}
        lost = [lost_peer(rank, PEER_ENDED) for rank in failed]
        is_clear = lost != [] and (None in lost or running.isdisjoint(lost))
        if is_clear or time.monotonic() - self._failed_at > _CULPRIT_SECONDS:
            self._pool.stop()

    def _verdict(self) -> int:
        culprit = None if self._pool.signals else self._culprit()
        self._pool.pass_on(self._pool.tracebacks.show_all, culprit and culprit.stderr)
        if self._pool.signals:
            return 128 + self._pool.signals[0]
        if culprit is None:
            # We stopped it for want of a reader.
            return 0 if self._pool.stopped_at is None else 128 + signal.SIGPIPE
        assert culprit.exit_code is not None
        self._pool.say(self._describe(culprit))
        return culprit.exit_code

    def _culprit(self) -> RankProcess | None:
        """The first to fail; but a rank that a signal killed takes precedence over ranks that raised, and
        ranks that raised because a peer was gone come last.

        Survivors raise as soon as a peer is gone, which may be before we notice that the peer has ended.
        """
        failed = [rank for rank in self._processes if rank.exit_code and not self._is_victim(rank)]
        return min(
            failed,
            key=lambda rank: (not by_signal(rank.exit_code), lost_peer(rank) is not None, rank.ended_at),
            default=None,
        )

    def _is_victim(self, rank: RankProcess) -> bool:
        """Whether an order of ours ended it."""
        if self._pool.stopped_at is None or not rank.told_to_stop:
            return False
        if rank.exit_code == 128 + signal.SIGTERM:
            return True
        return rank.exit_code == 128 + signal.SIGKILL and (
            self._pool.killed_at is not None or rank.ended_at >= self._pool.stopped_at + GRACE_SECONDS
        )

    def _describe(self, culprit: RankProcess) -> str:
        tracebacks = self._pool.tracebacks
        lines = [
            f"dadrun: {culprit.label} on {culprit.host} failed: {how_it_ended(culprit)}",
            *last_lines(culprit, tracebacks),
            *advice(culprit),
        ]
        others = [rank for rank in self._processes if rank is not culprit]
        # A rank that left too early is often the reason why the culprit failed.
        lost = lost_peer(culprit)
        before = [
            rank
            for rank in others
            if rank.exit_code == 0
            and (rank.ended_at <= culprit.ended_at or (rank.label == lost and not rank.told_to_stop))
        ]
        if before:
            names = ", ".join(rank.label for rank in before)
            lines.append(f"dadrun: {names} had ended before, with exit code 0")
        if any(rank.label == lost for rank in before):
            lines.append(
                f"dadrun: {lost} had fewer steps than the others: give all ranks equally many batches, "
                "or call join() after the last one"
            )
        for rank in others:
            if rank.label == lost and rank.told_to_stop:
                lines.append(f"dadrun: {lost} on {rank.host}, which it lost, was still there and was stopped")
                lines += last_lines(rank, tracebacks)
                others.remove(rank)
                break
        too = [rank for rank in others if rank.exit_code and not rank.told_to_stop]
        if too:
            names = ", ".join(f"{rank.label} (exit code {rank.exit_code})" for rank in too[:_MOST_NAMED])
            more = f" and {len(too) - _MOST_NAMED} more" if len(too) > _MOST_NAMED else ""
            lines.append(f"dadrun: {names}{more} failed too")
        if stopped := sum(rank.told_to_stop for rank in others):
            who = f"{stopped} ranks were" if stopped > 1 else "rank was"
            lines.append(f"dadrun: the other {who} stopped")
        return "\n".join(lines)
