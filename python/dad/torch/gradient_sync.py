"""Sends gradients as backward() makes them, and waits for them.

A unit is what travels as one request: a parameter or a group of them (DenseUnit), a layer or a chain of
layers by a factor method (LayerUnit), a quantised tensor (TensorUnit). It is sent by the hook of the last
of its parameters to get its gradient, so that the wire is busy while backward() goes on. synchronize()
sends what no hook has sent (parameters that this rank did not use), so that all ranks send the same
units, and waits.

Methods that work on layers need a plan, which is made of what all ranks saw in a step. Their first step
after the warm-up is therefore held: its units are made and sent by synchronize(). So is the step after
one in which a rank asked for a new plan.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dad import compression as _methods
from dad import planner
from dad._lib import _core
from dad.basics import Average, Sum
from dad.process_sets import ProcessSet
from dad.torch import grad_scaler
from dad.torch._load import _torch
from dad.torch.compression import compressor
from dad.torch.functions import allgather_object
from dad.torch.layer_units import (
    LayerUnit,
    TensorUnit,
    add_to_gradient,
    as_matrix,
    materialise,
    materialise_bias,
    observe,
)
from dad.torch.link import measure_costs
from dad.torch.naming import Named
from dad.torch.ops import allreduce_async, sparse_allreduce_async, synchronize

_ALLREDUCE = _torch.KINDS["allreduce"]
# Stream 0 is that of the user's own collectives.
_streams = itertools.count(1)


@dataclass(eq=False)
class Slot:
    """A parameter and how far it is in this step."""

    param: torch.Tensor
    name: str
    compressor: Any
    passes_left: int
    units: list[Any] = field(default_factory=list)
    hook: Any = None  # while it is watched
    sparse: bool = False  # its gradient was, or its layer is
    method: Any = None  # one that is planned for; None: the compressor does it all
    planned: bool = False
    capture_id: int = -1
    segments: list[Any] = field(default_factory=list)  # taken from the capture, not sent yet
    buffer: torch.Tensor | None = None  # the last result: its memory serves again

    def local_gradient(self, sync: GradientSync) -> torch.Tensor:
        """This rank's gradient; zeros where it has none but others may."""
        param = self.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
            if self.sparse and not sync.sparse_as_dense:
                param.grad = param.grad.to_sparse(1)
        return param.grad

    def new_output(self, reuse: bool) -> torch.Tensor:
        """Memory for the result: that of .grad or of the last result, if nobody reads it any more."""
        grad = self.param.grad
        if reuse and grad is not None and not grad.is_sparse and grad.is_contiguous():
            return grad
        if self.buffer is not None and self.buffer is not grad and _torch.is_unshared(self.buffer):
            return self.buffer
        self.buffer = torch.empty_like(self.param, memory_format=torch.contiguous_format)
        return self.buffer

    def take_result(self, output: torch.Tensor) -> None:
        if self.param.grad is not output:
            self.param.grad = output


