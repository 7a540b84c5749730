"""The ranks that an optimizer exchanges with, as a planning session sees them.

A session reaches other ranks, and the states kept by the core, only through this interface. Tests run several
of them as threads of one process, without an engine.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dad._lib import _core
from dad.basics import num_inits
from dad.basics import rank as _rank_in_job
from dad.planning.circle import Circle, circle_of
from dad.planning.costs import Costs
from dad.planning.link import Multiply, measure_costs, multiply_arrays
from dad.process_sets import ProcessSet
from dad.state.kept import Tensors


class Gather(Protocol):
    """An exchange of bytes between all ranks that is under way."""

    def wait(self) -> list[bytes]:
        """The bytes of every rank, in rank order; ranks that have joined have none."""

    def wait_for(self, seconds: float) -> bool:
        """Whether it is over by that time. It continues if not."""


class Ranks(Protocol):
    """The members of a process set, seen from one of them."""

    @property
    def rank(self) -> int:
        """The place of this rank in the set."""

    @property
    def rank_in_job(self) -> int:
        """The number of this rank in messages to users."""

    @property
    def size(self) -> int: ...

    @property
    def circle(self) -> Circle:
        """Which ranks methods go between. It may change with shutdown() and init()."""

    @property
    def joins(self) -> int:
        """The number of joins that all ranks have finished. Before each, some ranks may have gone on without
        others."""

    @property
    def epoch(self) -> tuple[int, int]:
        """Changes when ranks may have diverged: with init() and with a join."""

    def next_number(self, framework: str) -> int:
        """Numbers the optimizers of a framework, restarting in each epoch; the same on all ranks."""

    def start_gather(self, name: str, mine: bytes) -> Gather:
        """Hands every rank's bytes to all. `name` is the same on all ranks."""

    def gather(self, name: str, mine: bytes) -> list[bytes]:
        """start_gather(), and waits for the result."""

    def costs(self, measures_rates: bool, multiply: Multiply = multiply_arrays) -> Costs:
        """The planner's costs, the same on every rank."""

    def stats(self) -> dict[str, Any]:
        """What the core has counted and measured on this rank, as dad.stats()."""

    def export_state(self, stream: int, name: str) -> Tensors:
        """The state that the core keeps for a request between steps; empty if there is none."""

    def import_state(self, stream: int, name: str, tensors: Tensors) -> None:
        """The opposite of export_state(). Empty `tensors` clears the state."""

    def return_last(self, stream: int) -> None:
        """The last results were not applied: the core keeps what it had sent for them."""

    def drop_states(self, stream: int) -> None:
        """Clears the states of all requests of this stream."""


class RanksOf:
    """The ranks of a process set of this process's engine."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.process_set = process_set

    @property
    def _set(self) -> int:
        number = self.process_set.process_set_id
        if number is None:
            raise ValueError(f"{self.process_set} does not exist: it was removed, or never added")
        return number

    @property
    def rank(self) -> int:
        rank = self.process_set.rank()
        assert rank is not None
        return rank

    @property
    def rank_in_job(self) -> int:
        return _rank_in_job()

    @property
    def size(self) -> int:
        size = self.process_set.size()
        assert size is not None
        return size

    @property
    def circle(self) -> Circle:
        return circle_of(self.process_set)

    @property
    def joins(self) -> int:
        return _core.joins()

    @property
    def epoch(self) -> tuple[int, int]:
        return num_inits(), _core.joins()

    def next_number(self, framework: str) -> int:
        key = (framework, self.process_set.process_set_id)
        epoch, count = _numbers.get(key, (None, 0))
        count = count + 1 if epoch == self.epoch else 1
        _numbers[key] = (self.epoch, count)
        return count

    def start_gather(self, name: str, mine: bytes) -> Gather:
        return _core.BytesGather(name, mine, self._set)

    def gather(self, name: str, mine: bytes) -> list[bytes]:
        return self.start_gather(name, mine).wait()

    def costs(self, measures_rates: bool, multiply: Multiply = multiply_arrays) -> Costs:
        return measure_costs(self.process_set, measures_rates, multiply)

    def stats(self) -> dict[str, Any]:
        return _core.stats()

    def export_state(self, stream: int, name: str) -> Tensors:
        saved = _core.export_state(self._set, stream, name)
        return {
            state.name: np.frombuffer(bytearray(data), state.dtype).reshape(state.shape)
            for state in saved
            if (data := state.data)
        }

    def import_state(self, stream: int, name: str, tensors: Tensors) -> None:
        states = [
            _core.State(key, tensor.dtype.name, tensor.shape, tensor.tobytes())
            for key, tensor in tensors.items()
        ]
        _core.import_state(self._set, stream, name, states)

    def return_last(self, stream: int) -> None:
        _core.return_last(self._set, stream)

    def drop_states(self, stream: int) -> None:
        if _core.is_initialized():
            _core.drop_states(self._set, stream)


_numbers: dict[tuple[str, int | None], tuple[tuple[int, int] | None, int]] = {}
