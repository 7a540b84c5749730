"""Sends gradients as backward() makes them, and waits for them.

A Unit is what travels as one request: one parameter, or a group of them. It is sent by the hook of
the last of its parameters to get its gradient, so that the wire is busy while backward() goes on.
synchronize() sends what no hook has sent (parameters that this rank did not use), so that all ranks
send the same units, and waits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dad.basics import Average, Sum
from dad.process_sets import ProcessSet
from dad.torch._load import _torch
from dad.torch.compression import compressor
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
    unit: Unit | None = None
    hook: Any = None  # while it is watched
    sparse: bool = False  # its gradient was, or its layer is


@dataclass(eq=False)
class Unit:
    """What is sent as one request."""

    slots: list[Slot]
    missing: int = 0  # parameters without all their passes
    handle: int | None = None
    sent: list[tuple[Slot, Any]] = field(default_factory=list)  # with the context of its compressor
    sparse_handles: list[tuple[Slot, Callable[[], torch.Tensor]]] = field(default_factory=list)
    was_sent: bool = False


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
        self.units: list[Unit] = []
        self.slots: dict[torch.Tensor, Slot] = {}
        self.touched = False  # a gradient came since the last synchronize()
        self._weight = _BatchWeight(process_set, self.stream) if weighted else None

    # Which parameters

    def add(self, named: Named, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes parameters. Those in a group travel together, the others alone."""
        for name, param in named:
            self.slots[param] = Slot(param, name, compressor(self.compression, name), self.passes)
        for group in groups:
            self._add_unit([self.slots[param] for param in group if param in self.slots])
        for _, param in named:
            if self.slots[param].unit is None:
                self._add_unit([self.slots[param]])
        self.watch()

    def _add_unit(self, slots: list[Slot]) -> None:
        if slots:
            self.units.append(Unit(slots))
            for slot in slots:
                slot.unit = self.units[-1]
            self._reset_unit(self.units[-1])

    def watch(self) -> None:
        """Hooks the parameters that can have a gradient by now: they may be frozen and thawed."""
        for slot in self.slots.values():
            if slot.hook is None and slot.param.requires_grad:
                slot.hook = slot.param.register_post_accumulate_grad_hook(_Hook(self, slot))
                if not self.touched:
                    self._reset_unit(slot.unit)

    # During backward()

    def arrived(self, slot: Slot) -> None:
        if slot.passes_left == 0:
            raise AssertionError(
                f'"{slot.name}" got more than backward_passes_per_step={self.passes} gradients before step: '
                "call step() earlier, or raise backward_passes_per_step"
            )
        if slot.param.grad.requires_grad:
            raise AssertionError(f'the gradient of "{slot.name}" requires a gradient (create_graph=True?)')
        self.touched = True
        slot.passes_left -= 1
        if slot.passes_left == 0:
            unit = slot.unit
            unit.missing -= 1
            if unit.missing == 0:
                self._send(unit)

    # Sending

    def _send(self, unit: Unit) -> None:
        unit.was_sent = True
        tensors = []
        for slot in unit.slots:
            if not slot.param.requires_grad:
                continue
            grad = self._local_gradient(slot)
            if self._weight is not None:
                grad = self._weight.apply(grad)
            if grad.is_sparse:
                slot.sparse = True
                if not self.sparse_as_dense:
                    handle = sparse_allreduce_async(grad, slot.name, self._wire_op(), self.process_set)
                    unit.sparse_handles.append((slot, handle))
                    continue
                grad = grad.to_dense()
            tensor, context = slot.compressor.compress(grad)
            tensors.append(tensor)
            unit.sent.append((slot, context))
        if tensors:
            unit.handle = self._submit(unit.sent[0][0].name, tensors)

    def _local_gradient(self, slot: Slot) -> torch.Tensor:
        """This rank's gradient; zeros where it has none but others may."""
        param = slot.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
            if slot.sparse and not self.sparse_as_dense:
                param.grad = param.grad.to_sparse(1)
        return param.grad

    def _wire_op(self) -> int:
        return Sum if self._weight is not None else self.op

    def _submit(self, name: str, tensors: list[torch.Tensor]) -> int:
        op = self._wire_op()
        before = after = 1.0
        if op == Average and self.predivide != 1.0:
            before, after = 1.0 / self.predivide, self.predivide
        number = self.process_set.process_set_id
        return _torch.submit(
            _ALLREDUCE, tensors, True, True, name, op, -1, before, after, number, [], self.stream
        )

    # Waiting

    def synchronize(self) -> None:
        """Afterwards every parameter's .grad is the reduced one. Raises the first error, with nothing left
        in flight."""
        self.watch()
        errors: list[Exception] = []
        try:
            for work in (self._send_if_unsent, self._finish):
                for unit in self.units:
                    try:
                        work(unit)
                    except Exception as error:  # the other units have to be ended too
                        errors.append(error)
        finally:
            self.reset()
        if errors:
            raise errors[0]

    def _send_if_unsent(self, unit: Unit) -> None:
        if not unit.was_sent:
            self._send(unit)

    def _finish(self, unit: Unit) -> None:
        if unit.handle is not None:
            handle, unit.handle = unit.handle, None
            outputs, _, _ = _torch.wait(handle)
            for (slot, context), output in zip(unit.sent, outputs, strict=True):
                self._store(slot, slot.compressor.decompress(output, context))
        while unit.sparse_handles:
            slot, finish = unit.sparse_handles.pop(0)
            total = finish()
            slot.param.grad = total if self._weight is None else self._weight.normalise(total)

    def _store(self, slot: Slot, output: torch.Tensor) -> None:
        param = slot.param
        if self._weight is not None:
            output = self._weight.normalise(output)
        if param.grad is None:
            param.grad = output
        elif param.grad.is_sparse:
            param.grad = output.to_sparse(param.grad.sparse_dim())
        elif param.grad is not output:
            param.grad.copy_(output)

    def set_batch_size(self, rows: int) -> None:
        if self._weight is None:
            raise ValueError("set_batch_size() needs DistributedOptimizer(…, weighted=True)")
        self._weight.start_step(rows)

    # Start of a step

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        for unit in self.units:
            self._reset_unit(unit)
        if self._weight is not None:
            self._weight.end_step()
        self.touched = False

    def _reset_unit(self, unit: Unit) -> None:
        if unit.handle is not None:
            _torch.forget(unit.handle)
        unit.handle = None
        unit.was_sent = False
        unit.sent.clear()
        unit.sparse_handles.clear()
        unit.missing = 0
        for slot in unit.slots:
            slot.passes_left = self.passes
            unit.missing += slot.param.requires_grad


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
    """weighted=True: gradients of mean losses count by the rows they are means of, so that the result is
    the mean over all rows. Each is multiplied by this rank's rows, summed, and divided by all rows."""

    def __init__(self, process_set: ProcessSet, stream: int) -> None:
        self._process_set = process_set
        self._name = f"batch_size.{stream}"
        self._rows: int | None = None
        self._handle: int | None = None
        self._all_rows = 0

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

    def apply(self, grad: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            raise ValueError("weighted=True: call optimizer.set_batch_size(rows) before backward()")
        return grad.mul_(self._rows)

    def normalise(self, total: torch.Tensor) -> torch.Tensor:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._all_rows = max(1, int(synchronize(handle)))
        return total.div_(self._all_rows)

    def end_step(self) -> None:
        if self._handle is not None:
            _torch.forget(self._handle)
        self._rows = self._handle = None
