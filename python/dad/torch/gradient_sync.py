"""Sends gradients as backward() makes them, and waits for them.

A unit (layer_units.py) is what travels as one request: a parameter or a group of them, a layer or a chain
of layers by a factor method, a quantised tensor. The plan says which units there are (units.py). The hook of
the last of its parameters to get its gradient sends a unit, so that the wire is busy while backward() goes
on. synchronize() sends what no hook has sent (parameters that this rank did not use), so that all ranks send
the same units, and waits.

After a backward pass that was the last one of a step for some parameter, .grad is watched (pending_grad.py).
Using it does what synchronize() does, short of ending the step, so the user sees the reduced gradient and may
change it. All ranks send everything then: if a rank waited only for what it has sent itself, two ranks that
used different parameters would wait for each other. The exception is a step with several backward() calls
over different parameters. Until as many have run as in the step before, using a gradient that is complete
waits for that one only, since the others are still to come.

Nothing of the first step is sent before its first backward pass is over: then ranks compare what their
optimizers were made with (agreement.py), since a rank with another model would leave the others waiting.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dad.basics import Average, Sum
from dad.log import log
from dad.planning.agreement import Description, common_options
from dad.planning.circle import Circle
from dad.planning.planner import Plan
from dad.planning.ranks import RanksOf
from dad.planning.session import Session
from dad.process_sets import ProcessSet
from dad.state.replicas import Replica, ReplicaCheck
from dad.torch import grad_scaler, hooks, pending_grad
from dad.torch._load import _torch
from dad.torch.batch_weight import BatchWeight
from dad.torch.layer_units import Unit
from dad.torch.naming import Named, describe
from dad.torch.readers import Readers
from dad.torch.replicas import CURES, dense
from dad.torch.slots import Slot
from dad.torch.terms import Terms
from dad.torch.units import Units

# Counted by process set: ranks outside of one have not made its optimizers. Stream 0 is that of the
# user's own collectives.
_num_streams: collections.Counter[int | None] = collections.Counter()
_AGREEMENT_SECONDS = 1.0  # that a rank waits after backward() for others to come there
_WAITS_KEPT, _FEWEST_WAITS = 50, 3  # of steps, to tell how long they wait
_PATIENCE_SECONDS = 20.0  # with ranks that do not send a gradient somebody has asked for


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
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.loss_scale = grad_scaler.loss_scale  # what this step's loss is multiplied with
        self.stream = next_stream(process_set)
        _num_streams[process_set.process_set_id] = self.stream
        average = op == Average and not weighted
        self._session = Session[Slot](RanksOf(process_set), "torch", self.stream, average, CURES)
        self._units = Units(self._session, passes, sparse_as_dense)
        self._ready: list[Unit] = []  # have their gradients, but nothing is sent before synchronize()
        self.touched = False  # a gradient came since the last synchronize()
        self._refused = False  # and one too many
        self._backward_pass = -1  # torch's number of the pass at whose end .grad will be watched
        self._backward_calls = 0  # of this step, that were the last one for some parameter
        self._usual_backward_calls = 0  # in the step before; 0: there was none
        self._watched: list[Slot] = []  # whose .grad is watched, or was in this step
        self._failed: list[Exception] = []  # what went wrong in this step
        self._waited = False  # for all results of this step
        self._began = 0.0  # when this step's first gradient came
        self._compares = False  # replicas, in this step
        self._readers = Readers(self)
        self._follows_plan = True  # the same one as the other ranks
        self.waited_seconds = 0.0  # for results, in all steps
        self._waited_before = 0.0  # at the end of the last step
        # In the last steps by the present plan.
        self._waits: collections.deque[float] = collections.deque(maxlen=_WAITS_KEPT)
        # For comparisons: settings of the optimizer, and tensors that it does not have.
        self.hyperparameters: Callable[[], dict[str, str]] = dict
        self.outside: Callable[[], list[tuple[str, torch.Tensor]]] = list
        self._weight = BatchWeight(process_set, self.stream, self.slots) if weighted else None

    # What it has

    @property
    def slots(self) -> dict[torch.Tensor, Slot]:
        return self._units.slots

    @property
    def units(self) -> list[Unit]:
        return self._units.all

    @property
    def passes(self) -> int:
        """Backward passes of a step."""
        return self._units.passes

    @property
    def steps(self) -> int:
        """That were synchronized."""
        return self._session.steps

    @property
    def plan(self) -> Plan | None:
        return self._session.plan

    @property
    def replan_wanted(self) -> bool:
        return self._session.replan_wanted

    @property
    def replicas(self) -> ReplicaCheck:
        return self._session.replicas

    @property
    def circle(self) -> Circle:
        """Between whom methods go. It may change with shutdown() and init()."""
        return self._session.circle

    def has_methods(self) -> bool:
        """Whether there is anything to plan."""
        return bool(self._session.tensors)

    def is_planned(self) -> bool:
        return self._session.is_planned()

    def tensors(self) -> list[tuple[Any, ...]]:
        """What can be planned for: name, shape, dtype and method of each."""
        return self._session.described()

    # Which parameters

    def add(self, named: Named, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes parameters. Those in a group travel together, the others alone or as their method says."""
        self._units.add(named, groups, self.compression)
        self._session.agreement.doubt()
        self.watch()
        self._units.hold()

    def watch(self) -> None:
        """Hooks the parameters that can have a gradient by now: they may be frozen and thawed, and those of
        lazy modules have no shape before the first forward()."""
        for slot in self.slots.values():
            if slot.hook is None and slot.param.requires_grad and not is_lazy(slot.param):
                slot.hook = hooks.watch(slot.param, self, slot)
                if not self.touched:
                    for unit in slot.units:
                        unit.reset(self.passes)

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
        if self.passes > 1 and self._units.counts_passes(slot):
            slot.add_square()
        if slot.passes_left > 0:
            return
        waits = slot in self._units.held or self._session.agreement.is_due() or not self._follows_plan
        if waits and slot.method is not None:
            slot.take_early()  # a pass that is refused would add to them
        for unit in slot.units:
            unit.missing -= 1
            if unit.missing == 0 and waits:
                self._ready.append(unit)
            elif unit.missing == 0:
                self._send(unit)
        self._watch_after_backward()

    def _begin_step(self) -> None:
        self.touched = True
        self._began = time.perf_counter()
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
            # Only the last pass of a step can hide what is sent.
            self._began = time.perf_counter()
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _is_complete(self) -> bool:
        """Whether every parameter that can have a gradient has got its last one of this step."""
        return all(slot.passes_left == 0 for slot in self.slots.values() if slot.param.requires_grad)

    def _after_backward(self) -> None:
        self._backward_calls += 1
        self._session.backward_seconds = time.perf_counter() - self._began
        if not self.touched:
            return
        self._readers.backward_ended()
        if self._session.agreement.is_due():
            self._agree_early()
        self._watch_gradients(self.slots.values())

    def _agree_early(self) -> None:
        """Compares with the other ranks where all of them come to the end of a backward pass, and sends what
        was held back: a script may call other collectives between backward() and step(), and some ranks may
        read .grad before them. A rank that has no batch does not come here, so the wait has a limit; then
        the comparison ends in synchronize()."""
        self._session.begin_to_agree(self._describe(), self._units.held)
        if not self._session.agreement.is_over(_AGREEMENT_SECONDS):
            return
        try:
            self._agree()
        except Exception as error:  # for whoever uses .grad, and for step()
            self._failed.append(error)
            self._waited = True
            return
        if self._follows_plan and not self._units.held:
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
        with self._readers.reading(slot.name):
            self._reduce_for_access(slot)
        if self._failed:
            raise self._failed[0]

    def _reduce_for_access(self, slot: Slot) -> None:
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

    def _comes_soon(self, slot: Slot) -> bool:
        """Waits for what was sent of this slot, but not for long if other ranks may be waiting for what this
        one has not sent."""
        if all(unit.was_sent for unit in self.units):
            return True
        ends = time.monotonic() + _PATIENCE_SECONDS
        for unit in slot.units:
            left = max(0.0, ends - time.monotonic())
            if unit.handle is not None and not _torch.wait_for(unit.handle, left):
                log.warning(
                    'the gradient of "%s" has not arrived for %g s: other ranks may wait for gradients that '
                    "this rank has not computed in this step, so it sends zeros for them. Let all ranks use "
                    ".grad of the same parameters between backward() and step()",
                    slot.name,
                    _PATIENCE_SECONDS,
                )
                return False
        return True

    # While this rank waits in a collective (readers.py)

    def may_send_rest(self) -> bool:
        """Whether this step's backward passes seem to be over."""
        more_comes = self._usual_backward_calls > 0 and self._backward_calls < self._usual_backward_calls
        return bool(self._watched) and not self._waited and not more_comes

    def plan_name(self) -> str:
        """Under which ranks exchange what they have observed."""
        return f"plan.{self._session.agreement.name}"

    def send_rest_for_others(self) -> None:
        """Another rank uses .grad and waits for what this one would send in step()."""
        try:
            self._send_rest()
        except Exception as error:  # for whoever uses .grad, and for step()
            self._failed.append(error)
            self._waited = True
        self._watch_gradients(self.slots.values())

    # Sending

    def _send_if_unsent(self, unit: Unit) -> None:
        if not unit.was_sent:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        unit.send(self._terms(unit))

    def _terms(self, unit: Unit) -> Terms:
        lossy = unit.is_lossy
        weight = self._weight
        share = weight.share() if weight is not None and lossy else 1.0
        return Terms(
            process_set=self.process_set,
            stream=self.stream,
            op=Sum if weight is not None else self.op,
            scales=self._scales(lossy),
            sparse_as_dense=self.sparse_as_dense,
            samples=weight.samples() if weight is not None else None,
            share=share,
            kept_factor=self._kept_factor() if any(s.kept is not None for s in unit.slots) else 0.0,
            forms_on_device=lossy and self.forms_on_device(unit.slots[0]),
        )

    def _scales(self, lossy: bool) -> tuple[float, float]:
        """Before and after the sum. What is kept between steps is kept without the loss scale."""
        if lossy:
            loss_scale = self.loss_scale()
            return 1.0 / loss_scale, loss_scale
        if self.op == Average and self._weight is None and self.predivide != 1.0:
            return 1.0 / self.predivide, self.predivide
        return 1.0, 1.0

    def _kept_factor(self) -> float:
        factor = self.loss_scale()
        if self._weight is not None:
            return factor / self._weight.share() if self._weight.samples() else 0.0
        return factor * self._session.ranks.size if self.op == Average else factor

    def forms_on_device(self, slot: Slot) -> bool:
        return self._units.forms_on_device(slot)

    # Waiting

    def start(self) -> None:
        """Sends all there is, as synchronize() would, which waits for it later."""
        self.watch()
        if not self.touched:
            self._begin_step()
        try:
            self._send_rest()
            # Only here, which all ranks come to, and while gradients are in flight.
            if not self._compares and not self._session.agreement.is_due():
                self._compares = True
                self._try(self.replicas.begin, self._session.agreement.name, self._replica)
        except BaseException:
            self.end_step()
            raise

    def synchronize(self) -> None:
        """Afterwards every parameter's .grad is the reduced one. Raises the first error, with nothing left
        in flight. Ends the step."""
        self.start()
        try:
            self._wait()
            agreed = not self._session.agreement.is_due()  # else ranks have just disagreed
            if agreed and self._session.next_review() == self._session.steps:
                self._try(self._session.review)
            if self._compares:
                self._try(self.replicas.end, self._session.agreement.name)
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
            self._units.begin_capture([slot for slot in self._units.planned if slot.passes_left == 0])
        if self._session.agreement.is_due():
            self._agree()
        self._settle_on_units()
        for unit in self._in_backward_order():
            self._try(self._send_if_unsent, unit)

    def _wait(self) -> None:
        """Until all results of this step are in .grad."""
        if not self._waited:
            self._waited = True
            for unit in self.units:
                if not self._readers.gave_up:
                    self._try(self._finish, unit)

    def _in_backward_order(self) -> list[Unit]:
        """All units, as far as known in the order of backward(): ranks build their schedule from it."""
        return [*(unit for unit in self._ready if unit in self.units), *self.units]

    def is_reduced(self) -> bool:
        """Whether .grad was read in this step, and all of it is reduced."""
        return self.touched and all(unit.is_finished() for unit in self.units)

    def exposed_seconds(self) -> float | None:
        """For how long a step by the present plan waits for results, in the median; None: not known yet."""
        return statistics.median(self._waits) if len(self._waits) >= _FEWEST_WAITS else None

    def end_step(self) -> None:
        self._session.steps += 1
        self._waits.append(self.waited_seconds - self._waited_before)
        self._waited_before = self.waited_seconds
        self._usual_backward_calls = self._backward_calls or self._usual_backward_calls
        self.reset()

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        """Keeps the error for later: what comes after it has to be ended too."""
        try:
            work(*arguments)
        except Exception as error:
            self._failed.append(error)

    def _finish(self, unit: Unit) -> None:
        if not unit.is_in_flight():
            return
        begin = time.perf_counter()
        weight = None if unit.is_lossy else self._weight
        outcome = unit.finish(weight.all_samples() if weight is not None else None)
        self.waited_seconds += time.perf_counter() - begin
        if outcome is not None:
            self._session.tell(unit.name, outcome, unit.slots)

    def set_batch_size(self, rows: int) -> None:
        if self._weight is None:
            raise ValueError("set_batch_size() needs DistributedOptimizer(…, weighted=True)")
        self._weight.set_samples(rows)

    # Plans

    def _settle_on_units(self) -> None:
        """If ranks follow no common plan, this step goes dense; if some tensors have none, one is made."""
        follows_plan, self._follows_plan = self._follows_plan, True
        try:
            if not follows_plan:
                self._units.go_dense()
            elif self._units.held:
                self._units.make_plan()
                self._waits.clear()
        except Exception as error:
            self._failed.append(error)
            self._try(self._units.go_dense)  # others wait for what this rank has

    def doubt(self) -> None:
        """Something may have happened on other ranks that this one does not know of."""
        self._session.doubt()

    def _agree(self) -> None:
        """Finds out whether all ranks are at the same place of the same plan. MismatchError, on all ranks, if
        their optimizers were made with something else."""
        self._follows_plan = self._session.agree(self._describe(), self._units.held)

    def _describe(self) -> Description:
        """What ranks must have in common."""
        options = common_options(
            compression=self.compression,
            op=self.op,
            backward_passes_per_step=self.passes,
            gradient_predivide_factor=self.predivide,
            groups=self._units.groups,
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
        return Replica.of(dense(tracked), self.hyperparameters(), dense(self.outside()))

    # What is kept between steps

    def return_last(self) -> None:
        """The step was left out (a scaler found infinities): what it would have applied is kept."""
        self._units.return_last()

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they follow."""
        return self._units.save()

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on where a run has stopped, as Session.load() says."""
        self._units.load(saved)

    # Between steps

    def set_passes(self, passes: int) -> None:
        self._units.passes = passes
        self.reset()

    def reset(self) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        self._unwatch()
        self._failed = []
        self._waited = self._compares = self._readers.gave_up = False
        self._follows_plan = True
        self._backward_calls = 0
        self._units.reset()
        if self._weight is not None:
            self._weight.end_step()
        self.touched = self._refused = False
        self._ready.clear()

    def __del__(self) -> None:
        try:
            self._unwatch()
            self._units.close()
        except Exception:  # at exit anything may be gone
            pass
