"""Ranks as threads of one process, for planning sessions: no engine, no framework, microseconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dad.planning.agreement import Description
from dad.planning.circle import Circle
from dad.planning.session import Session
from dad.planning.types import Choice, Costs, Observation
from dad.state.replicas import CURES_OF_VARIABLES

Key = tuple[str, int]  # of a gather: its name, and how often that was used before
_SECONDS = 20.0  # that a rank waits for others, which shows a rank that does not come as a failure


class Job:
    """What the threads share. `joined`: ranks that have joined, whom nobody waits for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: set[int] = set()
        self.joins = 0
        self._changed = threading.Condition()
        self._boxes: dict[Key, dict[int, bytes]] = {}
        self._full: set[Key] = set()

    def put(self, key: Key, rank: int, mine: bytes) -> None:
        with self._changed:
            self._boxes.setdefault(key, {})[rank] = mine
            self._note()

    def take(self, key: Key, seconds: float = _SECONDS) -> list[bytes] | None:
        """What all ranks have put there, in rank order; None if some have not by then."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._full, seconds):
                return None
            return [self._boxes[key][rank] for rank in sorted(self._boxes[key])]

    def join(self, rank: int) -> None:
        """This rank has no more data. Returns when all ranks have joined."""
        with self._changed:
            before = self.joins
            self.joined.add(rank)
            if len(self.joined) == self.size:
                self.joined.clear()
                self.joins += 1
            self._note()
            assert self._changed.wait_for(lambda: self.joins > before, _SECONDS), "a rank did not join"

    def wait_until_one_has_joined(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.joined, _SECONDS)

    def _note(self) -> None:
        present = self.size - len(self.joined)
        self._full.update(key for key, box in self._boxes.items() if len(box) >= present)
        self._changed.notify_all()


class Box:
    """A gather that is under way."""

    def __init__(self, job: Job, key: Key) -> None:
        self._job, self._key = job, key

    def wait(self) -> list[bytes]:
        everyone = self._job.take(self._key)
        if everyone is None:
            raise AssertionError(f"a rank did not come to {self._key}")
        return everyone

    def wait_for(self, seconds: float) -> bool:
        return self._job.take(self._key, seconds) is not None


class ThreadRanks:
    """dad.planning.ranks.Ranks between threads. `states` is what the core would keep."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self.rank = self.rank_in_job = rank
        self.states: dict[str, dict[str, np.ndarray]] = {}
        self.captured: dict[str, float] = {}  # what the core would have measured
        self._uses: Counter[str] = Counter()
        self._number = 0

    @property
    def size(self) -> int:
        return self._job.size

    @property
    def circle(self) -> Circle:
        return Circle(self.size, self.rank, (), tuple(range(self.size)))

    @property
    def joins(self) -> int:
        return self._job.joins

    @property
    def epoch(self) -> tuple[int, int]:
        return 1, self._job.joins

    def next_number(self, framework: str) -> int:
        self._number += 1
        return self._number

    def start_gather(self, name: str, mine: bytes) -> Box:
        key = name, self._uses[name]
        self._uses[name] += 1
        self._job.put(key, self.rank, mine)
        return Box(self._job, key)

    def gather(self, name: str, mine: bytes) -> list[bytes]:
        return self.start_gather(name, mine).wait()

    def costs(self, measures_rates: bool, multiply: Any = None) -> Costs:
        return Costs(self.size, 1e5, 1e10)

    def stats(self) -> dict[str, Any]:
        return {"tensors": {name: {"captured": part} for name, part in self.captured.items()}}

    def export_state(self, stream: int, name: str) -> dict[str, np.ndarray]:
        return self.states.get(name, {})

    def import_state(self, stream: int, name: str, tensors: dict[str, np.ndarray]) -> None:
        self.states[name] = tensors

    def return_last(self, stream: int) -> None:
        pass

    def drop_states(self, stream: int) -> None:
        self.states.clear()


@dataclass
class FakeTensor:
    name: str
    method: Any
    shape: tuple[int, ...]
    planned: bool = False
    too_large: bool = False
    kept: np.ndarray | None = None
    dtype_name: str = "float32"
    element_bytes: int = 4
    floating: bool = True

    @property
    def matrix(self) -> tuple[int, int]:
        return self.shape[0], int(np.prod(self.shape[1:], dtype=int))

    @property
    def wide_dtype(self) -> np.dtype:
        return np.dtype(np.float32)


class FakeTraining:
    """An optimizer that sends nothing: the smallest adapter of a session."""

    def __init__(self, ranks: ThreadRanks, method: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        self.ranks = ranks
        self.session = Session[FakeTensor](ranks, "fake", 1, True, CURES_OF_VARIABLES)
        for name, shape in shapes.items():
            self.session.tensors[name] = FakeTensor(name, method, shape)
        self._described = Description(
            {"compression": method.spec()}, [(name, str(shape)) for name, shape in shapes.items()]
        )
        self.rows = 2
        self.plans_made = 0

    @property
    def choices(self) -> list[Choice]:
        return self.session.choices

    def step(self, fails: bool = False) -> None:
        session = self.session
        held = session.held()
        try:
            if session.agreement.is_due() and not session.agree(self._described, held):
                session.forget_plan()
            if held := session.held():
                self.plans_made += 1
                session.make_plan(held, self._failing if fails else self._observe)
            if session.next_review() == session.steps:
                session.review()
        finally:
            session.steps += 1

    def _observe(self, tensors: Sequence[FakeTensor]) -> dict[str, Observation]:
        return {tensor.name: Observation(rows=self.rows, samples=self.rows) for tensor in tensors}

    def _failing(self, tensors: Sequence[FakeTensor]) -> dict[str, Observation]:
        raise RuntimeError("cannot see")

    def save(self) -> dict[str, Any]:
        return self.session.save()

    def load(self, saved: dict[str, Any]) -> None:
        self.session.load(saved)


def run_on_threads(num_ranks: int, work: Callable[[ThreadRanks, Job], Any]) -> list[Any]:
    """Runs `work` as every rank of a job. Returns what each returned; raises the first error."""
    job = Job(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(job, rank), job)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
