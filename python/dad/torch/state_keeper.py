"""The states of an optimizer's requests in the core: which there are, and how they pass to another plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dad._lib import _core
from dad.planner import Choice, Plan
from dad.process_sets import ProcessSet
from dad.torch.slots import Slot
from dad.torch.states import Place, Tensors, keeps, keeps_gradients, layout, shares, state


class StateKeeper:
    def __init__(self, process_set: ProcessSet, stream: int) -> None:
        self._process_set = process_set
        self._stream = stream
        self._choices: dict[str, Choice] = {}  # by which there is a state, by request

    def hand_over(self, choices: Sequence[Choice], slots: Sequence[Slot], place: Place) -> None:
        """The states of these slots take the form that their new choices have. What finds no place there,
        because nothing is kept any more, stays with the slots."""
        by_name = {slot.name: slot for slot in slots}
        new = {choice.layers[0]: choice for choice in choices if keeps(choice)}
        for name, old in list(self._choices.items()):
            goes_on = name in new and layout(new[name], place.size) == layout(old, place.size)
            if name in by_name and not goes_on:
                self._give_to_slots(name, old, by_name, place)
                del self._choices[name]
        for name, choice in new.items():
            own = [by_name[n] for pair in choice.own() for n in pair if n is not None]
            if keeps_gradients(choice) and any(slot.kept is not None for slot in own):
                self._give_to_slots(name, choice, by_name, place)
                self._take_from_slots(name, choice, own, place)
            self._choices[name] = choice

    def _give_to_slots(self, name: str, choice: Choice, by_name: dict[str, Slot], place: Place) -> None:
        tensors = self._export(name)
        if not tensors:
            return
        shapes = {slot.name: slot.param.shape for slot in by_name.values()}
        for tensor, share in shares(tensors, choice, shapes, place).items():
            slot = by_name[tensor]
            slot.kept = share if slot.kept is None else slot.kept + share
        self._import(name, {})

    def _take_from_slots(self, name: str, choice: Choice, slots: Sequence[Slot], place: Place) -> None:
        dtype = torch.float64 if slots[0].param.dtype == torch.float64 else torch.float32
        kept = {slot.name: slot.kept for slot in slots if slot.kept is not None}
        self._import(name, state(kept, choice, place, dtype))
        for slot in slots:
            slot.kept = None

    def save(self) -> dict[str, Any]:
        return {
            "kept_by": Plan(list(self._choices.values())).as_dict(),
            "states": {name: tensors for name in self._choices if (tensors := self._export(name))},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """States of the same choices, on the same number of ranks."""
        for name, tensors in saved["states"].items():
            self._import(name, tensors)

    def return_last(self) -> None:
        _core.return_last(self._process_set.process_set_id, self._stream)

    def drop(self) -> None:
        if self._choices and _core.is_initialized():
            _core.drop_states(self._process_set.process_set_id, self._stream)
        self._choices = {}

    def _export(self, name: str) -> Tensors:
        saved = _core.export_state(self._process_set.process_set_id, self._stream, name)
        return {
            key: torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
            for key, dtype, shape, data in saved
            if data
        }

    def _import(self, name: str, tensors: Tensors) -> None:
        rows = [
            (key, str(t.dtype).removeprefix("torch."), list(t.shape), t.contiguous().numpy().tobytes())
            for key, t in tensors.items()
        ]
        _core.import_state(self._process_set.process_set_id, self._stream, name, rows)
