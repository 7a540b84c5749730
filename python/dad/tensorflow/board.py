"""The plan of an optimizer or tape: Python's side of tf_ops/plan/board.h.

A graph is made once and runs often, so what it sends is not decided when it is made. Every step begins with
the op DadPlan, which knows how many rows the batch has. As long as nothing has changed it answers by itself;
else it asks here, on a thread of its own, and the step waits: in the first step, after the warm-up, when a
request said that some rank wants a new plan, after a join, with a new engine, and when replicas are to be
compared. All ranks come here in the same step, since all have seen the same. Nothing of a step is sent
before that.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dad import dry_run
from dad.basics import Average
from dad.errors import MismatchError, ReplicaError
from dad.log import log
from dad.methods.kinds import Sends
from dad.methods.planned import warm_up_steps
from dad.planning.agreement import Description
from dad.planning.outcome import Outcome
from dad.planning.ranks import RanksOf
from dad.planning.session import Session
from dad.planning.text import PRINTED_AFTER_STEPS
from dad.planning.types import Choice, Link, Observation, Plan
from dad.process_sets import ProcessSet
from dad.state.replicas import CURES_OF_SESSIONS, CURES_OF_VARIABLES, Replica
from dad.state.state_bytes import from_bytes, to_bytes
from dad.state.states import add_shares
from dad.tensorflow import board_structs
from dad.tensorflow._load import library

_MOST_NOTES = 4096
_NEVER = -1


@dataclass
class Tensor:
    """A variable, in the order of the wire."""

    name: str
    method: Any
    matrix: tuple[int, int]
    shape: tuple[int, ...]  # on the wire; a vector has one dimension
    element_bytes: int
    dtype_name: str
    compressor: Any = None
    floating: bool = True
    planned: bool = False
    too_large: bool = False
    kept: np.ndarray | None = None

    @property
    def wide_dtype(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype_name == "float64" else np.float32)


@dataclass
class Pair:
    """A weight and its bias, or a tensor by itself, as one graph has them."""

    weight: str
    bias: str | None
    has_rows: bool
    row_bytes: int = 0
    dense: bool = False  # of its gradient a part comes formed
    reason: str = ""
    link: Link | None = None
    bias_reason: str = ""
    sums: bool = False  # rows are gradients of samples
    row_outputs: int = 0  # as in Observation


@dataclass
class Trace:
    """What a graph was found to have."""

    pairs: list[Pair]
    places: list[int] = field(default_factory=list)  # of the pairs on the board


class Board:
    """One for each optimizer, and for each tape with the same settings."""

    def __init__(
        self,
        process_set: ProcessSet,
        stream: int,
        op: int,
        wire_name: Callable[[str], str],
        described: Description,
    ) -> None:
        self.replica: Callable[[], Replica] | None = None  # what this rank has; None: nobody can tell here
        self._graph_compares = False  # but a graph of TF1 can: see compare()
        self._described = described
        # Called once, when a plan has been followed for a few steps and its bytes have been measured, with
        # the exposed time of a step in ms (tf_ops/plan/board.h).
        self.on_measured: Callable[[float], None] | None = None
        self._measured_at = _NEVER  # the step in which that is
        self._exposed_before = 0.0
        self.id = library.dad_tf_new_board()
        self._traces: dict[int, Trace] = {}
        self._places: dict[tuple[str, str | None], int] = {}
        self._wire_name = wire_name
        ranks = RanksOf(process_set)
        self._session = Session[Tensor](
            ranks, "tensorflow", stream, op == Average, CURES_OF_VARIABLES, wire_name
        )
        self._first_step = 0  # of the board, as the session counts
        self._begun = 0  # steps of the board
        self._compared_from = 0  # the step from which on ReplicaCheck counts
        _boards[self.id] = self
        weakref.finalize(self, library.dad_tf_drop_board, self.id)

    @property
    def plan(self) -> Plan | None:
        return self._session.plan

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self._session.tensors

    # When a graph is made

    def add_tensors(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.name not in self.tensors:
                self.tensors[tensor.name] = tensor

    def add_trace(self, pairs: Sequence[Pair]) -> tuple[int, list[int]]:
        """Its number, and the places of its pairs on the board."""
        for number, trace in self._traces.items():
            if trace.pairs == pairs:
                return number, trace.places
        trace = Trace(list(pairs))
        for pair in pairs:
            place = self._places.setdefault((pair.weight, pair.bias), len(self._places))
            trace.places.append(place)
        number = next(_trace_numbers)
        self._traces[number] = trace
        library.dad_tf_ask_again(self.id)
        return number, trace.places

    # While it runs

    def begin_step(self, trace: int, steps: int, counts: np.ndarray) -> None:
        """Leaves on the board how this step's tensors are sent."""
        session = self._session
        self._begun = steps + 1
        session.steps = self._first_step + steps
        self._tell()
        problem = self._end_comparison()
        held = self._agree()
        # Not before: ranks that may have diverged could be at different steps, or have no plan.
        if session.next_review() == session.steps:
            session.review()
            held = session.held()
        self._begin_comparison()
        if held:
            self._make_plan(held, self._traces[trace], counts)
        if self._measured_at != _NEVER and session.steps >= self._measured_at:
            self._say_it_is_measured()
        self._write()
        if problem is not None:
            raise problem

    def _agree(self) -> list[Tensor]:
        """What this step makes a plan for. Ranks that may have parted compare; if their plans differ they
        begin anew. MismatchError, on all ranks, if they were made with something else."""
        session = self._session
        # Ranks that disagreed may go on with boards that have seen different steps.
        if library.dad_tf_take_parted(self.id) or session.is_outdated():
            session.agreement.doubt()
        held = session.held()
        if not session.agreement.is_due():
            return held
        before = session.steps
        session.replicas.steps = before - self._compared_from
        has_same_plan = session.agree(self._described, held)
        self._first_step += session.steps - before
        self._compared_from = session.steps - session.replicas.steps
        if not has_same_plan:
            session.forget_plan()
        return session.held()

    def _say_it_is_measured(self) -> None:
        self._measured_at = _NEVER
        on_measured, self.on_measured = self.on_measured, None
        if on_measured is not None:
            exposed = library.dad_tf_exposed_seconds(self.id) - self._exposed_before
            on_measured(1e3 * exposed / PRINTED_AFTER_STEPS)

    def _tell(self) -> None:
        """What requests have ended with since the last time."""
        notes = (board_structs.Note * _MOST_NOTES)()
        count = library.dad_tf_take_notes(self.id, notes, _MOST_NOTES)
        pairs = list(self._places)
        for note in notes[:count]:
            weight, bias = pairs[note.pair]
            name = bias if note.of_bias and bias is not None else weight
            self._session.tell(name, Outcome.of(note.value), [self.tensors[name]])

    # Replicas are compared in the background: begun in one step, and ended in the next.

    def _begin_comparison(self) -> None:
        replicas = self._session.replicas
        replicas.steps = self._session.steps - self._compared_from
        if self.replica is not None:
            replicas.begin(self._session.agreement.name, self.replica)
        elif self._graph_compares and replicas.is_due():
            library.dad_tf_compare(self.id)

    def _can_compare(self) -> bool:
        return self.replica is not None or self._graph_compares

    def let_graph_compare(self) -> None:
        """For graphs of TF1, whose variables only the graph can read."""
        self._graph_compares = True
        self._session.replicas.cures = CURES_OF_SESSIONS

    def compare(self, replica: Callable[[], Replica]) -> None:
        """The graph has come to the step in which replicas are compared."""
        self._session.replicas.begin(self._session.agreement.name, replica)

    def _end_comparison(self) -> Exception | None:
        try:
            self._session.replicas.end(self._session.agreement.name)
        except ReplicaError as error:
            return error
        return None

    # Plans

    def _make_plan(self, held: list[Tensor], trace: Trace, counts: np.ndarray) -> None:
        rows = counts.reshape(-1, 3).tolist()
        if self._session.make_plan(held, lambda tensors: observe(tensors, trace.pairs, rows)) is None:
            return
        self._return_kept(held)
        if self.on_measured is not None:
            self._measured_at = self._session.steps + PRINTED_AFTER_STEPS
            self._exposed_before = library.dad_tf_exposed_seconds(self.id)

    def _return_kept(self, tensors: Sequence[Tensor]) -> None:
        """What ranks have kept of tensors of which nothing is kept any more goes into this step's result."""
        mine = {tensor.name: tensor.kept for tensor in tensors if tensor.kept is not None}
        name = f"kept.{self._session.agreement.name}"
        total: dict[str, np.ndarray] = {}
        for kept in map(from_bytes, self._session.ranks.gather(name, to_bytes(mine))):
            add_shares(total, {name: share.astype(np.float64) for name, share in kept.items()})
        for name, share in total.items():
            flat = np.ascontiguousarray(share.reshape(-1))
            pointer = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
            library.dad_tf_return(self.id, self._wire_name(name).encode(), pointer, flat.size)
        for tensor in tensors:
            tensor.kept = None

    # For the kernels

    def _write(self) -> None:
        session = self._session
        choices = session.choices
        chains = [choice for choice in choices if len(choice.layers) > 1 and self._is_whole(choice)]
        singles = [choice for choice in choices if len(choice.layers) == 1]
        ways = {choice.layers[0]: _way(choice) for choice in singles}
        rides = {bias: weight for choice in singles for weight, bias in choice.own() if bias is not None}
        chained = {pair for choice in chains for pair in choice.own()}
        pair_ways = (board_structs.PairWays * len(self._places))()
        for row, (weight, bias) in zip(pair_ways, self._places, strict=True):
            row.weight = row.bias = _DENSE_WAY
            alone = bias is None or rides.get(bias) != weight
            if alone and weight in rides.values():
                # This graph has another bias, or none, than the one that the plan was made for.
                library.dad_tf_ask_again(self.id)
                continue
            row.weight = ways.get(weight, _DENSE_WAY)
            row.bias = _DENSE_WAY if bias is None else ways.get(bias, _DENSE_WAY)
            row.bias_rides, row.in_chain = not alone, (weight, bias) in chained
        chain_rows = (board_structs.Chain * len(chains))()
        for chain, choice in zip(chain_rows, chains, strict=True):
            members = [
                board_structs.Member(self._places[weight, bias], passes)
                for weight, bias, passes in zip(choice.layers, choice.biases, choice.passes, strict=True)
            ]
            chain.way, chain.num_members = _way(choice), len(members)
            chain.members = (board_structs.Member * len(members))(*members)
        pending = [
            warm_up_steps(tensor.method)
            for tensor in self.tensors.values()
            if not tensor.planned and warm_up_steps(tensor.method) > session.steps
        ]
        if self._measured_at != _NEVER:
            pending.append(self._measured_at)
        if (review := session.next_review()) is not None:
            pending.append(review if review > session.steps else review + 1)
        replicas = session.replicas
        if replicas.is_running() or (self._graph_compares and replicas.is_due()):
            pending.append(session.steps + 1)
        elif (due := replicas.next_due()) is not None and self._can_compare():
            pending.append(self._compared_from + due)
        if dry_run.current() is not None:
            pending.append(session.steps + 1)  # which counts steps
        at = min(pending) - self._first_step if pending else _NEVER
        library.dad_tf_set_board(self.id, pair_ways, len(pair_ways), chain_rows, len(chain_rows), at)

    def _is_whole(self, choice: Choice) -> bool:
        """Whether a graph has the layers of a chain as the plan has them."""
        return all(pair in self._places for pair in zip(choice.layers, choice.biases, strict=True))

    # What is kept between steps

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they follow."""
        return {**self._session.save(), "steps": self._first_step + self._begun}

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on where a run has stopped, as Session.load() says."""
        self._session.load(saved)
        self._first_step = self._session.steps - self._begun
        self._compared_from = self._session.steps
        library.dad_tf_ask_again(self.id)


