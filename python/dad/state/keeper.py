"""The states of an optimizer's requests in the core, and how they pass to another plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from dad.planning.circle import Place
from dad.planning.planner import Choice, Plan
from dad.planning.ranks import Ranks
from dad.state.kept import Tensors
from dad.state.states import keeps, keeps_gradients, layout, shares, state


class Holder(Protocol):
    """A tensor, and this rank's share of what an earlier plan has not applied (states.py)."""

    name: str
    kept: np.ndarray | None

    @property
    def shape(self) -> tuple[int, ...]:
        """On the wire."""

    @property
    def wide_dtype(self) -> np.dtype:
        """The type in which its values are kept."""


class StateKeeper:
    """request_name: how the core calls the request of a tensor."""

    def __init__(
        self, ranks: Ranks, stream: int, request_name: Callable[[str], str] = lambda name: name
    ) -> None:
        self._ranks = ranks
        self._stream = stream
        self._request_name = request_name
        self._choices: dict[str, Choice] = {}  # the choices for which there is a state, by request

    def hand_over(
        self, choices: Sequence[Choice], holders: Sequence[Holder], place: Place, keeps_here: bool = True
    ) -> None:
        """Gives the states of these holders the form of their new choices. What has no place there, because
        nothing is kept any more or not on this rank, stays with the holders."""
        by_name = {holder.name: holder for holder in holders}
        new = {choice.layers[0]: choice for choice in choices if keeps(choice)}
        for name, old in list(self._choices.items()):
            goes_on = name in new and layout(new[name], place.size) == layout(old, place.size)
            if name in by_name and not goes_on:
                self._hand_back(name, old, by_name, place)
                del self._choices[name]
        for name, choice in new.items():
            own = [by_name[n] for pair in choice.own() for n in pair if n is not None]
            takes = keeps_here and keeps_gradients(choice)
            if takes and any(holder.kept is not None for holder in own):
                self._hand_back(name, choice, by_name, place)
                self._take_over(name, choice, own, place)
            self._choices[name] = choice

    def _hand_back(self, name: str, choice: Choice, by_name: dict[str, Holder], place: Place) -> None:
        if tensors := self._export(name):
            shapes = {holder.name: holder.shape for holder in by_name.values()}
            for tensor, share in shares(tensors, choice, shapes, place).items():
                holder = by_name[tensor]
                holder.kept = share if holder.kept is None else holder.kept + share
        # Do this even for one that has nothing to tell: its shape may not fit the new choice.
        self._import(name, {})

    def _take_over(self, name: str, choice: Choice, holders: Sequence[Holder], place: Place) -> None:
        kept = {holder.name: holder.kept for holder in holders if holder.kept is not None}
        self._import(name, state(kept, choice, place, holders[0].wide_dtype))
        for holder in holders:
            holder.kept = None

    def save(self) -> dict[str, Any]:
        return {
            "kept_by": Plan(list(self._choices.values())).as_dict(),
            "states": {name: tensors for name in self._choices if (tensors := self._export(name))},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Whether states belong to the same choices, on the same number of ranks."""
        for name, tensors in saved["states"].items():
            self._import(name, tensors)

    def return_last(self) -> None:
        self._ranks.return_last(self._stream)

    def drop(self) -> None:
        if self._choices:
            self._ranks.drop_states(self._stream)
        self._choices = {}

    def _export(self, name: str) -> Tensors:
        return self._ranks.export_state(self._stream, self._request_name(name))

    def _import(self, name: str, tensors: Tensors) -> None:
        self._ranks.import_state(self._stream, self._request_name(name), tensors)
