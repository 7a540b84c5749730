"""What a rank saw of its parameters in a step, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dad.methods.planned import looks_at_variance
from dad.planning.planner import Link, Observation
from dad.torch._load import _torch
from dad.torch.slots import Slot


def observing_mode(method: Any) -> str:
    """How a tensor is captured in the step that a plan is made of."""
    return "samples" if looks_at_variance(method) else "rows"


def observe(slots: Sequence[Slot], sparse_as_dense: bool = False, passes: int = 1) -> dict[str, Observation]:
    """Observes all slots in this step; their segments stay with them."""
    captured = [slot for slot in slots if slot.capture_id >= 0]
    names = {slot.capture_id: slot.name for slot in captured}
    name_of = {slot.param: slot.name for slot in captured}
    seen = {slot.name: _observe(slot, names, name_of, sparse_as_dense) for slot in slots}
    return {name: replace(observation, passes=passes) for name, observation in seen.items()}


def _observe(
    slot: Slot, names: dict[int, str], name_of: dict[torch.Tensor, str], sparse_as_dense: bool
) -> Observation:
    grad = slot.param.grad
    sparse = not sparse_as_dense and (slot.sparse or (grad is not None and grad.is_sparse))
    if slot.capture_id < 0:
        return Observation(dense=True, sparse=sparse, used=grad is not None, too_large=slot.too_large)
    slot.take_segments()
    rows = [s for s in slot.segments if s.kind == "rows"]
    folded = _torch.capture_folded_bias(slot.param)
    rides = folded is not None and not slot.alone and rows and all(s.has_bias for s in rows)
    has_gradient = sparse or slot.formed_gradient() is not None
    # A layer that is not used in every step may be unused in this one.
    before, now = (slot.rows_seen, slot.indexed_seen), slot.num_rows()
    if slot.segments:
        slot.rows_seen = slot.indexed_seen = 0
    return Observation(
        rows=max(before[0], now[0]),
        indexed_rows=max(before[1], now[1]),
        samples=_samples(slot.segments),
        row_bytes=max((_values(s).element_size() for s in slot.segments), default=0),
        dense=has_gradient or slot.dense_seen,
        sparse=sparse,
        used=any(now) or any(before) or has_gradient,
        bias=name_of.get(folded) if rides else None,
        link=None if slot.unlinked else _common_link(slot.segments, names),
        reason=_torch.capture_reason(slot.param) if not slot.segments or has_gradient else "",
        sums=slot.param.dim() < 2 and bool(rows),
        row_outputs=max((s.d.shape[1] for s in rows), default=0),
        too_large=slot.too_large,
    )


def _samples(segments: Sequence[Any]) -> int:
    """The samples of all batches in a step. A cell that is used for each place of a sequence has the same
    ones each time."""
    batches: dict[int, int] = {}
    for segment in segments:
        batches[segment.batch] = max(segment.samples, batches.get(segment.batch, 0))
    return sum(batches.values())


def _values(segment: Any) -> torch.Tensor:
    return segment.x if segment.kind == "indexed" else segment.a


def _common_link(segments: Sequence[Any], names: dict[int, str]) -> Link | None:
    """The link that all segments have, in order."""
    links = {
        Link(names.get(s.link.upper_id, ""), s.link.activation, s.link.slope) if s.link is not None else None
        for s in segments
    }
    in_order = all(s.link is not None and s.link.upper_index == i for i, s in enumerate(segments))
    link = links.pop() if len(links) == 1 else None
    return link if link is not None and in_order and link.upper else None
