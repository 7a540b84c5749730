"""When a turn of a round is over: after a number of steps, or when a clock says so.

By the clock, ranks take different numbers of steps, and none waits for a slower one for longer than one of
its own steps. The timekeeper (the lowest rank that has not joined) says when the time is up. After its next
step a rank answers that it is ready and waits for as long as a step of its own takes; if others are not
ready by then it goes on training. When all have answered the turn ends for each with the step that it is in:
the last one to answer is the slowest, and the others are at most a step of their own away.

Both messages are small gathers that run beside the training. Nobody waits for the first one.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import Any

from dad._lib import _core
from dad.local_steps.fragments import offset

# A gather that waits for long looks like a rank that is lost: the timekeeper answers at least that often.
_HEARTBEAT_SECONDS = 20.0


class Clock(ABC):
    all_end_round = True  # whether all ranks have called end_round()

    def begin_round(self) -> None:  # noqa: B027
        """After a round that was ended by a call."""

    def begin_step(self, turn: int) -> None:  # noqa: B027  there may be nothing to do
        """Before a step."""

    @abstractmethod
    def is_over(self, turn: int, steps: int) -> bool:
        """After a step, the `steps`-th of the round; whether the turn ends with it."""

    def end_turn(self, turn: int, ends_round: bool) -> None:  # noqa: B027
        """This rank ends the turn as soon as the others are there. ends_round: it has called end_round()."""

    def forget(self) -> None:  # noqa: B027
        """What is on its way is lost with the engine."""

    def first_step(self, turn: int) -> int:
        """How many steps of a round are over when a turn begins; for a rank that comes new."""
        return 0


class CountClock(Clock):
    def __init__(self, steps: int, fragments: int) -> None:
        self._steps = steps
        self._fragments = fragments

    def is_over(self, turn: int, steps: int) -> bool:
        return steps >= offset(turn, self._fragments, self._steps)

    def first_step(self, turn: int) -> int:
        return offset(turn - 1, self._fragments, self._steps)


class TimeClock(Clock):
    def __init__(self, seconds: float, name: str, process_set: Any) -> None:
        self._seconds = seconds
        self._name = name
        self._process_set = process_set
        self._timekeeper = 0  # its rank in the process set
        self._began: float | None = None  # this turn
        self._step_began = 0.0
        self._spoke = 0.0
        self._time: Any = None  # the gather that tells whether the time is up
        self._ready: Any = None
        self._is_up = False
        self.all_end_round = False

    def begin_step(self, turn: int) -> None:
        self._step_began = time.monotonic()
        if self._began is None:
            self._began = self._step_began
            self._listen()

    def _gather(self, what: str, mine: Any) -> Any:
        packet = json.dumps([self._process_set.rank(), mine]).encode()
        name = f"local_steps.{self._name}.{what}"
        return _core.BytesGather(name, packet, self._process_set.process_set_id)

    def _listen(self) -> None:
        """All but the timekeeper are there when it speaks."""
        self._spoke = time.monotonic()
        if self._process_set.rank() != self._timekeeper:
            self._time = self._gather("time", False)

    def is_over(self, turn: int, steps: int) -> bool:
        now = time.monotonic()
        step_seconds = now - self._step_began
        if not self._is_up:
            self._look(now)
        if not self._is_up:
            return False
        if self._ready is None:
            self._ready = self._gather("ready", False)
            if not self._ready.wait_for(step_seconds):
                return False
        elif not self._ready.wait_for(0.0):
            return False
        self._end()
        return True

    def _look(self, now: float) -> None:
        """Whether the time is up; the timekeeper says so."""
        if self._time is None:
            is_up = now - self._began >= self._seconds
            if not is_up and now - self._spoke < _HEARTBEAT_SECONDS:
                return
            self._time = self._gather("time", is_up)
        if self._time.wait_for(0.0):
            answers = [json.loads(one) for one in self._time.wait()]
            self._time = None
            # Without the timekeeper, which has joined, the turn ends and another one is found.
            is_there = any(rank == self._timekeeper for rank, _ in answers)
            self._is_up = not is_there or any(is_up for _, is_up in answers)
            if not self._is_up:
                self._listen()

    def _end(self) -> None:
        answers = [json.loads(one) for one in self._ready.wait()]
        self._timekeeper = min(rank for rank, _ in answers)
        self.all_end_round = all(ends_round for _, ends_round in answers)
        self._began = self._time = self._ready = None
        self._is_up = False

    def begin_round(self) -> None:
        self.all_end_round = False

    def forget(self) -> None:
        self._began = self._time = self._ready = None
        self._timekeeper = 0
        self._is_up = False

    def end_turn(self, turn: int, ends_round: bool) -> None:
        if self._began is None:
            self.begin_step(turn)  # others may have begun it
        while not self._is_up:
            if self._time is None:
                self._time = self._gather("time", True)
            self._time.wait()
            self._look(time.monotonic())
        if self._ready is None:
            self._ready = self._gather("ready", ends_round)
        self._end()
