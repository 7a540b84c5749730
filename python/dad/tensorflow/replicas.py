"""What this rank has of a model, for comparisons with the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dad.state.replicas import Replica

Settings = Callable[[], dict[str, str]]


def replica_of(names: Sequence[str], variables: Sequence[Any], settings: Settings) -> Callable[[], Replica]:
    """Reads the variables when it is called; it does not keep them alive."""
    watched = [(name, weakref.ref(variable)) for name, variable in zip(names, variables, strict=True)]

    def memory() -> Iterator[tuple[str, Any]]:
        for name, reference in watched:
            if (variable := reference()) is not None:
                yield name, np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)

    return lambda: Replica.of(memory(), settings())
