"""The planning session of one optimizer: how its ranks come to follow one plan, and which state they keep.

A step goes through the session in this order. Frameworks differ in how they see and send gradients, so
these parts are given to it; everything that ranks must do alike is here:

    agree           Have all ranks made the same optimizer? Are they at the same place of the same plan?
    held            The tensors whose plan is made in this step, which all ranks observe.
    make_plan       observe: what this rank saw of them, told by the framework.
                    gather: what all ranks saw. A rank that failed to see says why, and all raise that.
                    plan: the planner's choices, the same on all ranks; what was kept passes over to them.
    review          At agreed steps: does the plan still fit what is measured? If not, another one is made.
    tell            What a request ended with: a rank asks for another plan, a gradient was not finite, ….
    save, load      For checkpoints.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from dad import dry_run
from dad.errors import MismatchError
from dad.log import log
from dad.methods.compression import Method
from dad.methods.planned import warm_up_steps
from dad.planning import planner
from dad.planning.agreement import Agreement, Description
from dad.planning.circle import Circle, as_hosts
from dad.planning.costs import Costs
from dad.planning.guard import Guard
from dad.planning.link import Multiply, multiply_arrays
from dad.planning.outcome import Outcome
from dad.planning.ranks import Ranks
from dad.planning.types import Choice, Layer, Observation, Plan
from dad.report import note_event
from dad.state.keeper import StateKeeper
from dad.state.replicas import Cures, ReplicaCheck
from dad.state.states import lost_on_load, saved_shares, under_names


class PlannedTensor(Protocol):
    """A tensor whose method ranks plan together."""

    name: str
    planned: bool  # it follows the session's plan
    too_large: bool  # a sparse form of it was larger than dense, on all ranks
    kept: np.ndarray | None  # this rank's share of what an earlier plan has not applied (states.py)

    @property
    def method(self) -> Method: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """On the wire."""

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the matrix that methods see; a vector is one column."""

    @property
    def dtype_name(self) -> str: ...

    @property
    def wide_dtype(self) -> np.dtype:
        """The type of the values that are kept between steps."""

    @property
    def element_bytes(self) -> int: ...

    @property
    def floating(self) -> bool: ...


# Steps with a plan after which it is reviewed; after the last of these, a review every so many steps.
_REVIEWS = (20, 40, 80, 160, 320)
# A new plan has to shorten the exposed part of a step by this factor to replace the present one.
_WORTH_IT = 0.8
# The line counts as changed if its rate differs by more than this factor from the measured one.
_LINE_CHANGED = 2.0
# A step has to keep the line busy for this many delays before the kernel's rate is that of the line.
_DELAYS_OF_LINE = 4.0

T = TypeVar("T", bound=PlannedTensor)
Observe = Callable[[Sequence[T]], dict[str, Observation]]


