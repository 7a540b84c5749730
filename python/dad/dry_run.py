"""Whether this process is a dry run of a script (`dad plan`), and what it has seen so far.

A dry run is one process that trains alone. The script is told that there are as many ranks as it will run
on, its optimizers work as with one rank, and every tensor is observed as methods would see it
(planning/script.py). Nothing here is used otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dad.methods.compression import Method, Vgc


@dataclass
class DryRun:
    """One script. `tensors` and `seen` are of all its optimizers, by name."""

    size: int
    method: Method = field(default_factory=Vgc)  # of all that look at a step, the one that looks at most
    asked: Any = None  # what the script, or its environment, asks for
    tensors: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    multiply: Callable[..., object] | None = None
    steps: Callable[[], int] | None = None  # of the first optimizer

    def saw(
        self,
        tensors: Sequence[Any],
        seen: dict[str, Any],
        multiply: Callable[..., object],
        steps: Callable[[], int],
    ) -> None:
        """An optimizer has seen its first step."""
        self.tensors |= {tensor.name: tensor for tensor in tensors}
        self.seen |= seen
        self.multiply = multiply
        self.steps = self.steps or steps


_current: DryRun | None = None


def current() -> DryRun | None:
    return _current


def begin(size: int) -> DryRun:
    """This process is a dry run from now on, to its end."""
    global _current
    _current = DryRun(size)
    return _current
