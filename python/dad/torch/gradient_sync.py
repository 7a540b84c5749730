"""Sends gradients as backward() makes them, and waits for them.

A unit (layer_units.py) is what travels as one request: a parameter or a group of them, a layer or a chain
of layers by a factor method, a quantised tensor. It is sent by the hook of the last of its parameters to get
its gradient, so that the wire is busy while backward() goes on. synchronize() sends what no hook has sent
(parameters that this rank did not use), so that all ranks send the same units, and waits.

After a backward pass that was the last one of a step for some parameter, .grad is watched (pending_grad.py).
Using it does what synchronize() does, short of ending the step, so the user sees the reduced gradient and may
change it. All ranks send everything then: if a rank waited only for what it has sent itself, two ranks that
used different parameters would wait for each other. The exception is a step with several backward() calls
over different parameters. Until as many have run as in the step before, using a gradient that is complete
waits for that one only, since the others are still to come.

Methods that work on layers need a plan, which is made of what all ranks saw in a step. Their first step
after the warm-up is therefore held: its units are made and sent by synchronize(). So is the step after
one in which a rank asked for a new plan.

Nothing of the first step is sent before its first backward pass is over: then ranks compare what their
optimizers were made with (agreement.py), since a rank with another model would leave the others waiting.

Ranks follow one plan, which they make together: none is made while some have joined. After a checkpoint,
which perhaps not all have loaded, and after a join, in the middle of a warm-up, say, they compare again; if
their plans differ, that step goes dense and the next one makes a plan.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dad.basics import Average, Sum
from dad.errors import MismatchError
from dad.log import log
from dad.methods.compression import Exact
from dad.methods.planned import looks_at_variance, planned_method, warm_up_steps
from dad.planning import planner
from dad.planning.agreement import Agreement, Description, common_options
from dad.planning.circle import Circle, Place, as_hosts, circle_of
from dad.planning.link import measure_costs
from dad.process_sets import ProcessSet
from dad.state.keeper import StateKeeper
from dad.state.replicas import Replica, ReplicaCheck
from dad.state.states import lost_on_load, saved_shares
from dad.torch import capture, grad_scaler, hooks, ops, pending_grad
from dad.torch._load import _torch
from dad.torch.batch_weight import BatchWeight
from dad.torch.checkpoint import as_arrays, as_tensors
from dad.torch.compression import compressor
from dad.torch.functions import allgather_object
from dad.torch.layer_units import DenseUnit, LayerUnit, Unit, make_unit
from dad.torch.naming import Named, describe
from dad.torch.observe import layers_of, observe, observing_mode
from dad.torch.replicas import CURES, dense
from dad.torch.slots import Slot, materialise, materialise_bias, multiply

# Counted by process set: ranks outside of one have not made its optimizers. Stream 0 is that of the
# user's own collectives.
_num_streams: collections.Counter[int | None] = collections.Counter()
_capture_owners = itertools.count(1)
_AGREEMENT_SECONDS = 1.0  # that a rank waits after backward() for others to come there
_PATIENCE_SECONDS = 20.0  # with ranks that do not send a gradient somebody has asked for
_MODES = ("off", "rows", "rows_and_dense", "samples")  # of capture, each more than the one before


def next_stream(process_set: ProcessSet) -> int:
    """What the next GradientSync will have. One that was refused for its arguments takes none: the ranks
    where it was not would count differently from then on."""
    return _num_streams[process_set.process_set_id] + 1


class GradientSync:
    """The exchange of one optimizer's gradients."""

    def __init__(
        self,
        *,
        compression: Any,
        op: int,
        passes: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        weighted: bool,
    ) -> None:
        self.compression = compression
        self.op = op
        self.passes = passes
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.loss_scale = grad_scaler.loss_scale  # what this step's loss is multiplied with
        self.stream = next_stream(process_set)
        _num_streams[process_set.process_set_id] = self.stream
        self._owner = next(_capture_owners)
        self.units: list[Unit] = []
        self._ready: list[Unit] = []  # have their gradients, but nothing is sent before synchronize()
        self.slots: dict[torch.Tensor, Slot] = {}
        self.touched = False  # a gradient came since the last synchronize()
        self._refused = False  # and one too many
        self._backward_pass = -1  # torch's number of the pass at whose end .grad will be watched
        self._backward_calls = 0  # of this step, that were the last one for some parameter
        self._usual_backward_calls = 0  # in the step before; 0: there was none
        self._watched: list[Slot] = []  # whose .grad is watched, or was in this step
        self._failed: list[Exception] = []  # what went wrong in this step
        self._waited = False  # for all results of this step
        self._follows_plan = True  # the same one as the other ranks
        self.steps = 0  # that were synchronized
        self.waited_seconds = 0.0  # for results, in all of them
        self.plan: planner.Plan | None = None
        self.replan_wanted = False
        self._said: set[str] = set()
        self._held: set[Slot] = set()  # observed in this step; sent by synchronize()
        self._keeper = StateKeeper(process_set, self.stream)
        self._agreement = Agreement(process_set, "torch", ops.joins)
        self.replicas = ReplicaCheck(process_set, CURES)
        # Of the optimizer, for comparisons: its settings, and tensors that it does not have.
        self.hyperparameters: Callable[[], dict[str, str]] = dict
        self.outside: list[tuple[str, torch.Tensor]] = []
        self._groups: list[list[str]] = []
        self._postponed = -1  # until there have been other joins than these
        self._weight = BatchWeight(process_set, self.stream, self.slots) if weighted else None

    # Which parameters

    def add(self, named: Named, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes parameters. Those in a group travel together, the others alone or as their method says."""
        for name, param in named:
            method = planned_method(self.compression, name)
            chosen = compressor("none" if method is not None else self.compression, name)
            slot = Slot(param, name, chosen, self.passes, method=method)
            self.slots[param] = slot
            if method is None and param.grad is None and param.requires_grad and not is_lazy(param):
                # As in Horovod, whose users may read it before the first backward().
                param.grad = torch.zeros_like(param)
            if method is not None and param.is_floating_point():
                slot.capture_id = capture.track(param, "off", self._owner)
        for group in groups:
            slots = [self.slots[param] for param in group if param in self.slots]
            self._groups.append([slot.name for slot in slots])
            self._add_unit(DenseUnit([slot for slot in slots if slot.method is None]))
        for _, param in named:
            if not self.slots[param].units:
                self._add_unit(DenseUnit([self.slots[param]]))
        self._agreement.doubt()
        self.watch()
        self._hold()

    def _add_unit(self, unit: Unit) -> None:
        if unit.slots:
            self.units.append(unit)
            for slot in unit.slots:
                slot.units.append(unit)
            unit.reset(self.passes)

    def watch(self) -> None:
        """Hooks the parameters that can have a gradient by now: they may be frozen and thawed, and those of
        lazy modules have no shape before the first forward()."""
        for slot in self.slots.values():
            if slot.hook is None and slot.param.requires_grad and not is_lazy(slot.param):
                slot.hook = hooks.watch(slot.param, self, slot)
                if not self.touched:
                    for unit in slot.units:
                        unit.reset(self.passes)

    @property
    def circle(self) -> Circle:
        """Between whom methods go. It may change with shutdown() and init()."""
        return circle_of(self.process_set)

    # During backward()

    def comes(self, slot: Slot) -> None:
        """Before autograd adds a gradient to what this rank has of it, which may be on its way: then the
        sum would be another one on each rank. Nothing has happened to this step; it can be ended."""
        self._unwatch()  # this is not the step's first backward pass
        if slot.passes_left == 0:
            self._refused = True
            raise AssertionError(
                f'"{slot.name}" got more than backward_passes_per_step={self.passes} gradients before step: '
                "call step() earlier, or raise backward_passes_per_step"
            )
        if any(unit.was_sent for unit in slot.units):
            self._refused = True
            raise AssertionError(
                f'"{slot.name}" got a gradient after it had been sent: .grad was read or clipped between two '
                "backward() calls of one step, when this parameter had no gradient yet. Read or clip "
                "gradients after the last backward(), or only those that are complete"
            )

    def arrived(self, slot: Slot) -> None:
        if slot.param.grad is not None and slot.param.grad.requires_grad:
            raise AssertionError(f'the gradient of "{slot.name}" requires a gradient (create_graph=True?)')
        if not self.touched:
            self._begin_step()
            for unit in self.units:
                unit.expect()
        if self._weight is not None:
            self._weight.gradient_came()
        slot.passes_left -= 1
        if self.passes > 1 and self._counts_passes(slot):
            slot.add_square()
        if slot.passes_left > 0:
            return
        waits = slot in self._held or self._agreement.is_due() or not self._follows_plan
        if waits and slot.method is not None:
            slot.take_early()  # a pass that is refused would add to them
        for unit in slot.units:
            unit.missing -= 1
            if unit.missing == 0 and waits:
                self._ready.append(unit)
            elif unit.missing == 0:
                unit.send(self)
        self._watch_after_backward()

    def _begin_step(self) -> None:
        self.touched = True
        for slot in self.slots.values():
            slot.returned = None  # the step before has been applied

    def _watch_after_backward(self) -> None:
        """Watches .grad from the end of this backward pass on. Code that runs during the pass, such as a
        user's hooks, does not wait: not everything can have been sent."""
        if hooks.in_compiled_autograd():  # which has no callbacks after a pass
            if self._is_complete():
                self._after_backward()
        elif self._backward_pass != torch._C._current_graph_task_id():
            self._backward_pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _is_complete(self) -> bool:
        """Whether every parameter that can have a gradient has got its last one of this step."""
        return all(slot.passes_left == 0 for slot in self.slots.values() if slot.param.requires_grad)

    def _after_backward(self) -> None:
        self._backward_calls += 1
        if not self.touched:
            return
        if self._agreement.is_due():
            self._agree_early()
        self._watch_gradients(self.slots.values())

    def _agree_early(self) -> None:
        """Compares with the other ranks where all of them come to the end of a backward pass, and sends what
        was held back: a script may call other collectives between backward() and step(), and some ranks may
        read .grad before them. A rank that has no batch does not come here, so the wait has a limit; then
        the comparison ends in synchronize()."""
        self._agreement.begin(self._describe(), self._facts())
        if not self._agreement.is_over(_AGREEMENT_SECONDS):
            return
        try:
            self._agree()
        except Exception as error:  # for whoever uses .grad, and for step()
            self._failed.append(error)
            self._waited = True
            return
        if self._follows_plan and not self._held:
            for unit in self._ready:
                self._try(self._send_if_unsent, unit)

    def _watch_gradients(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.param.requires_grad and not all(unit.is_finished() for unit in slot.units):
                pending_grad.watch(slot.param, hooks.Access(self, slot))
                self._watched.append(slot)

    def _unwatch(self) -> None:
        for slot in self._watched:
            pending_grad.restore(slot.param)
        self._watched.clear()

    def before_access(self, slot: Slot) -> None:
        """Somebody is about to use .grad."""
        more_may_come = self._usual_backward_calls == 0 or self._backward_calls < self._usual_backward_calls
        if more_may_come and all(unit.was_sent for unit in slot.units) and self._comes_soon(slot):
            together = {member for unit in slot.units for member in unit.slots}
            for member in together:
                pending_grad.forget(member.param)  # finishing a unit reads .grad, too
            for unit in slot.units:
                self._try(self._finish, unit)
            self._watch_gradients(together)
        else:
            try:
                self._send_rest()
            except Exception:
                self.end_step()
                raise
            self._wait()
        if self._failed:
            raise self._failed[0]

    def _comes_soon(self, slot: Slot) -> bool:
        """Waits for what was sent of this slot, but not for long if other ranks may be waiting for what this
        one has not sent."""
        if all(unit.was_sent for unit in self.units):
            return True
        begin = time.monotonic()
        pause = 1e-5
        while not all(unit.handle is None or ops.poll(unit.handle) for unit in slot.units):
            if time.monotonic() - begin > _PATIENCE_SECONDS:
                log.warning(
                    'the gradient of "%s" has not come for %g s: other ranks may wait for gradients that '
                    "this rank has not computed in this step, so it sends zeros for them. Let all ranks use "
                    ".grad of the same parameters between backward() and step()",
                    slot.name,
                    _PATIENCE_SECONDS,
                )
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return True

    def _counts_passes(self, slot: Slot) -> bool:
        """Whether the passes of a step are samples, for what comes formed."""
        if not looks_at_variance(slot.method):
            return False
        by_plan = any(unit.choice is not None and unit.choice.row.squares for unit in slot.units)
        return by_plan or slot in self._held

    # Of this step, for the units

    def wire_op(self) -> int:
        return Sum if self._weight is not None else self.op

    def scales(self, feedback: bool = False) -> tuple[float, float]:
        """Before and after the sum. What is kept between steps is kept without the loss scale."""
        if feedback:
            loss_scale = self.loss_scale()
            return 1.0 / loss_scale, loss_scale
        if self.wire_op() == Average and self.predivide != 1.0:
            return 1.0 / self.predivide, self.predivide
        return 1.0, 1.0

    def weigh(self, grad: torch.Tensor) -> torch.Tensor:
        if self._weight is None:
            return grad
        samples = self._weight.samples()
        # The mean over no samples is not a number.
        return grad.mul_(samples) if samples else grad.zero_()

    def samples(self) -> float:
        """This rank's weight where the result is normalised."""
        return 1.0 if self._weight is None else float(self._weight.samples())

    def share(self) -> float:
        """This rank's weight where it is not: a residual must not depend on the step's samples."""
        return 1.0 if self._weight is None else self._weight.samples() / self._weight.all_samples()

    def forms_on_device(self, slot: Slot) -> bool:
        """Whether a gradient by a method has to be formed, and weighed, before it is sent: sums go from host
        to host, and the core does that in the memory of hosts only."""
        return slot.param.device.type != "cpu" and bool(self.circle.hosts)

    def normalise(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._weight is None else output.div_(self._weight.all_samples())

    def return_kept(self, slot: Slot) -> bool:
        """Adds what an earlier plan has kept to this rank's gradient, where nothing is kept any more; whether
        there was anything."""
        if slot.kept is None or (slot.param.grad is not None and slot.param.grad.is_sparse):
            return False
        factor = self.loss_scale()
        if self._weight is not None:
            if self._weight.samples() == 0:
                return False
            factor /= self.share()
        elif self.op == Average:
            factor *= self.process_set.size()
        kept = torch.from_numpy(slot.kept).to(slot.param.dtype).reshape(slot.param.shape)
        slot.add_to_gradient(kept * factor)
        slot.returned, slot.kept = slot.kept, None
        return True

    def say_once(self, what: str) -> bool:
        """Whether that has not been said yet."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    # Waiting

    def synchronize(self) -> None:
        """Afterwards every parameter's .grad is the reduced one. Raises the first error, with nothing left
        in flight. Ends the step."""
        self.watch()
        if not self.touched:
            self._begin_step()
        try:
            self._send_rest()
            # Only here, which all ranks come to, and while gradients are in flight.
            name, compares = self._agreement.name, not self._agreement.is_due()
            if compares:
                self._try(self.replicas.begin, name, self._replica)
            self._wait()
            if compares:
                self._try(self.replicas.end, name)
            failed = self._failed
        finally:
            self.end_step()
        if failed:
            raise failed[0]

    def _send_rest(self) -> None:
        """Sends what has not been sent. What goes wrong from now on is kept in `_failed`."""
        self._unwatch()
        if self._waited:
            return
        if self._refused:
            done = [slot.param for slot in self._planned_slots() if slot.passes_left == 0]
            _torch.capture_begin_step([param for param in done if self.slots[param].capture_id >= 0])
        if self._agreement.is_due():
            self._agree()
        self._settle_on_units()
        for unit in self._in_backward_order():
            self._try(self._send_if_unsent, unit)

    def _wait(self) -> None:
        """Until all results of this step are in .grad."""
        if not self._waited:
            self._waited = True
            for unit in self.units:
                self._try(self._finish, unit)

    def _in_backward_order(self) -> list[Unit]:
        """All units, as far as known in the order of backward(): ranks build their schedule from it."""
        return [*(unit for unit in self._ready if unit in self.units), *self.units]

    def is_reduced(self) -> bool:
        """Whether .grad was read in this step, and all of it is reduced."""
        return self.touched and all(unit.is_finished() for unit in self.units)

    def end_step(self) -> None:
        self.steps += 1
        self._usual_backward_calls = self._backward_calls or self._usual_backward_calls
        self.reset()

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        """Keeps the error for later: what comes after it has to be ended too."""
        try:
            work(*arguments)
        except Exception as error:
            self._failed.append(error)

    def _send_if_unsent(self, unit: Unit) -> None:
        if not unit.was_sent:
            unit.send(self)

    def _finish(self, unit: Unit) -> None:
        begin = time.perf_counter()
        unit.finish(self)
        self.waited_seconds += time.perf_counter() - begin

    def set_batch_size(self, rows: int) -> None:
        if self._weight is None:
            raise ValueError("set_batch_size() needs DistributedOptimizer(…, weighted=True)")
        self._weight.set_samples(rows)

    # Plans

    def has_methods(self) -> bool:
        """Whether there is anything to plan."""
        return any(slot.method is not None for slot in self.slots.values())

    def is_planned(self) -> bool:
        return all(slot.planned for slot in self._planned_slots())

    def _planned_slots(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.method is not None]

    def _hold(self) -> None:
        """The step that begins will be observed for what has no plan and is past its warm-up."""
        if self._postponed == ops.joins():
            return
        self._held = {
            slot
            for slot in self._planned_slots()
            if (self.replan_wanted or not slot.planned) and warm_up_steps(slot.method) <= self.steps
        }
        for slot in self._held:
            slot.capture(observing_mode(slot.method))
        captured = [slot.param for slot in self._held if slot.capture_id >= 0]
        if captured:
            _torch.capture_begin_step(captured)

    def _settle_on_units(self) -> None:
        """If ranks follow no common plan, this step goes dense; if some tensors have none, one is made."""
        follows_plan, self._follows_plan = self._follows_plan, True
        try:
            if not follows_plan:
                self._go_dense()
            elif self._held:
                self._make_plan()
        except Exception as error:
            self._failed.append(error)
            self._try(self._go_dense)  # others wait for what this rank has

    def _is_outdated(self) -> bool:
        """Whether the plan was made for another number of ranks, or of hosts."""
        return self.plan is not None and self.plan.size != self.circle.size

    def doubt(self) -> None:
        """Something may have happened on other ranks that this one does not know of."""
        self._agreement.doubt()
        self.replicas.start_anew()

    def _facts(self) -> dict[str, Any]:
        """Where this rank is, for the others."""
        choices = self.plan.as_dict() if self.plan is not None else None
        text = repr((choices, sorted(slot.name for slot in self._held)))
        return {
            "step": self.steps,
            "outdated": self._is_outdated(),
            "plan": hashlib.sha256(text.encode()).hexdigest(),
            "replicas": self.replicas.facts(),
        }

    def _agree(self) -> None:
        """Finds out whether all ranks are at the same place of the same plan. They are at the same step
        afterwards. MismatchError, on all ranks, if their optimizers were made with something else."""
        everyone = self._agreement.settle(self._describe(), self._facts())
        self.steps = max(one["step"] for one in everyone)
        self.replicas.agree([one["replicas"] for one in everyone])
        same_plan = len({one["plan"] for one in everyone}) == 1
        self._follows_plan = same_plan and not any(one["outdated"] for one in everyone)

    def _describe(self) -> Description:
        """What ranks must have in common."""
        options = common_options(
            compression=self.compression,
            op=self.op,
            backward_passes_per_step=self.passes,
            gradient_predivide_factor=self.predivide,
            groups=self._groups,
            sparse_as_dense=self.sparse_as_dense,
            weighted=self._weight is not None,
        )
        if self.has_methods() or self._weight is not None:
            # What is kept between steps, and some names between ranks, go by this number.
            options["number among the optimizers made"] = str(self.stream)
        return Description(options, [(slot.name, describe(slot.param)) for slot in self.slots.values()])

    def _replica(self) -> Replica:
        """What this rank has now: as the last step has left it."""
        tracked = [(slot.name, slot.param) for slot in self.slots.values()]
        return Replica.of(dense(tracked), self.hyperparameters(), dense(self.outside))

    def _go_dense(self) -> None:
        """This step is sent as it would be without a method; the next one is observed. Raises what went
        wrong when that is done."""
        slots = self._planned_slots()
        errors: list[Exception] = []
        for slot in slots:
            try:
                slot.take_segments()
            except Exception as error:
                errors.append(error)
        self._forget_plan()
        self._form(slots)
        if errors:
            raise errors[0]

    def _forget_plan(self) -> None:
        self.plan = None
        self.replan_wanted = False
        self._held = set()
        self._replace_units(self._planned_slots())
        for slot in self._planned_slots():
            slot.planned = False
            slot.mode = "off"
            slot.capture("off")
            self._add_unit(DenseUnit([slot]))

    def _replace_units(self, slots: Sequence[Slot]) -> None:
        gone = set(slots)
        self.units = [unit for unit in self.units if not gone.intersection(unit.slots)]
        for slot in slots:
            slot.units = []

    def _make_plan(self) -> None:
        """From what all ranks saw: units instead of those that were held."""
        held = [slot for slot in self.slots.values() if slot in self._held]
        self._held = set()
        mine, failure = {}, None
        try:
            mine = self._observe(held)
        except Exception as error:  # the others wait for this rank, and are told
            failure = error
        seen = self._share(held, mine, failure)
        if len(seen) < self.process_set.size():
            # Some have joined, and would not know of the plan. What has none goes dense until they are back.
            self._postponed = ops.joins()
            for slot in held:
                slot.capture(slot.mode)
            self._form(held)
            return
        self.replan_wanted = False
        weighs_time = any(isinstance(slot.method, Exact) for slot in held)
        costs = measure_costs(self.process_set, weighs_time, multiply)
        made = planner.make_plan(layers_of(held, seen), costs)
        names = {slot.name for slot in held}
        others = self.plan.choices if self.plan is not None else []
        kept = [choice for choice in others if not names.intersection(choice.layers)]
        self.plan = planner.Plan([*made.choices, *kept], made.size)
        self._take_plan(made.choices, held)
        self._form(held)
        self._say_what_does_not_fit(made.choices)

    def _observe(self, held: Sequence[Slot]) -> dict[str, planner.Observation]:
        seen = observe(held, self.sparse_as_dense, self.passes)
        for slot in held:
            if self.forms_on_device(slot) and not planner.is_exact(slot.method):
                seen[slot.name] = replace(
                    seen[slot.name],
                    rows=0,
                    indexed_rows=0,
                    dense=True,
                    bias=None,
                    link=None,
                    reason="on a device it is formed before a host's sum",
                )
        return seen

    def _share(
        self, held: Sequence[Slot], mine: dict[str, planner.Observation], failure: Exception | None
    ) -> list[Any]:
        """What every rank has seen, in rank order. MismatchError, on all of them, if one has failed to see;
        that one raises its failure."""
        why = "" if failure is None else f"{type(failure).__name__}: {failure}"
        packet = (self.process_set.rank(), why, mine)
        all_ranks = allgather_object(packet, name=f"plan.{self.stream}", process_set=self.process_set)
        if failure is not None:
            raise failure
        for rank, why, _ in all_ranks:
            if why:
                raise MismatchError(
                    f'"{held[0].name}" and what else has no plan yet: rank {rank} failed in the step that '
                    f"all ranks observe: {why}"
                )
        return [seen for *_, seen in all_ranks]

    def _take_plan(self, choices: Sequence[planner.Choice], slots: Sequence[Slot]) -> None:
        """Units for these slots by their choices."""
        by_name = {slot.name: slot for slot in slots}
        self._replace_units(slots)
        for slot in slots:
            slot.planned = True
            slot.mode = "off"
        for choice in choices:
            weights = [by_name[name] for name in choice.layers]
            biases = [by_name[name] if name is not None else None for name in choice.biases]
            unit = make_unit(choice, weights, biases)
            for slot in weights:
                slot.sparse = slot.sparse or choice.sparse
                # One that hands its delta down a chain is in two choices.
                slot.mode = max(slot.mode, choice.capture, key=_MODES.index)
            self._add_unit(unit)
        for choice in choices:
            for weight, bias in zip(choice.layers, choice.biases, strict=True):
                if bias is not None:  # it is captured as its weight is
                    by_name[bias].mode = by_name[weight].mode
        for slot in slots:
            slot.capture(slot.mode)
        self._keeper.hand_over(choices, slots, self._place(), self.circle.keeps)

    def _form(self, slots: Sequence[Slot]) -> None:
        """In the step that was observed nothing was formed: what goes dense is made up for."""
        for slot in slots:
            if not slot.segments:
                continue
            by_rows = [unit for unit in slot.units if isinstance(unit, LayerUnit)]
            own = [bias for unit in by_rows for weight, bias in unit.own if weight is slot]
            bias = self.slots.get(_torch.capture_folded_bias(slot.param))
            if bias is not None and bias not in own:
                bias.add_to_gradient(materialise_bias(bias.param, slot.segments))
            if not own:
                slot.add_to_gradient(materialise(slot.param, slot.segments))
            if not by_rows:
                slot.segments = []

    def _say_what_does_not_fit(self, choices: Sequence[planner.Choice]) -> None:
        for choice in choices:
            (name, *_), slot = choice.layers, self._slot_named(choice.layers[0])
            if choice.fallback and self.say_once(f"fit {name}") and self.process_set.rank() == 0:
                # A model has many vectors, for which no factor method is made.
                say = log.info if slot.param.dim() < 2 else log.warning
                way = planner.describe(choice)
                say('"%s" is not sent by %s but %s: %s', name, slot.method.name, way, choice.why)

    def _slot_named(self, name: str) -> Slot:
        return next(slot for slot in self.slots.values() if slot.name == name)

    # What is kept between steps

    def _place(self) -> Place:
        return self.circle.place(self.wire_op() == Average)

    def return_last(self) -> None:
        """The step was left out (a scaler found infinities): what it would have applied is kept."""
        self._keeper.return_last()
        for slot in self.slots.values():
            if slot.returned is not None:
                slot.kept, slot.returned = slot.returned, None

    def tensors(self) -> list[tuple[Any, ...]]:
        """What can be planned for: name, shape, dtype and method of each."""
        return [
            (slot.name, tuple(slot.param.shape), str(slot.param.dtype), slot.method.spec())
            for slot in self._planned_slots()
        ]

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they follow."""
        circle = self.circle
        return {
            "steps": self.steps,
            "size": circle.num_ranks,
            "rank": circle.rank,
            "hosts": [list(host) for host in circle.hosts],
            "average": self.wire_op() == Average,
            "tensors": self.tensors(),
            "plan": self.plan.as_dict() if self.plan is not None else None,
            "replan": self.replan_wanted,
            "too_large": [slot.name for slot in self.slots.values() if slot.too_large],
            **as_tensors(self._keeper.save()),
            "kept": as_tensors(
                {slot.name: slot.kept for slot in self.slots.values() if slot.kept is not None}
            ),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on where a run has stopped. On the same ranks and hosts, with the same bits. On another
        number of them, and with other methods, what this rank has kept is taken over in the form that fits
        (states.py); a rank with a number that there was not, or that was given another rank's state,
        begins with nothing kept."""
        saved = as_arrays(saved)
        if lost := lost_on_load(saved, self.process_set.rank(), self.process_set.size()):
            log.warning("%s", lost)
        self.steps = saved["steps"]
        self._keeper.drop()
        self._forget_plan()
        for slot in self.slots.values():
            slot.kept = None
            slot.too_large = False
        mine = saved["rank"] == self.process_set.rank()
        plan = planner.Plan.from_dict(saved["plan"]) if saved["plan"] is not None else None
        tensors = [(name, tuple(shape), *rest) for name, shape, *rest in saved["tensors"]]
        circle = self.circle
        same = saved["size"] == circle.num_ranks and as_hosts(saved.get("hosts", ())) == circle.hosts
        goes_on = plan is not None and plan.size == circle.size and same and tensors == self.tensors()
        if goes_on:
            self.plan = plan
            self._take_plan(plan.choices, self._planned_slots())
            self.replan_wanted = saved["replan"]
            for slot in self._planned_slots():
                slot.too_large = slot.name in saved.get("too_large", ())
        if goes_on and mine:
            self._keeper.load(saved)
        if mine:
            shares = saved["kept"] if goes_on else saved_shares(saved)
            for slot in self._planned_slots():
                slot.kept = shares.get(slot.name)
        self.doubt()
        self._hold()

    # Between steps

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        self._unwatch()
        self._failed = []
        self._waited = False
        self._follows_plan = True
        self._backward_calls = 0
        for slot in self.slots.values():
            slot.drop_segments()
            slot.forget_squares()
        for unit in self.units:
            unit.reset(self.passes)
        if self._weight is not None:
            self._weight.end_step()
        self.touched = self._refused = False
        self._ready.clear()
        tracked = [slot.param for slot in self.slots.values() if slot.capture_id >= 0]
        if tracked:
            _torch.capture_begin_step(tracked)
        self._hold()

    def __del__(self) -> None:
        try:
            self._unwatch()
            for slot in self.slots.values():
                if slot.capture_id >= 0:
                    capture.untrack(slot.param, self._owner)
            self._keeper.drop()
        except Exception:  # at exit anything may be gone
            pass
