"""Variables of a model that no DistributedOptimizer or tape trains.

Nothing keeps them equal on all ranks, so they are compared like trained ones (replicas.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any


class LeftOut:
    """Finds the variables of a framework that nobody trains. Optimizers and tapes say what they train."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, weakref.ref[Any]]] = {}  # by id: variables need not be hashable
        self._trained: dict[int, weakref.ref[Any]] = {}
        self._reporters: dict[int, weakref.ref[Any]] = {}

    def expect(self, named: Iterable[tuple[str, Any]]) -> None:
        """These variables belong to what is trained."""
        for name, variable in named:
            key = id(variable)
            if key not in self._names:
                self._names[key] = name, self._reference(variable, self._names)

    def trains(self, variables: Iterable[Any]) -> None:
        """Somebody reduces the gradients of these, or the user wants them to belong to this rank only."""
        for variable in variables:
            key = id(variable)
            if key not in self._trained:
                self._trained[key] = self._reference(variable, self._trained)

    def of(self, reporter: Any) -> list[tuple[str, Any]]:
        """What is left out, for the first that asks for it to compare it."""
        found = []
        for key, (name, reference) in list(self._names.items()):
            variable = reference()
            if variable is None or key in self._trained:
                continue
            known = self._reporters.get(key)
            if known is None or known() is None:
                self._reporters[key] = weakref.ref(reporter)
            elif known() is not reporter:
                continue
            found.append((name, variable))
        return found

    def _reference(self, variable: Any, table: dict[int, Any]) -> weakref.ref[Any]:
        key = id(variable)
        return weakref.ref(variable, lambda _: table.pop(key, None))
