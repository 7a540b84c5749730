"""The guard of `auto`: it raises the layers whose gradients are sent too incompletely.

A lossy method leaves what it does not send in a residual. The core measures which part of the waiting energy,
this step's gradient included, a step has sent (TensorStats::captured). If that part is small, most of a
gradient is applied many steps late, and training falls behind. At agreed steps all ranks compare their
measurements. Layers below the bound begin one rung higher on auto's ladder (auto.py): more rank, then 8 bits
per element, with which a text model ended within 0.001 nats of dense. Layers are never lowered again: a layer
whose gradient had a high rank early on gains little from less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dad.methods import compression as _methods
from dad.planning import auto
from dad.planning.types import Choice, Layer

# The part of the waiting energy that a step has to send.
LEAST_CAPTURED = 0.25
# A layer this far below the bound is raised by two rungs at once, or three, and so on.
_RUNG = 0.5


class Guard:
    """strengths: by how many rungs each raised layer was raised. reasons: why, for the plan."""

    def __init__(self) -> None:
        self.strengths: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def review(
        self, layers: Iterable[Layer], choices: Sequence[Choice], captured: Sequence[Mapping[str, float]]
    ) -> list[str]:
        """Raises the layers that are below the bound.

        Args:
            captured: what each rank measured, by layer; the lowest value counts.

        Returns:
            The names of the layers that were raised.
        """
        by_name = {layer.name: layer for layer in layers}
        raised = []
        for choice in choices:
            layer = by_name.get(choice.layers[0])
            values = [one[choice.layers[0]] for one in captured if choice.layers[0] in one]
            if layer is None or not values or not isinstance(layer.method, _methods.Auto):
                continue
            least = min(values)
            before = self.strengths.get(layer.name, 0)
            if choice.kind != "low_rank" or least >= LEAST_CAPTURED or layer.method.budget is not None:
                continue
            steps = 1
            while least < LEAST_CAPTURED * _RUNG**steps:
                steps += 1
            self.strengths[layer.name] = min(before + steps, len(auto.ranks(layer)))
            self.reasons[layer.name] = (
                f"raised, since {choice.option('rank')} directions sent {100 * least:.0f} % of what waited, "
                f"of {100 * LEAST_CAPTURED:.0f} % that are needed"
            )
            raised.append(layer.name)
        return raised

    @staticmethod
    def is_concerned(captured: Iterable[Mapping[str, float]]) -> bool:
        """Whether some rank measured a value below the bound."""
        return any(part < LEAST_CAPTURED for one in captured for part in one.values())

    # What ranks tell each other, and what checkpoints keep

    def as_dict(self) -> dict[str, Any]:
        return {name: [strength, self.reasons[name]] for name, strength in self.strengths.items()}

    def take(self, everyone: Iterable[Mapping[str, Any]]) -> None:
        """Takes the highest value that any rank knows: a rank that is new in the job knows of none."""
        for one in everyone:
            for name, (strength, reason) in one.items():
                if strength > self.strengths.get(name, 0):
                    self.strengths[name], self.reasons[name] = strength, reason
