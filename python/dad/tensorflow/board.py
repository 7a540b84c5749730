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
import dataclasses
import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dad._lib import _core
from dad.basics import Average
from dad.errors import MismatchError, ReplicaError
from dad.log import log
from dad.methods.compression import Exact
from dad.methods.kinds import Sends
from dad.methods.planned import warm_up_steps
from dad.planning import planner
from dad.planning.agreement import Agreement, Description
from dad.planning.circle import Circle, Place, as_hosts, circle_of
from dad.planning.link import measure_costs
from dad.planning.planner import Choice, Layer, Link, Observation, Plan
from dad.planning.text import PRINTED_AFTER_STEPS
from dad.process_sets import ProcessSet
from dad.state.keeper import StateKeeper
from dad.state.replicas import CURES_OF_VARIABLES, Replica, ReplicaCheck
from dad.state.state_bytes import from_bytes, to_bytes
from dad.state.states import add_shares, lost_on_load, saved_shares, under_names
from dad.tensorflow._load import library

# Bits of what a request ends with (dad_core/include/dad/ticket.h).
_WANTS_PLAN, _NOT_FINITE, _TOO_LARGE, _RANK_SHIFT = 1, 2, 4, 8
_MOST_NOTES = 4096
_NEVER = -1


@dataclass
class Tensor:
    """A variable, in the order of the wire."""

    name: str
    method: Any
    out: int
    columns: int
    shape: tuple[int, ...]  # on the wire; a vector has one dimension
    element_bytes: int
    dtype: str
    compressor: Any = None
    floating: bool = True
    planned: bool = False
    too_large: bool = False
    kept: np.ndarray | None = None

    @property
    def wide_dtype(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)


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
        self.process_set = process_set
        self.op = op
        self.replica: Callable[[], Replica] | None = None  # what this rank has; None: nobody can tell
        self._described = described
        self.tensors: dict[str, Tensor] = {}
        # Called once, when a plan has been followed for a few steps and its bytes have been measured, with
        # the exposed time of a step in ms (tf_ops/plan/board.h).
        self.on_measured: Callable[[float], None] | None = None
        self._measured_at = _NEVER  # the step in which that is
        self._exposed_before = 0.0
        self.plan: Plan | None = None
        self.id = library.dad_tf_new_board()
        self._stream = stream
        self._traces: dict[int, Trace] = {}
        self._places: dict[tuple[str, str | None], int] = {}
        self._wire_name = wire_name
        self._keeper = StateKeeper(process_set, stream, wire_name)
        self._steps = 0  # before the board's first one
        self._seen_steps = 0  # of the board
        self._agreement = Agreement(process_set, "tensorflow", library.dad_tf_num_joins)
        self._replicas = ReplicaCheck(process_set, CURES_OF_VARIABLES)
        self._compared_from = 0  # the step from which on ReplicaCheck counts
        self._postponed = _NEVER
        self._said: set[str] = set()
        _boards[self.id] = self
        weakref.finalize(self, library.dad_tf_drop_board, self.id)

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
        self._seen_steps = steps
        wants_plan = self._take_notes()
        problem = self._end_comparison()
        self._meet_changes()
        self._begin_comparison()
        held = [
            tensor
            for tensor in self.tensors.values()
            if (wants_plan or not tensor.planned) and warm_up_steps(tensor.method) <= self._now()
        ]
        if held and self._postponed != library.dad_tf_num_joins():
            self._make_plan(held, self._traces[trace], counts)
        if self._measured_at != _NEVER and self._now() >= self._measured_at:
            self._say_it_is_measured()
        self._write()
        if problem is not None:
            raise problem

    def _say_it_is_measured(self) -> None:
        self._measured_at = _NEVER
        on_measured, self.on_measured = self.on_measured, None
        if on_measured is not None:
            exposed = library.dad_tf_exposed_seconds(self.id) - self._exposed_before
            on_measured(1e3 * exposed / PRINTED_AFTER_STEPS)

    def _now(self) -> int:
        return self._steps + self._seen_steps

    def _take_notes(self) -> bool:
        """Whether some rank wants a new plan."""
        buffer = (ctypes.c_int64 * (3 * _MOST_NOTES))()
        count = library.dad_tf_take_notes(self.id, buffer, _MOST_NOTES)
        pairs = list(self._places)
        wants_plan = False
        for i in range(count):
            place, of_bias, value = buffer[3 * i : 3 * i + 3]
            name = pairs[place][1 if of_bias else 0]
            wants_plan |= bool(value & _WANTS_PLAN)
            if value & _TOO_LARGE:
                self.tensors[name].too_large = True
            if value & _NOT_FINITE and self._say_once(f"finite {name}"):
                number = value >> _RANK_SHIFT
                log.warning(
                    'the gradient of "%s" was not finite on %s: all ranks get NaN for it, '
                    "and what was kept of it is as before; this is said once",
                    name,
                    self._circle.name_of(number - 1) if number else "some rank",
                )
        return wants_plan

    def _meet_changes(self) -> None:
        """Ranks that may have parted compare; if their plans differ they begin anew. MismatchError, on all
        ranks, if they were made with something else."""
        outdated = self.plan is not None and self.plan.size != self._circle.size
        # Ranks that disagreed may go on with boards that have seen different steps.
        if library.dad_tf_take_parted(self.id) or outdated:
            self._agreement.doubt()
        if not self._agreement.is_due():
            return
        choices = json.dumps(self.plan.as_dict() if self.plan is not None else None)
        self._replicas.steps = self._now() - self._compared_from
        mine = {
            "step": self._now(),
            "outdated": outdated,
            "plan": hashlib.sha256(choices.encode()).hexdigest(),
            "replicas": self._replicas.facts(),
        }
        everyone = self._agreement.settle(self._described, mine)
        self._steps += max(one["step"] for one in everyone) - self._now()
        self._replicas.agree([one["replicas"] for one in everyone])
        self._compared_from = self._now() - self._replicas.steps
        if any(one["outdated"] for one in everyone) or len({one["plan"] for one in everyone}) > 1:
            self._forget_plan()

    # Replicas are compared in the background: begun in one step, and ended in the next.

    def _begin_comparison(self) -> None:
        if self.replica is not None:
            self._replicas.steps = self._now() - self._compared_from
            self._replicas.begin(self._agreement.name, self.replica)

    def _end_comparison(self) -> Exception | None:
        try:
            self._replicas.end(self._agreement.name)
        except ReplicaError as error:
            return error
        return None

    def _gather(self, what: str, mine: Any) -> list[Any]:
        name = f"{what}.{self._agreement.name}"
        data = json.dumps(mine).encode()
        return [json.loads(one) for one in _core.gather_bytes(name, data, self.process_set.process_set_id)]

    def _forget_plan(self) -> None:
        self._hand_over([], list(self.tensors.values()))
        self.plan = None
        for tensor in self.tensors.values():
            tensor.planned = False

    # Plans

    def _make_plan(self, held: list[Tensor], trace: Trace, counts: np.ndarray) -> None:
        mine: dict[str, Observation] = {}
        failure = None
        try:
            mine = observe(held, trace.pairs, counts.reshape(-1, 3).tolist())
        except Exception as error:  # the others wait for this rank, and are told
            log.debug("failed to observe a step", exc_info=True)
            failure = f"{type(error).__name__}: {error}"
        seen = self._share(held, mine, failure)
        if len(seen) < self.process_set.size():
            self._postponed = library.dad_tf_num_joins()  # who has joined would not know of it
            return
        weighs_time = any(isinstance(tensor.method, Exact) for tensor in held)
        costs = measure_costs(self.process_set, weighs_time)
        made = planner.make_plan(layers_of(held, seen), costs)
        names = {tensor.name for tensor in held}
        others = self.plan.choices if self.plan is not None else []
        kept = [choice for choice in others if not names.intersection(choice.layers)]
        self.plan = Plan([*made.choices, *kept], made.size)
        for tensor in held:
            tensor.planned = True
        self._hand_over(made.choices, held)
        self._return_kept(held)
        self._say_what_does_not_fit(made.choices)
        if self.on_measured is not None:
            self._measured_at = self._now() + PRINTED_AFTER_STEPS
            self._exposed_before = library.dad_tf_exposed_seconds(self.id)

    def _return_kept(self, tensors: Sequence[Tensor]) -> None:
        """What ranks have kept of tensors of which nothing is kept any more goes into this step's result."""
        mine = {tensor.name: tensor.kept for tensor in tensors if tensor.kept is not None}
        name = f"kept.{self._agreement.name}"
        all_ranks = _core.gather_bytes(name, to_bytes(mine), self.process_set.process_set_id)
        total: dict[str, np.ndarray] = {}
        for kept in map(from_bytes, all_ranks):
            add_shares(total, {name: share.astype(np.float64) for name, share in kept.items()})
        for name, share in total.items():
            flat = np.ascontiguousarray(share.reshape(-1))
            pointer = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
            library.dad_tf_return(self.id, self._wire_name(name).encode(), pointer, flat.size)
        for tensor in tensors:
            tensor.kept = None

    def _share(
        self, held: list[Tensor], mine: dict[str, Observation], failure: str | None
    ) -> list[dict[str, Observation]]:
        """What every rank has seen. MismatchError, on all of them, if one has failed to see."""
        packet = [
            self.process_set.rank(),
            {name: dataclasses.asdict(observation) for name, observation in mine.items()},
            failure,
        ]
        all_ranks = self._gather("plan", packet)
        for rank, _, why in all_ranks:
            if why is not None:
                raise MismatchError(
                    f'"{held[0].name}" and what else has no plan yet: rank {rank} failed in the step that '
                    f"all ranks observe: {why}"
                )
        return [{name: _observation(one) for name, one in seen.items()} for _, seen, _ in all_ranks]

    def _say_what_does_not_fit(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            name = choice.layers[0]
            tensor = self.tensors[name]
            if choice.fallback and self._say_once(f"fit {name}") and self.process_set.rank() == 0:
                # A model has many vectors, for which no factor method is made.
                say = log.info if len(tensor.shape) < 2 else log.warning
                way = planner.describe(choice)
                say('"%s" is not sent by %s but %s: %s', name, tensor.method.name, way, choice.why)

    def _say_once(self, what: str) -> bool:
        if what in self._said:
            return False
        self._said.add(what)
        return True

    # For the kernels

    def _write(self) -> None:
        choices = self.plan.choices if self.plan is not None else []
        chains = [choice for choice in choices if len(choice.layers) > 1 and self._is_whole(choice)]
        singles = [choice for choice in choices if len(choice.layers) == 1]
        ways = {choice.layers[0]: _way(choice) for choice in singles}
        rides = {bias: weight for choice in singles for weight, bias in choice.own() if bias is not None}
        chained = {pair for choice in chains for pair in choice.own()}
        lines = []
        for weight, bias in self._places:
            alone = bias is None or rides.get(bias) != weight
            if alone and weight in rides.values():
                # This graph has another bias, or none, than the one that the plan was made for.
                lines.append("\t".join(["pair", _DENSE_WAY, "0", _DENSE_WAY, "0"]))
                library.dad_tf_ask_again(self.id)
                continue
            fields = ["pair", ways.get(weight, _DENSE_WAY), "0" if alone else "1"]
            fields += [_DENSE_WAY if bias is None else ways.get(bias, _DENSE_WAY)]
            lines.append("\t".join([*fields, str(int((weight, bias) in chained))]))
        for choice in chains:
            members = [
                f"{self._places[weight, bias]}\t{int(passes)}"
                for weight, bias, passes in zip(choice.layers, choice.biases, choice.passes, strict=True)
            ]
            lines.append("\t".join(["chain", _way(choice), *members]))
        pending = [
            warm_up_steps(tensor.method)
            for tensor in self.tensors.values()
            if not tensor.planned and warm_up_steps(tensor.method) > self._now()
        ]
        if self._measured_at != _NEVER:
            pending.append(self._measured_at)
        if self._replicas.is_running():
            pending.append(self._now() + 1)
        elif self.replica is not None and (due := self._replicas.next_due()) is not None:
            pending.append(self._compared_from + due)
        at = min(pending) - self._steps if pending else _NEVER
        library.dad_tf_set_board(self.id, "\n".join(lines).encode(), at)

    def _is_whole(self, choice: Choice) -> bool:
        """Whether a graph has the layers of a chain as the plan has them."""
        return all(pair in self._places for pair in zip(choice.layers, choice.biases, strict=True))

    # What is kept between steps

    @property
    def _circle(self) -> Circle:
        """Between whom methods go. It may change with shutdown() and init()."""
        return circle_of(self.process_set)

    def _place(self) -> Place:
        return self._circle.place(self.op == Average)

    def _hand_over(self, choices: Sequence[Choice], tensors: Sequence[Tensor]) -> None:
        self._keeper.hand_over(choices, tensors, self._place(), self._circle.keeps)

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they follow."""
        circle = self._circle
        return {
            "steps": self._now() + 1,
            "size": circle.num_ranks,
            "rank": circle.rank,
            "hosts": [list(host) for host in circle.hosts],
            "average": self.op == Average,
            "tensors": self._tensors_described(),
            "plan": self.plan.as_dict() if self.plan is not None else None,
            "too_large": [tensor.name for tensor in self.tensors.values() if tensor.too_large],
            **self._keeper.save(),
            "kept": {name: t.kept for name, t in self.tensors.items() if t.kept is not None},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """As GradientSync.load() of dad.torch: with the same bits on the same ranks and hosts, else what this
        rank has kept in the form that fits."""
        if lost := lost_on_load(saved, self.process_set.rank(), self.process_set.size()):
            log.warning("%s", lost)
        self._keeper.drop()
        self.plan = None
        for tensor in self.tensors.values():
            tensor.planned = False
            tensor.kept = None
        self._steps = saved["steps"] - self._seen_steps - 1
        mine = saved["rank"] == self.process_set.rank()
        saved = under_names(saved, self._tensors_described())
        plan = Plan.from_dict(saved["plan"]) if saved["plan"] is not None else None
        tensors = [(name, tuple(shape), *rest) for name, shape, *rest in saved["tensors"]]
        circle = self._circle
        same = saved["size"] == circle.num_ranks and as_hosts(saved.get("hosts", ())) == circle.hosts
        goes_on = (
            plan is not None and plan.size == circle.size and same and tensors == self._tensors_described()
        )
        if goes_on:
            self.plan = plan
            for tensor in self.tensors.values():
                tensor.planned = True
                tensor.too_large = tensor.name in saved["too_large"]
            self._hand_over(plan.choices, list(self.tensors.values()))
        if goes_on and mine:
            self._keeper.load(saved)
        if mine:
            shares = saved["kept"] if goes_on else saved_shares(saved)
            for name, tensor in self.tensors.items():
                tensor.kept = shares.get(name)
        self._agreement.doubt()
        self._replicas.start_anew()
        self._compared_from = saved["steps"] - 1
        library.dad_tf_ask_again(self.id)

    def _tensors_described(self) -> list[tuple[Any, ...]]:
        return [(t.name, t.shape, t.dtype, t.method.spec()) for t in self.tensors.values()]


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


def layers_of(tensors: Sequence[Tensor], seen: Sequence[dict[str, Observation]]) -> list[Layer]:
    """The tensors as the planner has them, with what every rank saw."""
    return [
        Layer(
            name=tensor.name,
            out=tensor.out,
            columns=tensor.columns,
            element_bytes=tensor.element_bytes,
            floating=tensor.floating,
            method=tensor.method,
            seen=tuple(one.get(tensor.name, Observation(used=False)) for one in seen),
        )
        for tensor in tensors
    ]


def _observation(fields: dict[str, Any]) -> Observation:
    link = fields["link"]
    return Observation(**{**fields, "link": Link(**link) if link is not None else None})


_DENSE_WAY = "\t".join(["0", "0", "0", "0", "none"])


def _way(choice: Choice) -> str:
    """A line for tf_ops/plan/board.h."""
    # Where no rank had rows there are none to wait for: a graph without them is what was planned for.
    comes_as_rows = choice.rows > 0 or choice.most_rows == 0
    by_layer = choice.row.sends is Sends.LAYER
    as_rows = by_layer and choice.capture != "off" and comes_as_rows
    flags = [str(int(flag)) for flag in (by_layer, as_rows, choice.row.lossy)]
    return "\t".join([*flags, str(min(choice.most_rows, 2**62)), choice.text])


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
