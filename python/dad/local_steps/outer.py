"""The outer optimizer: what is done with the mean change of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dad.suggest import nearest


@dataclass(frozen=True)
class Outer:
    """SGD with momentum on the mean change of the weights in a round (DiLoCo, arXiv:2311.08105).

    With M the mean of the ranks' changes, `weights at the start - weights at the end`::

        m = momentum * m + M
        weights = weights - lr * (M + momentum * m)      # nesterov
        weights = weights - lr * m                       # else

    Without an outer optimizer the new weights are the ranks' mean, as by `Outer(lr=1, momentum=0)`.

    Args:
        lr: how far to go; above 0.
        momentum: from 0 up to, but not including, 1.
        nesterov: looks one step ahead, as in DiLoCo.

    Raises:
        ValueError: an argument is out of range.

    Example:
        hvd.DistributedOptimizer(optimizer, local_steps=32, outer=hvd.Outer(lr=0.7, momentum=0.9))
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("lr", 0.0, float("inf")), ("momentum", 0.0, 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value < high or (name == "lr" and value == 0):
                bounds = "above 0" if name == "lr" else "from 0 to below 1"
                raise ValueError(f"Outer: {name}={value!r} is not possible; a number {bounds}")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"Outer: nesterov={self.nesterov!r} is not possible; True or False")

    def step(
        self, weights: Sequence[Any], change: Sequence[Any], momentum: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """The new weights and the new momentum, of tensors of any framework. All ranks compute the same bits
        from the same bits."""
        if self.momentum == 0:
            return [
                w - (c if self.lr == 1 else self.lr * c) for w, c in zip(weights, change, strict=True)
            ], None
        if momentum is None:
            new = list(change)
        else:
            new = [self.momentum * m + c for m, c in zip(momentum, change, strict=True)]
        steps = new
        if self.nesterov:
            steps = [c + self.momentum * m for c, m in zip(change, new, strict=True)]
        return [w - self.lr * s for w, s in zip(weights, steps, strict=True)], new

    def spec(self) -> str:
        """The text that parse() turns into an equal one."""
        return f"lr={self.lr!r},momentum={self.momentum!r},nesterov={self.nesterov}"

    @staticmethod
    def parse(text: str) -> Outer:
        """`lr=0.7,momentum=0.9,nesterov=True`, or some of these; `default` is Outer()."""
        if text.strip().lower() in ("default", "1", "true"):
            return Outer()
        options: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (word.strip() for word in part.partition("="))
            known = ("lr", "momentum", "nesterov")
            if not equals or key not in known:
                hint = nearest(key, known)
                raise ValueError(f"outer {text!r}: {part!r} should be one of {', '.join(known)}{hint}")
            if key == "nesterov":
                options[key] = {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
            else:
                try:
                    options[key] = float(value)
                except ValueError:
                    options[key] = value  # Outer says what is expected
        return Outer(**options)


AVERAGE = Outer(lr=1.0, momentum=0.0, nesterov=False)
