"""dad.plan(): what would be sent for a model, without any other rank."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dad.methods import compression as _methods
from dad.methods.compression import Vgc
from dad.methods.planned import planned_method
from dad.planning import planner
from dad.planning.compare import Comparison, Rows, asked_for, compare
from dad.planning.link import described_costs, line_of
from dad.planning.session import layers_of
from dad.planning.table import plan_rows
from dad.torch import capture
from dad.torch.compression import compressor
from dad.torch.observe import observe, observing_mode
from dad.torch.slots import Slot, multiply

# No optimizer has these numbers.
_owners = itertools.count(-1, -1)


def plan(
    model: torch.nn.Module,
    example_batch: Any,
    size: int = 8,
    link: str = "100mbit",
    compression: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Rows:
    """See dad.plan()."""
    line = line_of(link)
    costs = described_costs(line, size, multiply)
    compression = _methods.resolve(compression or os.environ.get("DAD_COMPRESSION") or "auto")
    # The user's model keeps its gradients, buffers and random numbers.
    model = copy.deepcopy(model)
    slots = []
    for name, param in model.named_parameters():
        method = planned_method(compression, name)
        chosen = compressor("none" if method is not None else compression, name)
        slots.append(Slot(param, name, chosen, 1, method=method))
    planned = [slot for slot in slots if slot.method is not None]
    with torch.random.fork_rng():
        seen = _seen(model, example_batch, loss or _sum, planned)
    made = planner.make_plan(layers_of(planned, [seen] * size), costs)
    for slot in planned:
        slot.planned = True

    def compared() -> Comparison:
        watched = [Slot(param, name, None, 1, method=Vgc()) for name, param in model.named_parameters()]
        with torch.random.fork_rng():
            seen = _seen(model, example_batch, loss or _sum, watched)
            began = time.perf_counter()
            _pass(model, example_batch, loss or _sum)
            seconds = time.perf_counter() - began
        rate = costs.flops_per_second
        return compare(watched, seen, size, line, rate, seconds, asked=asked_for(compression))

    return Rows(
        plan_rows(slots, made.choices, size, "asked for", measured={}), compared, made.exposed_seconds
    )


def _seen(
    model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor], slots: Sequence[Slot]
) -> dict[str, planner.Observation]:
    """What one rank sees of a forward and backward pass."""
    owner = next(_owners)
    for slot in slots:
        slot.param.grad = None
        if slot.param.is_floating_point():
            slot.capture_id = capture.track(slot.param, observing_mode(slot.method), owner)
    try:
        _pass(model, batch, loss)
        return observe(slots)
    finally:
        for slot in slots:
            if slot.capture_id >= 0:
                capture.untrack(slot.param, owner)


def _pass(model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor]) -> None:
    """A forward and backward pass."""
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        loss(output).backward()


def _sum(output: Any) -> torch.Tensor:
    """A loss for an output of unknown meaning: its `loss`, or the sum of the first tensor in it."""
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(output, torch.Tensor):
        return output.sum()
    items = output.values() if isinstance(output, Mapping) else output
    if isinstance(items, Sequence) or isinstance(output, Mapping):
        for item in items:
            if isinstance(item, torch.Tensor) and item.requires_grad:
                return item.sum()
    raise ValueError(f"the model returned a {type(output).__name__}: give a loss= that makes a number of it")
