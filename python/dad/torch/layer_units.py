"""What travels as one request when a method works on layers: how it is sent, and where its result goes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dad.planner import Choice, Link, Observation
from dad.torch._load import _torch

if TYPE_CHECKING:
    from dad.torch.gradient_sync import GradientSync, Slot

_log = logging.getLogger("dad")
_WANTS_PLAN = 1
_NOT_FINITE = 2
# More rows than planned by this factor ask for a new plan.
_ROWS_SLACK = 1.25


def as_matrix(param: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a parameter; a bias is one column."""
    if param.dim() == 0:
        return 1, 1
    rows = param.shape[0]
    return rows, (param.numel() // rows if rows else 1)


def has_gradient(param: torch.Tensor) -> bool:
    """Whether autograd put something into .grad; zeros are what zero_grad(set_to_none=False) leaves."""
    return param.grad is not None and (param.grad.is_sparse or bool(param.grad.any()))


def materialise(param: torch.Tensor, segments: Sequence[Any]) -> torch.Tensor | None:
    """The sum of segments, as a gradient; None if there are none."""
    if not segments:
        return None
    total = torch.zeros_like(param, memory_format=torch.contiguous_format)
    matrix = total.view(as_matrix(param))
    for segment in segments:
        if segment.kind == "indexed":
            matrix.index_add_(0, segment.index, segment.x.to(matrix.dtype))
        else:
            begin, end = segment.out_begin, segment.out_begin + segment.d.shape[1]
            matrix[begin:end] += segment.d.to(matrix.dtype).t() @ segment.a.to(matrix.dtype)
    return total


def materialise_bias(bias: torch.Tensor, segments: Sequence[Any]) -> torch.Tensor | None:
    total = None
    for segment in segments:
        if segment.kind == "rows" and segment.has_bias:
            total = torch.zeros_like(bias) if total is None else total
            begin, end = segment.out_begin, segment.out_begin + segment.d.shape[1]
            total[begin:end] += segment.d.to(total.dtype).sum(0)
    return total


def add_to_gradient(param: torch.Tensor, part: torch.Tensor | None) -> None:
    if part is not None:
        param.grad = part if param.grad is None else param.grad.add_(part)


def observe(slot: Slot, names: dict[int, str], bias_of: dict[torch.Tensor, str]) -> Observation:
    """What this rank saw of a parameter in this step; its segments stay with the slot."""
    slot.segments.extend(_torch.capture_take(slot.param))
    rows = [s for s in slot.segments if s.kind == "rows"]
    folded = _torch.capture_folded_bias(slot.param)
    bias = bias_of.get(folded) if folded is not None and any(s.has_bias for s in rows) else None
    return Observation(
        rows=sum(s.a.shape[0] for s in rows),
        indexed_rows=sum(s.index.shape[0] for s in slot.segments if s.kind == "indexed"),
        samples=sum(s.samples for s in slot.segments),
        dense=has_gradient(slot.param) or any(bias is not None and not s.has_bias for s in rows),
        used=bool(slot.segments) or slot.param.grad is not None,
        bias=bias,
        link=_common_link(slot.segments, names),
        reason=_torch.capture_reason(slot.param) if not slot.segments or slot.param.grad is not None else "",
    )


def _common_link(segments: Sequence[Any], names: dict[int, str]) -> Link | None:
    """The link that all segments have, in order."""
    links = {
        Link(names.get(s.link.upper_id, ""), s.link.activation, s.link.slope) if s.link is not None else None
        for s in segments
    }
    in_order = all(s.link is not None and s.link.upper_index == i for i, s in enumerate(segments))
    link = links.pop() if len(links) == 1 else None
    return link if link is not None and in_order and link.upper else None


class LayerUnit:
    """One layer, or a chain of them, by a factor method."""

    def __init__(self, choice: Choice, weights: list[Slot], biases: list[Slot | None]) -> None:
        self.choice = choice
        self.weights = weights
        self.biases = biases
        # A layer that only hands D down has its own gradient sent by another unit.
        self.own = [
            (weight, bias) for weight, bias, p in zip(weights, biases, choice.passes, strict=True) if not p
        ]
        self.slots = [*weights, *(b for b in biases if b is not None)]
        self.missing = 0
        self.was_sent = False
        self.handle: int | None = None

    @property
    def name(self) -> str:
        return self.weights[0].name

    def send(self, sync: GradientSync) -> None:
        self.was_sent = True
        # A layer that hands D down is in two units; the segments are the chain's.
        for slot in self.weights:
            slot.segments.extend(_torch.capture_take(slot.param))
        replan = any(
            sum(s.a.shape[0] for s in slot.segments if s.kind == "rows") > _ROWS_SLACK * self.choice.rows
            for slot in self.weights
        )
        layers = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            derive = i + 1 < len(self.weights) and self._link_holds(i)
            if not derive and i + 1 < len(self.weights):
                replan = replan or bool(weight.segments)
            dense = dense_bias = output = output_bias = None
            if not self.choice.passes[i]:
                dense, dense_bias = self._dense_parts(weight, bias)
                replan = replan or (dense is not None and self.choice.kind == "factor")
                output = weight.new_output(reuse=dense is not weight.param.grad)
                if bias is not None:
                    output_bias = bias.new_output(reuse=dense_bias is not bias.param.grad)
            in_chain = len(self.weights) > 1
            layers.append(
                (
                    weight.segments,
                    derive,
                    dense,
                    dense_bias,
                    output,
                    output_bias,
                    weight.param.detach() if in_chain else None,
                    bias.param.detach() if in_chain and bias is not None else None,
                )
            )
        before, after = sync.scales(feedback=self.choice.kind == "low_rank")
        self.handle = _torch.submit_layers(
            name=self.name,
            method=self.choice.text,
            layers=layers,
            like=self.weights[0].param,
            op=sync.wire_op(),
            prescale=before,
            postscale=after,
            process_set=sync.process_set.process_set_id,
            stream=sync.stream,
            scale=sync.batch_weight(),
            replan=replan,
        )
        for slot in self.weights:
            slot.segments = []

    def _link_holds(self, i: int) -> bool:
        """Whether this rank's rows of layer i follow from those of layer i + 1 in this step, too."""
        mine, above = self.weights[i], self.weights[i + 1]
        planned = self.choice.text.split(";")[3:][i].split(":")
        if len(mine.segments) != len(above.segments):
            return False
        for k, segment in enumerate(mine.segments):
            link = segment.link
            if link is None or link.upper_id != above.capture_id or link.upper_index != k:
                return False
            if Link("", link.activation, link.slope).mark() not in planned:
                return False
        return True

    def _dense_parts(self, weight: Slot, bias: Slot | None) -> tuple[Any, Any]:
        """What came formed: the uses that were not captured."""
        dense = weight.param.grad if has_gradient(weight.param) else None
        dense_bias = bias.param.grad if bias is not None and has_gradient(bias.param) else None
        if bias is not None:
            stray = [s for s in weight.segments if s.kind == "rows" and not s.has_bias]
            if stray:  # used without its bias: it must not count for it
                weight.segments = [s for s in weight.segments if s not in stray]
                part = materialise(weight.param, stray)
                dense = part if dense is None else dense + part
        if dense is None and dense_bias is None:
            return None, None
        dense = torch.zeros_like(weight.param) if dense is None else dense.contiguous()
        if bias is not None:
            dense_bias = torch.zeros_like(bias.param) if dense_bias is None else dense_bias.contiguous()
        return dense, dense_bias

    def finish(self, sync: GradientSync) -> None:
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        outputs, _, value = _torch.wait(handle)
        slots = [slot for pair in self.own for slot in pair if slot is not None]
        for slot, output in zip(slots, outputs, strict=True):
            slot.take_result(sync.normalise(output))
        note(sync, self.name, value)


class TensorUnit:
    """One tensor that is quantised as it is."""

    def __init__(self, choice: Choice, slot: Slot) -> None:
        self.choice = choice
        self.slots = [slot]
        self.missing = 0
        self.was_sent = False
        self.handle: int | None = None

    @property
    def name(self) -> str:
        return self.slots[0].name

    def send(self, sync: GradientSync) -> None:
        self.was_sent = True
        slot = self.slots[0]
        grad = slot.local_gradient(sync)
        before, after = sync.scales(feedback=True)
        self.handle = _torch.submit(
            _torch.KINDS["allreduce"],
            [grad],
            True,
            True,
            slot.name,
            sync.wire_op(),
            -1,
            before,
            after,
            sync.process_set.process_set_id,
            [],
            sync.stream,
            self.choice.text,
            sync.batch_weight(),
        )

    def finish(self, sync: GradientSync) -> None:
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        outputs, _, value = _torch.wait(handle)
        self.slots[0].take_result(sync.normalise(outputs[0]))
        note(sync, self.name, value)


def note(sync: GradientSync, name: str, value: int) -> None:
    """What all ranks learned from a request."""
    if value > 0 and value & _WANTS_PLAN:
        sync.replan_wanted = True
    if value > 0 and value & _NOT_FINITE and name not in sync.warned:
        sync.warned.add(name)
        _log.warning(
            'the gradient of "%s" was not finite on some rank: all ranks get NaN for it, '
            "and what was kept of it is as before; this is said once",
            name,
        )
