"""The processes of one job: they live together and end together."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from dad.runner.output import RankStream, ranges
from dad.runner.remote import GRACE_SECONDS, SIGN_OF_LIFE_SECONDS
from dad.runner.tracebacks import TracebackFolder

_POLL_SECONDS = 0.1
# How long output is awaited from a rank that has ended; a daemon of its may hold the pipe open.
_DRAIN_SECONDS = 1.0
# What the core says when a peer is gone, whatever exception of whatever framework it comes in. A peer
# that has closed its connections has so long to end by itself, since it may have much to tear down: then
# we know how it ended. One that is silent will not.
_PEER_ENDED = re.compile(r"\brank (\d+)(?:: | has ).*its output says why")
_PEER_LOST = re.compile(rf"{_PEER_ENDED.pattern}|\brank (\d+): gave no sign of life")
_CULPRIT_SECONDS = 5.0
# So many of the ranks that failed too are named.
_MOST_NAMED = 8
# ssh's own exit code, unless child.py says that it was the command's.
_SSH_FAILED = 255
_COMMAND_FAILED = "dadrun: the command ended with exit code 255"
# What a rank on another host says that lacks something.
_IS_MISSING = re.compile(r"dadrun: (cannot start|no python3) |No module named '(dad|horovod)\b")


@dataclass
class RankProcess:
    """One rank. `label` is what messages call it, `remote` whether ssh is in between."""

    label: str
    host: str
    remote: bool
    process: subprocess.Popen[bytes]
    stdout: RankStream
    stderr: RankStream
    exit_code: int | None = None
    killed_by: int = 0  # the signal that ended the process here, for a remote rank that of ssh
    ended_at: float = 0.0
    open_pipes: int = 2
    told_to_stop: bool = False  # before we knew of its end
    done: bool = field(default=False)


class Job:
    """Runs until every process has ended. One failure ends the others."""

    def __init__(
        self,
        processes: list[RankProcess],
        messages: TextIO = sys.stderr,
        tracebacks: TracebackFolder | None = None,
    ) -> None:
        self._processes = processes
        self._messages = messages
        self._tracebacks = tracebacks or TracebackFolder()
        self._selector = selectors.DefaultSelector()
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._killed_at: float | None = None
        self._signals: list[int] = []
        self._signals_seen = 0
        self._input_lock = threading.Lock()
        for rank in processes:
            for pipe, stream in ((rank.process.stdout, rank.stdout), (rank.process.stderr, rank.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (rank, stream))

    def run(self) -> int:
        """The exit code: 0, that of the rank that failed first, or 128 + the signal that stopped us."""
        finished = threading.Event()
        if any(rank.remote for rank in self._processes):
            threading.Thread(target=self._send_signs_of_life, args=(finished,), daemon=True).start()
        try:
            with self._catch_signals():
                while not all(rank.done for rank in self._processes):
                    self._read_output(_POLL_SECONDS)
                    self._pass_on(self._tracebacks.show_due)
                    self._note_exits()
                    self._stop_after_failure()
                    self._obey_signals()
                    self._end_stuck_connections()
        finally:
            finished.set()
            self._kill_leftovers()
            self._selector.close()
        return self._verdict()

    # ---- the loop

    def _read_output(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            rank, stream = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if data:
                self._pass_on(stream.feed, data)
            else:
                self._close_pipe(key)

    def _pass_on(self, show: Callable[..., None], *arguments: Any) -> None:
        try:
            show(*arguments)
        except BrokenPipeError:
            # Whoever read our output has gone, as with `dadrun … | head`: nobody waits for the job.
            self._stop()

    def _close_pipe(self, key: selectors.SelectorKey) -> None:
        rank, stream = key.data
        self._selector.unregister(key.fileobj)
        rank.open_pipes -= 1
        with contextlib.suppress(BrokenPipeError):
            stream.close()

    def _note_exits(self) -> None:
        now = time.monotonic()
        for rank in self._processes:
            if rank.done:
                continue
            if rank.exit_code is None:
                code = rank.process.poll()
                if code is None:
                    continue
                rank.exit_code = code if code >= 0 else 128 - code
                rank.killed_by = max(-code, 0)
                rank.ended_at = now
                if rank.exit_code != 0 and self._failed_at is None:
                    self._failed_at = now
            if rank.open_pipes == 0 or now - rank.ended_at > _DRAIN_SECONDS:
                rank.done = True
        if all(rank.done for rank in self._processes):
            for key in list(self._selector.get_map().values()):
                self._close_pipe(key)

    def _stop_after_failure(self) -> None:
        if self._failed_at is None:
            return
        # What a rank has said is known when its pipes are closed.
        failed = [rank for rank in self._processes if rank.exit_code and (rank.open_pipes == 0 or rank.done)]
        running = {rank.label for rank in self._processes if rank.exit_code is None}
        lost = [_lost_peer(rank, _PEER_ENDED) for rank in failed]
        is_clear = lost != [] and (None in lost or running.isdisjoint(lost))
        if is_clear or time.monotonic() - self._failed_at > _CULPRIT_SECONDS:
            self._stop()

    def _stop(self) -> None:
        """SIGTERM to every rank; the children send SIGKILL after the grace time."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            for rank in self._processes:
                rank.told_to_stop = rank.exit_code is None
            self._order(b"T")

    def _kill(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self._order(b"K")

    def _order(self, command: bytes) -> None:
        with self._input_lock:
            for rank in self._processes:
                if rank.exit_code is None and rank.process.stdin is not None:
                    with contextlib.suppress(OSError):
                        rank.process.stdin.write(command)

    def _send_signs_of_life(self, finished: threading.Event) -> None:
        # On a thread of its own: the loop may be blocked by a terminal that takes no output.
        while not finished.wait(SIGN_OF_LIFE_SECONDS):
            self._order(b".")

    def _end_stuck_connections(self) -> None:
        """After an order, a connection that is dead never ends by itself."""
        limit = None
        if self._killed_at is not None:
            limit = self._killed_at + 1.0
        elif self._stopped_at is not None:
            limit = self._stopped_at + GRACE_SECONDS + 2.0
        if limit is not None and time.monotonic() > limit:
            for rank in self._processes:
                if rank.exit_code is None:
                    rank.process.kill()

    def _kill_leftovers(self) -> None:
        """Only after an exception in the loop is anything left: closing its input ends a rank."""
        for rank in self._processes:
            if rank.process.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.process.stdin.close()
            for pipe in (rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()
        for rank in self._processes:
            try:
                rank.process.wait(GRACE_SECONDS + 2.0)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    # ---- signals to the launcher

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Ctrl-C and friends become entries of a list. Only the main thread may do this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _obey_signals(self) -> None:
        while self._signals_seen < len(self._signals):
            self._signals_seen += 1
            if self._signals_seen == 1:
                name = signal.Signals(self._signals[0]).name
                self._say(f"dadrun: {name}: stopping all ranks (once more to kill them at once)")
                self._stop()
            else:
                self._kill()

    # ---- the end

    def _verdict(self) -> int:
        culprit = None if self._signals else self._culprit()
        self._pass_on(self._tracebacks.show_all, culprit and culprit.stderr)
        if self._signals:
            return 128 + self._signals[0]
        if culprit is None:
            # Stopped by us for want of a reader.
            return 0 if self._stopped_at is None else 128 + signal.SIGPIPE
        assert culprit.exit_code is not None
        self._say(self._describe(culprit))
        return culprit.exit_code

    def _culprit(self) -> RankProcess | None:
        """The first to fail; but a rank that a signal killed comes before those that raised, and those that
        raised because a peer was gone come last.

        Survivors raise as soon as a peer is gone, which may be before we hear of the peer.
        """
        failed = [rank for rank in self._processes if rank.exit_code and not self._is_victim(rank)]
        return min(
            failed,
            key=lambda rank: (not _by_signal(rank.exit_code), _lost_peer(rank) is not None, rank.ended_at),
            default=None,
        )

    def _is_victim(self, rank: RankProcess) -> bool:
        """Whether our own order ended it."""
        if self._stopped_at is None or not rank.told_to_stop:
            return False
        if rank.exit_code == 128 + signal.SIGTERM:
            return True
        return rank.exit_code == 128 + signal.SIGKILL and (
            self._killed_at is not None or rank.ended_at >= self._stopped_at + GRACE_SECONDS
        )

    def _describe(self, culprit: RankProcess) -> str:
        code = culprit.exit_code or 0
        if culprit.remote and culprit.killed_by:
            what = f"its ssh client was killed by signal {culprit.killed_by}"
        elif culprit.remote and code == _SSH_FAILED and _COMMAND_FAILED not in culprit.stderr.tail:
            what = "the ssh connection ended (code 255)"
        elif _by_signal(code):
            what = f"killed by signal {code - 128} ({signal.Signals(code - 128).name})"
        else:
            what = f"exit code {code}"
        lines = [f"dadrun: {culprit.label} on {culprit.host} failed: {what}", *self._last_lines(culprit)]
        if code == 128 + signal.SIGKILL and not (culprit.remote and culprit.killed_by):
            lines.append(
                "dadrun: the kernel sends SIGKILL when memory runs out; to see whether it did, run on "
                f"{culprit.host}: dmesg -T | grep -i 'killed process'"
            )
        if culprit.remote and any(_IS_MISSING.search(line) for line in culprit.stderr.tail):
            lines.append(
                f"dadrun: {culprit.host} needs the same dad for the same interpreter, at the same paths; "
                f"what it lacks is said by: dadrun --doctor -H {culprit.host} (and -p, -i as here)"
            )
        others = [rank for rank in self._processes if rank is not culprit]
        # One that left too early is often why the culprit failed.
        lost = _lost_peer(culprit)
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
                lines += self._last_lines(rank)
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

    def _last_lines(self, rank: RankProcess) -> list[str]:
        if not rank.stderr.tail:
            return ["  it wrote nothing to stderr"]
        same = self._tracebacks.ranks_with(rank.stderr)
        head = f"of stderr, the same on ranks {ranges(same)}:" if len(same) > 1 else "of its stderr:"
        return [f"  the last lines {head}", *(f"    {line}" for line in rank.stderr.tail)]

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, file=self._messages, flush=True)


def _lost_peer(rank: RankProcess, message: re.Pattern[str] = _PEER_LOST) -> str | None:
    """The label of the rank whose loss this one reported last; a script may print what it has caught."""
    for line in [*reversed(rank.stderr.tail), *reversed(rank.stdout.tail)]:
        if found := message.search(line):
            return f"rank {found[found.lastindex or 0]}"
    return None


def _by_signal(code: int | None) -> bool:
    return code is not None and code - 128 in {number.value for number in signal.Signals}