@dataclass(eq=False)
class DenseUnit:
    """Gradients that are sent as they are, or cast."""

    slots: list[Slot]
    missing: int = 0  # parameters without all their passes
    handle: int | None = None
    sent: list[tuple[Slot, Any]] = field(default_factory=list)  # with the context of its compressor
    sparse_handles: list[tuple[Slot, Callable[[], torch.Tensor]]] = field(default_factory=list)
    was_sent: bool = False
    choice: planner.Choice | None = None

    @property
    def name(self) -> str:
        return self.slots[0].name

    def send(self, sync: GradientSync) -> None:
        self.was_sent = True
        tensors = []
        for slot in self.slots:
            if not slot.param.requires_grad:
                continue
            grad = sync.weigh(slot.local_gradient(sync))
            if grad.is_sparse:
                slot.sparse = True
                if not sync.sparse_as_dense:
                    handle = sparse_allreduce_async(grad, slot.name, sync.wire_op(), sync.process_set)
                    self.sparse_handles.append((slot, handle))
                    continue
                grad = grad.to_dense()
            tensor, context = slot.compressor.compress(grad)
            tensors.append(tensor)
            self.sent.append((slot, context))
        if tensors:
            before, after = sync.scales(feedback=False)
            number = sync.process_set.process_set_id
            name = self.sent[0][0].name
            self.handle = _torch.submit(
                _ALLREDUCE,
                tensors,
                True,
                True,
                name,
                sync.wire_op(),
                -1,
                before,
                after,
                number,
                [],
                sync.stream,
            )

    def finish(self, sync: GradientSync) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            outputs, _, _ = _torch.wait(handle)
            for (slot, context), output in zip(self.sent, outputs, strict=True):
                self._store(slot, sync.normalise(slot.compressor.decompress(output, context)))
        while self.sparse_handles:
            slot, finish = self.sparse_handles.pop(0)
            slot.param.grad = sync.normalise(finish())

    @staticmethod
    def _store(slot: Slot, output: torch.Tensor) -> None:
        param = slot.param
        if param.grad is None:
            param.grad = output
        elif param.grad.is_sparse:
            param.grad = output.to_sparse(param.grad.sparse_dim())
        elif param.grad is not output:
            param.grad.copy_(output)


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
        self.stream = next(_streams)
        self.units: list[Any] = []
        self.slots: dict[torch.Tensor, Slot] = {}
        self.touched = False  # a gradient came since the last synchronize()
        self.steps = 0  # that were synchronized
        self.plan: planner.Plan | None = None
        self.replan_wanted = False
        self.warned: set[str] = set()
        self._held: set[Slot] = set()  # observed in this step; sent by synchronize()
        self._weight = _BatchWeight(process_set, self.stream) if weighted else None

    # Which parameters

    def add(self, named: Named, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes parameters. Those in a group travel together, the others alone."""
        for name, param in named:
            method = planned_method(self.compression, name)
            chosen = compressor("none" if method is not None else self.compression, name)
            slot = Slot(param, name, chosen, self.passes, method=method)
            self.slots[param] = slot
            if method is not None and param.is_floating_point():
                slot.capture_id = _torch.capture_track(param, "off")
        for group in groups:
            self._add_unit(DenseUnit([self.slots[param] for param in group if param in self.slots]))
        for _, param in named:
            if not self.slots[param].units:
                self._add_unit(DenseUnit([self.slots[param]]))
        self.watch()
        self._hold()

    def _add_unit(self, unit: Any) -> None:
        if unit.slots:
            self.units.append(unit)
            for slot in unit.slots:
                slot.units.append(unit)
            self._reset_unit(unit)

    def watch(self) -> None:
        """Hooks the parameters that can have a gradient by now: they may be frozen and thawed."""
        for slot in self.slots.values():
            if slot.hook is None and slot.param.requires_grad:
                slot.hook = slot.param.register_post_accumulate_grad_hook(_Hook(self, slot))
                if not self.touched:
                    for unit in slot.units:
                        self._reset_unit(unit)

    # Plans

    def _hold(self) -> None:
        """The step that begins will be observed for what has no plan and is past its warm-up."""
        waiting = [
            slot
            for slot in self.slots.values()
            if slot.method is not None
            and (self.replan_wanted or not slot.planned)
            and warm_up_steps(slot.method) <= self.steps
        ]
        if not waiting:
            return
        self._held = set(waiting)
        self.replan_wanted = False
        for slot in waiting:
            if slot.capture_id >= 0:
                _torch.capture_set_mode(slot.param, "rows")
        _torch.capture_begin_step([slot.param for slot in waiting if slot.capture_id >= 0])

    def _make_plan(self) -> None:
        """From what all ranks saw: units instead of those that were held."""
        held = [slot for slot in self.slots.values() if slot in self._held]
        self._held = set()
        captured = [slot for slot in held if slot.capture_id >= 0]
        names = {slot.capture_id: slot.name for slot in captured}
        bias_of = {slot.param: slot.name for slot in captured}
        mine = {slot.name: observe(slot, names, bias_of) for slot in captured}
        wants_rates = any(isinstance(slot.method, _methods.Exact) for slot in held)
        costs, seen = measure_costs(self.process_set, self.stream, mine, wants_rates)
        layers = []
        for slot in held:
            rows, columns = as_matrix(slot.param)
            layers.append(
                planner.Layer(
                    name=slot.name,
                    out=rows,
                    columns=columns,
                    element_bytes=slot.param.element_size(),
                    floating=slot.param.is_floating_point() and not slot.sparse,
                    method=slot.method,
                    seen=tuple(all_seen.get(slot.name, planner.Observation(used=False)) for all_seen in seen),
                )
            )
        plan = planner.make_plan(layers, costs)
        others = [choice for choice in self.plan.choices if self._is_other(choice, held)] if self.plan else []
        plan.choices.extend(others)
        self.plan = plan
        self._take_plan(held)

    def _is_other(self, choice: planner.Choice, held: list[Slot]) -> bool:
        names = {slot.name for slot in held}
        return not names.intersection(choice.layers)

    def _take_plan(self, held: list[Slot]) -> None:
        by_name = {slot.name: slot for slot in held}
        self.units = [unit for unit in self.units if not set(unit.slots) & set(held)]
        modes = {slot: "off" for slot in held}
        for slot in held:
            slot.units = []
            slot.planned = True
        biases: dict[str, str] = {}
        for choice in self.plan.choices:
            if not set(choice.layers) & set(by_name):
                continue
            weights = [by_name[name] for name in choice.layers]
            riders = [by_name[name] if name is not None else None for name in choice.biases]
            for weight, bias in zip(choice.layers, choice.biases, strict=True):
                if bias is not None:
                    biases[weight] = bias
            if choice.kind in ("factor", "low_rank"):
                for slot in (*weights, *riders):
                    if slot is not None:
                        modes[slot] = choice.capture if modes[slot] == "off" else modes[slot]
                self._add_unit(LayerUnit(choice, weights, riders))
            else:
                if choice.capture != "off":
                    modes[weights[0]] = choice.capture
                unit = TensorUnit(choice, weights[0]) if choice.kind == "int8" else DenseUnit(weights)
                unit.choice = choice
                self._add_unit(unit)
        for weight, bias in biases.items():  # it rides as its weight does
            modes[by_name[bias]] = modes[by_name[weight]]
        self._complete_observed(held, modes)
        for slot, mode in modes.items():
            if slot.capture_id >= 0:
                _torch.capture_set_mode(slot.param, mode)

    def _complete_observed(self, held: list[Slot], modes: dict[Slot, str]) -> None:
        """In the step that was observed nothing was formed: what goes dense from now on is made up for."""
        riding = {
            bias.param
            for unit in self.units
            if isinstance(unit, LayerUnit)
            for (_, bias), mode in ((pair, modes.get(pair[0])) for pair in unit.own)
            if bias is not None and mode != "off"
        }
        for slot in held:
            if not slot.segments:
                continue
            factors = any(
                isinstance(unit, LayerUnit) and slot in (w for w, _ in unit.own) for unit in slot.units
            )
            if factors:
                continue  # segments serve where rows are asked for, and where a formed gradient is
            folded = _torch.capture_folded_bias(slot.param)
            add_to_gradient(slot.param, materialise(slot.param, slot.segments))
            if folded is not None and folded not in riding:
                add_to_gradient(folded, materialise_bias(folded, slot.segments))
            if not any(isinstance(unit, LayerUnit) for unit in slot.units):
                slot.segments = []

    # During backward()

    def arrived(self, slot: Slot) -> None:
        if slot.passes_left == 0:
            raise AssertionError(
                f'"{slot.name}" got more than backward_passes_per_step={self.passes} gradients before step: '
                "call step() earlier, or raise backward_passes_per_step"
            )
        if slot.param.grad is not None and slot.param.grad.requires_grad:
            raise AssertionError(f'the gradient of "{slot.name}" requires a gradient (create_graph=True?)')
        self.touched = True
        slot.passes_left -= 1
        if slot.passes_left == 0:
            for unit in slot.units:
                unit.missing -= 1
                if unit.missing == 0 and slot not in self._held:
                    unit.send(self)

    # Of this step, for the units

    def wire_op(self) -> int:
        return Sum if self._weight is not None else self.op

    def scales(self, feedback: bool) -> tuple[float, float]:
        """Before and after the sum. What is kept between steps is kept without the loss scale."""
        before = after = 1.0
        if self.wire_op() == Average and self.predivide != 1.0:
            before, after = 1.0 / self.predivide, self.predivide
        if feedback:
            loss_scale = grad_scaler.loss_scale()
            before, after = before / loss_scale, after * loss_scale
        return before, after

    def weigh(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self._weight is None else grad.mul_(self._weight.rows())

    def batch_weight(self) -> float:
        return 1.0 if self._weight is None else float(self._weight.rows())

    def normalise(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._weight is None else self._weight.normalise(output)

    # Waiting

    def synchronize(self) -> None:
        """Afterwards every parameter's .grad is the reduced one. Raises the first error, with nothing left
        in flight."""
        self.watch()
        if self._held:
            self._make_plan()
        errors: list[Exception] = []
        try:
            for work in (self._send_if_unsent, self._finish):
                for unit in self.units:
                    try:
                        work(unit)
                    except Exception as error:  # the other units have to be ended too
                        errors.append(error)
        finally:
            self.steps += 1
            self.reset()
        if errors:
            raise errors[0]

    def _send_if_unsent(self, unit: Any) -> None:
        if not unit.was_sent:
            unit.send(self)

    def _finish(self, unit: Any) -> None:
        unit.finish(self)

    def set_batch_size(self, rows: int) -> None:
        if self._weight is None:
            raise ValueError("set_batch_size() needs DistributedOptimizer(…, weighted=True)")
        self._weight.start_step(rows)

    # Between steps

    def return_last(self) -> None:
        """The step was left out (a scaler found infinities): what it would have applied is kept."""
        _core.return_last(self.process_set.process_set_id, self.stream)

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts."""
        number = self.process_set.process_set_id
        states = {}
        for unit in self.units:
            saved = _core.export_state(number, self.stream, unit.name)
            if saved:
                states[unit.name] = {
                    name: torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
                    for name, dtype, shape, data in saved
                    if data
                }
        return {
            "steps": self.steps,
            "size": self.process_set.size(),
            "rank": self.process_set.rank(),
            "states": states,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.steps = saved["steps"]
        number = self.process_set.process_set_id
        _core.drop_states(number, self.stream)
        for name, tensors in rescale(saved, self.process_set.size(), self.process_set.rank()).items():
            rows = [
                (key, str(t.dtype).removeprefix("torch."), list(t.shape), t.contiguous().numpy().tobytes())
                for key, t in tensors.items()
            ]
            _core.import_state(number, self.stream, name, rows)
        self._hold()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        for slot in self.slots.values():
            slot.segments = []
        for unit in self.units:
            self._reset_unit(unit)
        if self._weight is not None:
            self._weight.end_step()
        self.touched = False
        tracked = [slot.param for slot in self.slots.values() if slot.capture_id >= 0]
        if tracked:
            _torch.capture_begin_step(tracked)
        self._hold()

    def _reset_unit(self, unit: Any) -> None:
        if unit.handle is not None:
            _torch.forget(unit.handle)
        unit.handle = None
        unit.was_sent = False
        if isinstance(unit, DenseUnit):
            unit.sent.clear()
            unit.sparse_handles.clear()
        unit.missing = 0
        for slot in unit.slots:
            slot.passes_left = self.passes
            unit.missing += slot.param.requires_grad

    def __del__(self) -> None:
        try:
            for slot in self.slots.values():
                if slot.capture_id >= 0:
                    _torch.capture_untrack(slot.param)
            if self.plan is not None and _core.is_initialized():
                _core.drop_states(self.process_set.process_set_id, self.stream)
        except Exception:  # at exit anything may be gone
            pass


_PLANNED = (_methods.Dad, _methods.RankDad, _methods.Int8, _methods.Exact, _methods.Auto)
# auto's dense steps: the first gradients are the least like those that follow.
_AUTO_WARM_UP = 5


def planned_method(compression: Any, name: str) -> Any:
    """The method of a tensor, if it is one that is planned for."""
    method = compression
    if isinstance(method, _methods.PerLayer):
        method = method.method_for(name)
    return method if isinstance(method, _PLANNED) else None


def warm_up_steps(method: Any) -> int:
    steps = getattr(method, "warmup_steps", 0)
    return max(steps, _AUTO_WARM_UP) if isinstance(method, _methods.Auto) else steps


def rescale(saved: dict[str, Any], size: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Saved states for another number of ranks. A rank's residual counts 1/size in the mean, so it grows
    with the size; the owner's counts once, and joins the rank's. What another rank has saved is not
    taken twice. docs/methods.md has the rule."""
    if size == saved["size"]:
        return saved["states"]
    if rank != saved["rank"]:
        return {}
    factor = size / saved["size"]
    states = {}
    for name, tensors in saved["states"].items():
        kept: dict[str, torch.Tensor] = {}
        for side, weight in (("rank_", factor), ("owner_", float(size))):
            residual = tensors.get(side + "residual")
            if residual is None:
                continue
            total = residual.clone()
            if side + "pending_d" in tensors:
                total -= _flat_product(
                    tensors[side + "pending_d"], tensors[side + "pending_a"], residual.numel()
                )
            if side == "owner_" and total.numel() != kept.get("rank_residual", total).numel():
                continue  # a piece of an int8 tensor, cut for the old size: see merge_state
            kept["rank_residual"] = kept.get("rank_residual", 0) + weight * total
        states[name] = kept
    return states


def _flat_product(d: torch.Tensor, a: torch.Tensor, elements: int) -> torch.Tensor:
    """dᵀ a in the layout of a residual: the matrix, then the bias column."""
    product = d.t() @ a
    columns = elements // d.shape[1]
    if columns == a.shape[1]:
        with_bias = torch.cat([product[:, :-1].reshape(-1), product[:, -1]])
        plain = product.reshape(-1)
        return with_bias if with_bias.numel() == elements else plain
    return product.reshape(-1)


class _Hook:
    """Does not keep the optimizer alive: a parameter outlives optimizers that were made for it."""

    def __init__(self, sync: GradientSync, slot: Slot) -> None:
        self._sync = weakref.ref(sync)
        self._slot = weakref.ref(slot)

    def __call__(self, param: torch.Tensor) -> None:
        sync, slot = self._sync(), self._slot()
        if sync is not None and slot is not None:
            sync.arrived(slot)


class _BatchWeight:
    """weighted=True: gradients of mean losses count by the samples they are means of, so that the result is
    the mean over all samples. Each is multiplied by this rank's number of them, summed, and divided by that
    of all. The number is the leading dimension of the first module's first argument, or what
    set_batch_size() said."""

    def __init__(self, process_set: ProcessSet, stream: int) -> None:
        self._process_set = process_set
        self._name = f"batch_size.{stream}"
        self._rows: int | None = None
        self._handle: int | None = None
        self._all_rows = 0
        self._seen: int | None = None
        me = weakref.ref(self)

        def look(module: Any, args: tuple[Any, ...]) -> None:
            weight = me()
            if weight is not None and weight._seen is None and torch.is_grad_enabled():
                tensor = next((a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0), None)
                if tensor is not None:
                    weight._seen = tensor.shape[0]

        hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
        weakref.finalize(self, hook.remove)

    def start_step(self, rows: int) -> None:
        """The sum of rows travels while forward and backward run."""
        if rows < 0:
            raise ValueError(f"set_batch_size({rows}): a batch has 0 rows or more")
        if self._rows is not None:
            raise ValueError("set_batch_size() was called twice in one step")
        self._rows = rows
        self._handle = allreduce_async(
            torch.tensor([rows]), name=self._name, op=Sum, process_set=self._process_set
        )

    def rows(self) -> int:
        if self._rows is None:
            # A rank that ran nothing has no samples.
            self.start_step(self._seen or 0)
        return self._rows or 0

    def normalise(self, total: torch.Tensor) -> torch.Tensor:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._all_rows = max(1, int(synchronize(handle)))
        return total.div_(self._all_rows)

    def end_step(self) -> None:
        if self._handle is not None:
            _torch.forget(self._handle)
        self._rows = self._handle = self._seen = None