def observe(
    tensors: Sequence[Tensor], pairs: Sequence[Pair], counts: Sequence[Sequence[int]]
) -> dict[str, Observation]:
    """What this rank has seen of these tensors. counts: rows, indexed rows and samples of each pair."""
    by_name = {tensor.name: tensor for tensor in tensors}
    seen = {}
    for pair, (rows, indexed, samples) in zip(pairs, counts, strict=True):
        if pair.weight in by_name:
            seen[pair.weight] = Observation(
                rows=rows,
                indexed_rows=indexed,
                samples=samples,
                row_bytes=pair.row_bytes,
                dense=pair.dense or not pair.has_rows,
                bias=pair.bias if pair.has_rows else None,
                link=pair.link,
                reason=pair.reason,
                sums=pair.sums,
                row_outputs=pair.row_outputs,
                too_large=by_name[pair.weight].too_large,
            )
        if pair.bias is not None and pair.bias in by_name:
            # What rides has no gradient of its own.
            seen[pair.bias] = Observation(
                dense=not pair.has_rows,
                used=not pair.has_rows,
                reason=pair.bias_reason,
                too_large=by_name[pair.bias].too_large,
            )
    return seen


_DENSE_WAY = board_structs.Way(method=b"none")


def _way(choice: Choice) -> board_structs.Way:
    # Where no rank had rows there are none to wait for: a graph without them is what was planned for.
    comes_as_rows = choice.rows > 0 or choice.most_rows == 0
    by_layer = choice.row.sends is Sends.LAYER
    as_rows = by_layer and choice.capture != "off" and comes_as_rows
    return board_structs.Way(
        method=choice.text.encode(),
        most_rows=min(choice.most_rows, 2**62),
        by_layer=by_layer,
        as_rows=as_rows,
        keeps=choice.row.lossy,
    )


# The core asks by number; a board that is gone is not asked.
_boards: weakref.WeakValueDictionary[int, Board] = weakref.WeakValueDictionary()
_trace_numbers = itertools.count(1)


def _plan(board_id: int, trace: int, steps: int, counts: Any, num_counts: int) -> int:
    board = _boards.get(board_id)
    if board is None:
        return 2
    try:
        seen = np.ctypeslib.as_array(counts, (num_counts,)).copy() if num_counts else np.zeros(0, np.int64)
        board.begin_step(trace, steps, seen)
    except (MismatchError, ReplicaError) as error:
        library.dad_tf_fail_board(board_id, str(error).encode())
        return 1
    except Exception as error:
        log.debug("planning failed", exc_info=True)
        library.dad_tf_fail_board(board_id, f"{type(error).__name__}: {error}".encode())
        return 2
    return 0


_PLANNER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int64,
)(_plan)
library.dad_tf_set_planner(_PLANNER)
