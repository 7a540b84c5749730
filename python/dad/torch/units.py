"""The units of one optimizer, and the plan that they are made by: torch's side of a planning session.

Methods that work on layers need a plan, which is made of what all ranks saw in a step. Their first step
after the warm-up is therefore held: captured, but sent by nobody before the plan is there. So is the step
after one in which a rank asked for a new plan. The plan replaces the units of the tensors that were held.

Ranks follow one plan, which they make together: none is made while some have joined. After a checkpoint,
which perhaps not all have loaded, and after a join, in the middle of a warm-up, say, they compare again; if
their plans differ, that step goes dense and the next one makes a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dad.methods.planned import looks_at_variance, planned_method
from dad.planning.planner import is_exact
from dad.planning.session import Session
from dad.planning.types import Choice, Observation
from dad.torch import capture
from dad.torch._load import _torch
from dad.torch.checkpoint import as_arrays, as_tensors
from dad.torch.compression import compressor
from dad.torch.layer_units import DenseUnit, LayerUnit, Unit, make_unit
from dad.torch.naming import Named
from dad.torch.observe import observe, observing_mode
from dad.torch.slots import Slot, materialise, materialise_bias, multiply

_capture_owners = itertools.count(1)
_MODES = ("off", "rows", "rows_and_dense", "samples")  # of capture, each more than the one before


class Units:
    """What an optimizer sends.

    session: in which its ranks make their plans. passes: backward passes of a step.
    """

    def __init__(self, session: Session[Slot], passes: int, sparse_as_dense: bool) -> None:
        self.session = session
        self.passes = passes
        self.slots: dict[torch.Tensor, Slot] = {}
        self.all: list[Unit] = []
        self.held: set[Slot] = set()  # observed in this step; sent when its plan is there
        self.groups: list[list[str]] = []
        self._sparse_as_dense = sparse_as_dense
        self._owner = next(_capture_owners)

    def add(self, named: Named, groups: Sequence[Sequence[torch.Tensor]], compression: Any) -> None:
        """Takes parameters. Those in a group travel together, the others alone or as their method says."""
        for name, param in named:
            method = planned_method(compression, name)
            chosen = compressor("none" if method is not None else compression, name)
            slot = Slot(param, name, chosen, self.passes, method=method)
            self.slots[param] = slot
            if method is not None:
                self.session.tensors[name] = slot
            elif param.grad is None and param.requires_grad and not is_lazy(param):
                # As in Horovod, whose users may read it before the first backward().
                param.grad = torch.zeros_like(param)
            if method is not None and param.is_floating_point():
                slot.capture_id = capture.track(param, "off", self._owner)
        for group in groups:
            slots = [self.slots[param] for param in group if param in self.slots]
            self.groups.append([slot.name for slot in slots])
            self._add_unit(DenseUnit([slot for slot in slots if slot.method is None]))
        for _, param in named:
            if not self.slots[param].units:
                self._add_unit(DenseUnit([self.slots[param]]))

    def _add_unit(self, unit: Unit) -> None:
        if unit.slots:
            self.all.append(unit)
            for slot in unit.slots:
                slot.units.append(unit)
            unit.reset(self.passes)

    def _replace(self, slots: Sequence[Slot]) -> None:
        gone = set(slots)
        self.all = [unit for unit in self.all if not gone.intersection(unit.slots)]
        for slot in slots:
            slot.units = []

    @property
    def planned(self) -> list[Slot]:
        """What goes by a method for which there is a plan."""
        return list(self.session.tensors.values())

    def counts_passes(self, slot: Slot) -> bool:
        """Whether the passes of a step are samples, for what comes formed."""
        if not looks_at_variance(slot.method):
            return False
        by_plan = any(unit.choice is not None and unit.choice.row.squares for unit in slot.units)
        return by_plan or slot in self.held

    def forms_on_device(self, slot: Slot) -> bool:
        """Whether a gradient by a method has to be formed, and weighed, before it is sent: sums go from host
        to host, and the core does that in the memory of hosts only."""
        return slot.param.device.type != "cpu" and bool(self.session.circle.hosts)

    # The step that is observed

    def hold(self) -> None:
        """The step that begins will be observed for what has no plan and is past its warm-up."""
        self.held = set(self.session.held())
        for slot in self.held:
            slot.capture(observing_mode(slot.method))
        self.begin_capture(self.held)

    def begin_capture(self, slots: Sequence[Slot] | set[Slot]) -> None:
        """Forgets what was captured for these: a step begins."""
        captured = [slot.param for slot in slots if slot.capture_id >= 0]
        if captured:
            _torch.capture_begin_step(captured)

    def make_plan(self) -> None:
        """From what all ranks saw: units instead of those that were held."""
        held = [slot for slot in self.slots.values() if slot in self.held]
        self.held = set()
        choices = self.session.make_plan(held, self._observe, multiply)
        if choices is None:  # some have joined: what has no plan goes dense until they are back
            for slot in held:
                slot.capture(slot.mode)
        else:
            self._follow(choices, held)
        self._form(held)

    def _observe(self, held: Sequence[Slot]) -> dict[str, Observation]:
        seen = observe(held, self._sparse_as_dense, self.passes)
        for slot in held:
            if self.forms_on_device(slot) and not is_exact(slot.method):
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

    def _follow(self, choices: Sequence[Choice], slots: Sequence[Slot]) -> None:
        """Units for these slots by their choices."""
        by_name = {slot.name: slot for slot in slots}
        self._replace(slots)
        for slot in slots:
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

    # Without a plan

    def go_dense(self) -> None:
        """This step is sent as it would be without a method; the next one is observed. Raises what went
        wrong when that is done."""
        slots = self.planned
        errors: list[Exception] = []
        for slot in slots:
            try:
                slot.take_segments()
            except Exception as error:
                errors.append(error)
        self.session.forget_plan()
        self._become_dense()
        self._form(slots)
        if errors:
            raise errors[0]

    def _become_dense(self) -> None:
        self.held = set()
        self._replace(self.planned)
        for slot in self.planned:
            slot.mode = "off"
            slot.capture("off")
            self._add_unit(DenseUnit([slot]))

    # Between steps

    def reset(self) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        for slot in self.slots.values():
            slot.drop_segments()
            slot.forget_squares()
        for unit in self.all:
            unit.reset(self.passes)
        self.begin_capture(list(self.slots.values()))
        self.hold()

    def return_last(self) -> None:
        """The step was left out (a scaler found infinities): what it would have applied is kept."""
        self.session.return_last()
        for slot in self.slots.values():
            if slot.returned is not None:
                slot.kept, slot.returned = slot.returned, None

    def save(self) -> dict[str, Any]:
        """This rank's residuals and warm starts, and the plan that they follow."""
        return as_tensors(self.session.save())

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on where a run has stopped, as Session.load() says."""
        goes_on = self.session.load(as_arrays(saved))
        self._become_dense()
        if goes_on:
            self._follow(self.session.choices, self.planned)
        self.hold()

    def close(self) -> None:
        """Nothing is captured or kept any more."""
        for slot in self.slots.values():
            if slot.capture_id >= 0:
                capture.untrack(slot.param, self._owner)
        self.session.drop()
