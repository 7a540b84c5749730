"""The processes of a job: their output, their ends, the orders to them, and the launcher's own signals.

This module does not interpret how a process ends: job.py ends the others, elastic/launch.py starts a
successor.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from dad.runner.output import RankStream
from dad.runner.remote import GRACE_SECONDS, SIGN_OF_LIFE_SECONDS
from dad.runner.tracebacks import TracebackFolder

_POLL_SECONDS = 0.1
# How long output is awaited from a rank that has ended, since a daemon of it may hold the pipe open.
_DRAIN_SECONDS = 1.0
TERMINATE = b"T"
KILL = b"K"
INSPECT = b"I"
_SIGN_OF_LIFE = b"."


@dataclass(eq=False)
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
    told_to_stop: bool = False  # before we noticed its end
    kill_at: float | None = None  # when the process here is killed, whatever the other host does
    done: bool = field(default=False)


class ProcessPool:
    """For use by one thread, except order()."""

    def __init__(self, messages: TextIO = sys.stderr, tracebacks: TracebackFolder | None = None) -> None:
        self.ranks: list[RankProcess] = []  # the ranks that are not done
        self.tracebacks = tracebacks or TracebackFolder()
        self.stopped_at: float | None = None
        self.killed_at: float | None = None
        self.signals: list[int] = []
        self._signals_seen = 0
        self._wishes = 0  # requests to see what the ranks are doing: SIGUSR1
        self._asked = 0  # how many ranks were asked for that
        self._messages = messages
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, RankProcess] = {}
        self._input_lock = threading.Lock()
        self._finished = threading.Event()

    def add(self, rank: RankProcess) -> None:
        with self._input_lock:
            self.ranks.append(rank)
        for pipe, stream in ((rank.process.stdout, rank.stdout), (rank.process.stderr, rank.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (rank, stream))
        with contextlib.suppress(OSError):  # an old kernel: then its end is polled
            pidfd = os.pidfd_open(rank.process.pid)
            self._pidfds[pidfd] = rank
            self._selector.register(pidfd, selectors.EVENT_READ)

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Calls `ready` from step() when there is something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, ready)

    @contextlib.contextmanager
    def in_charge(self, sign_of_life_seconds: float = SIGN_OF_LIFE_SECONDS) -> Iterator[None]:
        """Catches signals to us, sends signs of life; leaves nothing running at the end."""
        thread = threading.Thread(target=self._send_signs_of_life, args=(sign_of_life_seconds,), daemon=True)
        thread.start()
        try:
            with self._catch_signals():
                yield
        finally:
            self._finished.set()
            self._kill_leftovers()
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._selector.close()

    def step(self, timeout: float | None = None) -> list[RankProcess]:
        """Passes output on and obeys signals; returns the ranks that have ended since the last step.

        Waits for something to happen, but not longer than `timeout`.
        """
        longest = _POLL_SECONDS if self._must_poll() else 1.0
        self._read_output(longest if timeout is None else max(0.0, min(timeout, longest)))
        self.pass_on(self.tracebacks.show_due)
        ended = self._note_exits()
        self._obey_signals()
        self._end_stuck_connections()
        return ended

    def order(self, command: bytes, ranks: Iterable[RankProcess] | None = None) -> None:
        """Sends a byte to child.py."""
        with self._input_lock:
            for rank in self.ranks if ranks is None else ranks:
                if rank.exit_code is None and rank.process.stdin is not None:
                    with contextlib.suppress(OSError):
                        rank.process.stdin.write(command)

    def stop(self) -> None:
        """SIGTERM to every rank; the children send SIGKILL after the grace time."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            self.end(self.ranks)

    def kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = time.monotonic()
            self.end(self.ranks, KILL)

    def end(self, ranks: Iterable[RankProcess], command: bytes = TERMINATE) -> None:
        """Ends these ranks, without waiting for a dead connection."""
        now = time.monotonic()
        limit = now + (1.0 if command == KILL else GRACE_SECONDS + 2.0)
        chosen = [rank for rank in ranks if rank.exit_code is None]
        for rank in chosen:
            rank.told_to_stop = True
            rank.kill_at = limit if rank.kill_at is None else min(rank.kill_at, limit)
        self.order(command, chosen)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, file=self._messages, flush=True)

    # ---- the step

    def _must_poll(self) -> bool:
        """A pidfd reports an end; without one, or while output is held back or awaited, time matters too."""
        return (
            self.tracebacks.is_holding
            or len(self._pidfds) < sum(rank.exit_code is None for rank in self.ranks)
            or any(rank.exit_code is not None or rank.kill_at is not None for rank in self.ranks)
        )

    def _read_output(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if callable(key.data):
                key.data()
            elif key.data is not None:
                self._read(key)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Returns False when there is nothing left for now."""
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.pass_on(key.data[1].feed, data)
        else:
            self._close_pipe(key)
        return bool(data)

    def pass_on(self, show: Callable[..., None], *arguments: Any) -> None:
        try:
            show(*arguments)
        except BrokenPipeError:
            # The reader of our output is gone, as with `dadrun … | head`: end the job.
            self.stop()

    def _close_pipe(self, key: selectors.SelectorKey) -> None:
        rank, stream = key.data
        self._selector.unregister(key.fileobj)
        rank.open_pipes -= 1
        with contextlib.suppress(BrokenPipeError):
            stream.close()

    def drain(self, rank: RankProcess) -> None:
        """Reads the output of a rank that has ended, as far as it has arrived."""
        for key in self._pipes_of(rank):
            while self._read(key):
                pass

    def _pipes_of(self, rank: RankProcess) -> list[selectors.SelectorKey]:
        keys = self._selector.get_map().values()
        return [key for key in keys if isinstance(key.data, tuple) and key.data[0] is rank]

    def _note_exits(self) -> list[RankProcess]:
        now = time.monotonic()
        ended = []
        for rank in list(self.ranks):
            if rank.exit_code is None:
                code = rank.process.poll()
                if code is None:
                    continue
                rank.exit_code = code if code >= 0 else 128 - code
                rank.killed_by = max(-code, 0)
                rank.ended_at = now
                ended.append(rank)
                self._forget_pidfd(rank)
            if rank.open_pipes == 0 or now - rank.ended_at > _DRAIN_SECONDS:
                rank.done = True
                self._retire(rank)
        return ended

    def _retire(self, rank: RankProcess) -> None:
        for key in self._pipes_of(rank):
            self._close_pipe(key)
        with self._input_lock:
            self.ranks.remove(rank)
            _close_pipes(rank)

    def _forget_pidfd(self, rank: RankProcess) -> None:
        for pidfd in [fd for fd, owner in self._pidfds.items() if owner is rank]:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            del self._pidfds[pidfd]

    def _send_signs_of_life(self, seconds: float) -> None:
        # On a thread of its own: the loop may be blocked by a terminal that takes no output.
        while not self._finished.wait(seconds):
            with self._input_lock:
                remote = [rank for rank in self.ranks if rank.remote]
            self.order(_SIGN_OF_LIFE, remote)

    def _end_stuck_connections(self) -> None:
        """After an order, a dead connection never ends by itself."""
        now = time.monotonic()
        for rank in self.ranks:
            if rank.exit_code is None and rank.kill_at is not None and now > rank.kill_at:
                rank.process.kill()

    def _kill_leftovers(self) -> None:
        """Anything left here means that the loop raised; closing its input ends a rank."""
        for rank in self.ranks:
            _close_pipes(rank)
        for rank in self.ranks:
            try:
                rank.process.wait(GRACE_SECONDS + 2.0)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    # ---- signals to the launcher

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Turns Ctrl-C and similar signals into entries of a list. Only the main thread may do this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # The write end wakes select, which Python would otherwise resume after a handler.
        wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.watch(wakeup, lambda: None if os.read(wakeup, 4096) else None)
        previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        previous = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, lambda number, _: self.signals.append(number))
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: self._wish())
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            self._selector.unregister(wakeup)
            os.close(wakeup)
            os.close(write_end)

    def _wish(self) -> None:
        self._wishes += 1

    def _obey_signals(self) -> None:
        if self._wishes:
            self._wishes = 0
            self._inspect()
        while self._signals_seen < len(self.signals):
            self._signals_seen += 1
            if self._signals_seen == 1:
                name = signal.Signals(self.signals[0]).name
                self.say(f"dadrun: {name}: stopping all ranks (once more to kill them at once)")
                self.stop()
            else:
                self.kill()

    def _inspect(self) -> None:
        """One rank reports for all; the next time another one, since this one may be unable to."""
        # A warm start is no rank, and its output goes nowhere.
        living = [rank for rank in self.ranks if rank.exit_code is None]
        ranks = [rank for rank in living if not rank.label.startswith("warm start")]
        if ranks:
            self.order(INSPECT, [ranks[self._asked % len(ranks)]])
            self._asked += 1


def _close_pipes(rank: RankProcess) -> None:
    for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