class Session(Generic[T]):
    """See the head of this file.

    Args:
        ranks: the ranks between which the optimizer exchanges.
        framework: distinguishes the optimizers of this framework from those of others.
        stream: the number under which the core keeps the states of this optimizer.
        average: whether results are means; else sums.
        cures: what users do about replicas that differ.
        request_name: how the core calls the request of a tensor.
    """

    def __init__(
        self,
        ranks: Ranks,
        framework: str,
        stream: int,
        average: bool,
        cures: Cures,
        request_name: Callable[[str], str] = lambda name: name,
    ) -> None:
        self.ranks = ranks
        self.tensors: dict[str, T] = {}
        self.plan: Plan | None = None
        self.steps = 0  # before the one that is going on, or begins next
        self.replan_wanted = False  # some rank has asked for another plan
        self.agreement = Agreement(ranks, framework)
        self.replicas = ReplicaCheck(ranks, cures)
        self.backward_seconds = 0.0  # of this rank's last step, if the framework tells
        self._average = average
        self._request_name = request_name
        self._guard = Guard()
        self._planned_at = 0  # the step in which the plan was made
        self._layers: list[Layer] = []  # what it was made of
        self._costs: Costs | None = None  # and with
        self._keeper = StateKeeper(ranks, stream, request_name)
        self._is_reviewed: bool | None = None  # whether the plan is; None: not looked at yet
        self._postponed = -1  # the number of joins at which the plan was postponed; a later join ends that
        self._said: set[str] = set()
        self._why_plan = "the first step without a plan"  # the one that is made next

    @property
    def choices(self) -> list[Choice]:
        return self.plan.choices if self.plan is not None else []

    @property
    def circle(self) -> Circle:
        return self.ranks.circle

    def is_outdated(self) -> bool:
        """Whether the plan was made for another number of ranks or hosts."""
        return self.plan is not None and self.plan.size != self.circle.size

    # agree

    def doubt(self) -> None:
        """Something may have happened on other ranks that this rank does not know of: they compare again."""
        self.agreement.doubt()
        self.replicas.start_anew()

    def begin_to_agree(self, described: Description, held: Iterable[T]) -> None:
        """Starts the comparison that agree() ends. Does not wait."""
        self.agreement.begin(described, self._facts(held))

    def agree(self, described: Description, held: Iterable[T]) -> bool:
        """Compares with the other ranks. Afterwards all ranks are at the same step.

        Args:
            described: what the optimizer was made with.
            held: the tensors that this rank is about to make a plan for.

        Returns:
            Whether all are at the same place of the same plan. If not, all ranks discard their plans.

        Raises:
            MismatchError: on all ranks, if their optimizers were made with something else.
        """
        everyone = self.agreement.settle(described, self._facts(held))
        self.steps = max(one["step"] for one in everyone)
        self.replicas.agree([one["replicas"] for one in everyone])
        same_plan = len({one["plan"] for one in everyone}) == 1
        return same_plan and not any(one["outdated"] for one in everyone)

    def _facts(self, held: Iterable[T]) -> dict[str, Any]:
        """Where this rank is, for the others."""
        choices = self.plan.as_dict() if self.plan is not None else None
        since = [self._planned_at, self._guard.as_dict(), self._costs is None]
        text = json.dumps([choices, sorted(tensor.name for tensor in held), self.replan_wanted, since])
        return {
            "step": self.steps,
            "outdated": self.is_outdated(),
            "plan": hashlib.sha256(text.encode()).hexdigest(),
            "replicas": self.replicas.facts(),
        }

    # plan

    def held(self) -> list[T]:
        """The tensors whose plan is made from what ranks observe in this step: those without a plan that are
        past their warm-up, or all tensors if some rank asked for another plan. None while some ranks have
        joined."""
        if self._postponed == self.ranks.joins:
            return []
        return [
            tensor
            for tensor in self.tensors.values()
            if (self.replan_wanted or not tensor.planned) and warm_up_steps(tensor.method) <= self.steps
        ]

    def _weighs_costs(self) -> bool:
        """Whether plans depend on measured costs."""
        size = self.circle.size
        return any(planner.weighs_costs(tensor.method, size) for tensor in self.tensors.values())

    def is_planned(self) -> bool:
        return all(tensor.planned for tensor in self.tensors.values())

    def make_plan(
        self, held: Sequence[T], observe: Observe[T], multiply: Multiply = multiply_arrays
    ) -> list[Choice] | None:
        """Makes the plan of these tensors together with the other ranks, which do the same now.

        Args:
            held: the same tensors on all ranks.
            observe: what this rank has seen of them, by name.
            multiply: how the framework multiplies, to measure how fast that is.

        Returns:
            The choices for these tensors; None if some ranks have joined and would not know of the plan. Then
            there is no plan until they are back.

        Raises:
            MismatchError: on all ranks, if one of them has failed to observe the step.
        """
        mine: dict[str, Observation] = {}
        failure = None
        try:
            mine = observe(held)
            if (watching := dry_run.current()) is not None:
                watching.saw(held, mine, multiply, lambda: self.steps)
        except Exception as error:  # the others wait for this rank, and are told
            failure = error
        seen, backward_seconds = self._gather(held, mine, failure)
        if len(seen) < self.ranks.size:
            self._postponed = self.ranks.joins
            return None
        self.replan_wanted = False
        names = {tensor.name for tensor in held}
        layers = layers_of(held, seen, self._guard)
        costs = self._costs  # from a review, or measured now
        if costs is None or costs.size != self.circle.size or not self.is_planned():
            costs = self.ranks.costs(self._weighs_costs(), multiply)
            if costs.measured:
                costs = dataclasses.replace(costs, backward_seconds=backward_seconds)
        made = planner.make_plan(layers, costs)
        others = [choice for choice in self.choices if not names.intersection(choice.layers)]
        choices = [*made.choices, *others]
        exposed = costs.exposed_seconds(choices) if costs.measured else None
        self.plan, self._is_reviewed = Plan(choices, made.size, exposed), None
        self._planned_at, self._costs = self.steps, costs
        self._layers = [*layers, *(layer for layer in self._layers if layer.name not in names)]
        for tensor in held:
            tensor.planned = True
        self._hand_over(made.choices, held)
        self._note_plan(made.choices)
        self._say_what_does_not_fit(made.choices)
        return made.choices

    def _note_plan(self, choices: Sequence[Choice]) -> None:
        """The plan as rank 0 reports it."""
        if self.ranks.rank_in_job == 0:
            counts = collections.Counter(planner.describe(choice) for choice in choices)
            methods = ", ".join(f"{count} by {method}" for method, count in counts.most_common())
            note_event("plan", f"step {self.steps + 1}: {self._why_plan}; requests: {methods}")
        self._why_plan = "parameters were added, or a warm-up ended"

    def _gather(
        self, held: Sequence[T], mine: dict[str, Observation], failure: Exception | None
    ) -> tuple[list[dict[str, Observation]], float]:
        """What every rank observed, in rank order; and the shortest backward() of a rank."""
        why = "" if failure is None else f"{type(failure).__name__}: {failure}"
        observed = {name: dataclasses.asdict(one) for name, one in mine.items()}
        packet = [self.ranks.rank_in_job, why, observed, self.backward_seconds, self._guard.as_dict()]
        gathered = self.ranks.gather(f"plan.{self.agreement.name}", json.dumps(packet).encode())
        everyone = [json.loads(one) for one in gathered]
        for rank, why, *_ in everyone:
            if why:
                raise MismatchError(
                    f'"{held[0].name}" and what else has no plan yet: rank {rank} failed in the step that '
                    f"all ranks observe: {why}"
                ) from failure
        self._guard.take(guard for *_, guard in everyone)
        shortest = min(seconds for *_, seconds, _ in everyone)
        observed_by_all = [seen for _, _, seen, *_ in everyone]
        return [
            {name: Observation.from_dict(one) for name, one in seen.items()} for seen in observed_by_all
        ], shortest

    def forget_plan(self) -> None:
        """Discards the plan; another one is made when the tensors are observed again. The state that was kept
        by it stays with the tensors."""
        self._why_plan = (
            "the number of ranks or hosts is another one" if self.is_outdated() else "ranks parted"
        )
        self._hand_over([], list(self.tensors.values()))
        self.plan = self._costs = None
        self.replan_wanted = False
        for tensor in self.tensors.values():
            tensor.planned = False

    def _hand_over(self, choices: Sequence[Choice], tensors: Sequence[T]) -> None:
        circle = self.circle
        self._keeper.hand_over(choices, tensors, circle.place(self._average), circle.keeps)

    def _say_what_does_not_fit(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            tensor = self.tensors[choice.layers[0]]
            if choice.fallback and self.say_once(f"fit {tensor.name}") and self.ranks.rank == 0:
                # A model has many vectors, which no factor method plans.
                say = log.info if len(tensor.shape) < 2 else log.warning
                way = planner.describe(choice)
                say('"%s" is not sent by %s but %s: %s', tensor.name, tensor.method.name, way, choice.why)

    # review

    def next_review(self) -> int | None:
        """The step in which all ranks call review(); None: there is no further review."""
        if self.plan is None or self.ranks.size == 1:
            return None
        if self._is_reviewed is None:  # asked in every step
            self._is_reviewed = self._weighs_costs()
        if not self._is_reviewed:
            return None
        done = self.steps - self._planned_at
        every = _REVIEWS[-1]
        later = next(
            (count for count in _REVIEWS if count >= done), (max(done, 1) + every - 1) // every * every
        )
        return self._planned_at + later

    def review(self) -> None:
        """Compares what ranks have measured. If the plan does not fit any more, all want another one."""
        stats = self.ranks.stats()
        names = [choice.layers[0] for choice in self.choices if choice.kind == "low_rank"]
        counted = {name: stats["tensors"].get(self._request_name(name), {}) for name in names}
        captured = {name: one["captured"] for name, one in counted.items() if "captured" in one}
        mine = [captured, self.backward_seconds, stats.get("line_bytes_per_second", 0.0), bool(self._layers)]
        gathered = self.ranks.gather(f"review.{self.agreement.name}", json.dumps(mine).encode())
        everyone = [json.loads(one) for one in gathered]
        if len(everyone) < self.ranks.size:
            return  # some have joined
        of_all = [one[0] for one in everyone]
        if not all(knows for *_, knows in everyone):  # a plan from a checkpoint has no observations
            self.replan_wanted = self.replan_wanted or self._guard.is_concerned(of_all)
            return
        raised = self._guard.review(self._layers, self.choices, of_all)
        for name in raised:
            if self.ranks.rank == 0:
                log.warning('"%s" is sent by auto with more precision: %s', name, self._guard.reasons[name])
        assert self._costs is not None
        num_bytes = sum(choice.num_bytes for choice in self.choices)
        self._costs = _refreshed(
            self._costs, [one[1] for one in everyone], [one[2] for one in everyone], num_bytes
        )
        if raised or self._another_is_faster(self._costs):
            self.replan_wanted = True

    def _another_is_faster(self, costs: Costs) -> bool:
        another = planner.make_plan([_guarded(layer, self._guard) for layer in self._layers], costs)
        return costs.exposed_seconds(another.choices) < _WORTH_IT * costs.exposed_seconds(self.choices)

    # tell

    def tell(self, name: str, outcome: Outcome, members: Sequence[T]) -> None:
        """What all ranks learned from a request of this name, which carried these tensors."""
        if outcome.wants_plan:
            self.replan_wanted = True
            self._why_plan = f'a rank asked for it: "{name}" had more rows, or other uses, than planned'
        if outcome.too_large:
            self._why_plan = f'the sparse form of "{name}" was larger than dense'
            for tensor in members:
                tensor.too_large = True
        if outcome.not_finite and self.say_once(f"finite {name}"):
            log.warning(
                'the gradient of "%s" was not finite on %s: all ranks get NaN for it, '
                "and what was kept of it is as before; this is said once",
                name,
                self.circle.name_of(outcome.rank) if outcome.rank is not None else "some rank",
            )

    def say_once(self, what: str) -> bool:
        """Whether that has not been logged yet."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    # The state that is kept between steps

    def return_last(self) -> None:
        """The last step was skipped (a scaler found infinities): its contribution is kept."""
        self._keeper.return_last()

    def drop(self) -> None:
        """Clears the state."""
        self._keeper.drop()

    def described(self) -> list[tuple[Any, ...]]:
        """The description of what can be planned: name, shape, dtype and method of each tensor."""
        return [(t.name, t.shape, t.dtype_name, t.method.spec()) for t in self.tensors.values()]

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they belong to."""
        circle = self.circle
        return {
            "steps": self.steps,
            "size": circle.num_ranks,
            "rank": circle.rank,
            "hosts": [list(host) for host in circle.hosts],
            "average": self._average,
            "tensors": self.described(),
            "plan": self.plan.as_dict() if self.plan is not None else None,
            "planned_at": self._planned_at,
            "guard": self._guard.as_dict(),
            "replan": self.replan_wanted,
            "too_large": [tensor.name for tensor in self.tensors.values() if tensor.too_large],
            **self._keeper.save(),
            "kept": {t.name: t.kept for t in self.tensors.values() if t.kept is not None},
        }

    def load(self, saved: dict[str, Any]) -> bool:
        """Continues where a run stopped: on the same ranks and hosts, with the same bits. On another number
        of them, or with other methods, this rank's kept values are taken over in a form that fits
        (states.py). A rank whose number did not exist before, or that was given another rank's state, begins
        with none.

        Returns:
            Whether the plan is the saved one; else there is none.
        """
        circle = self.circle
        if lost := lost_on_load(saved, circle.rank, circle.num_ranks):
            log.warning("%s", lost)
        self._keeper.drop()
        self.plan = self._is_reviewed = None
        self.replan_wanted = False
        for tensor in self.tensors.values():
            tensor.planned = tensor.too_large = False
            tensor.kept = None
        self.steps = saved["steps"]
        self._layers, self._costs = [], None
        saved = under_names(saved, self.described())
        self._guard = Guard()
        self._guard.take([saved.get("guard", {})])
        mine = saved["rank"] == circle.rank
        plan = Plan.from_dict(saved["plan"]) if saved["plan"] is not None else None
        tensors = [(name, tuple(shape), *rest) for name, shape, *rest in saved["tensors"]]
        same = saved["size"] == circle.num_ranks and as_hosts(saved.get("hosts", ())) == circle.hosts
        goes_on = plan is not None and plan.size == circle.size and same and tensors == self.described()
        if mine:
            shares = saved["kept"] if goes_on else saved_shares(saved)
            for tensor in self.tensors.values():
                tensor.kept = shares.get(tensor.name)
        if goes_on and plan is not None:
            self.plan = plan
            self._planned_at = saved.get("planned_at", self.steps)
            self.replan_wanted = saved.get("replan", False)
            for tensor in self.tensors.values():
                tensor.planned = True
                tensor.too_large = tensor.name in saved.get("too_large", ())
            self._hand_over(plan.choices, list(self.tensors.values()))
            if mine:
                self._keeper.load(saved)
        self.doubt()
        return goes_on


def layers_of(
    tensors: Sequence[PlannedTensor], seen: Sequence[dict[str, Observation]], guard: Guard | None = None
) -> list[Layer]:
    """The tensors in the planner's form, with what every rank observed."""
    layers = [
        Layer(
            name=tensor.name,
            out=tensor.matrix[0],
            columns=tensor.matrix[1],
            element_bytes=tensor.element_bytes,
            floating=tensor.floating,
            method=tensor.method,
            seen=tuple(one.get(tensor.name, Observation(used=False)) for one in seen),
        )
        for tensor in tensors
    ]
    return [_guarded(layer, guard) for layer in layers] if guard is not None else layers


def _guarded(layer: Layer, guard: Guard) -> Layer:
    strength = guard.strengths.get(layer.name, 0)
    if strength == layer.strength:
        return layer
    return dataclasses.replace(layer, strength=strength, raised=guard.reasons[layer.name])


def _refreshed(
    costs: Costs,
    backward_seconds: Sequence[float],
    line_rates: Sequence[float],
    num_bytes: float = float("inf"),
) -> Costs:
    """Costs that include measurements of real steps: the shortest backward() of a rank, and the line if its
    rate has clearly changed. The kernel reports none between ranks on one host."""
    if not costs.measured:
        return costs
    rate = min(line_rates)
    # In a step with few bytes the kernel has timed the round trips, not the line.
    is_line = costs.line_seconds(num_bytes) > _DELAYS_OF_LINE * costs.delay
    changed = is_line and rate > 0 and not 1 / _LINE_CHANGED < rate / costs.bytes_per_second < _LINE_CHANGED
    return dataclasses.replace(
        costs,
        backward_seconds=min(backward_seconds),
        bytes_per_second=rate if changed and not costs.is_one_host else costs.bytes_per_second,
    )
