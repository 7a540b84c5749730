"""chunk_topk(on="momentum"): which optimizers may apply what is sent of a momentum.

What waits on a rank is then the momentum, E = β E + G, and what is sent of it leaves it. So the optimizer
has to apply the exchanged sum as it comes, or its sign: a second momentum would apply it again, and an
adaptive step would divide by moments of something that is no gradient.
"""

from __future__ import annotations

from typing import Any

from dad.methods import compression as _methods

_PLAIN = ("SGD", "GradientDescentOptimizer")
_BY_SIGN = ("SignSGD", "SignDescent")


def require_plain_optimizer(compression: Any, optimizer: Any, local_steps: bool = False) -> None:
    """ValueError if `compression` sends momenta and `optimizer` is neither plain SGD nor sign descent, or
    takes steps of its own before anything is sent."""
    methods = compression.methods.values() if isinstance(compression, _methods.PerLayer) else [compression]
    method = next((m for m in methods if getattr(m, "on", "") == "momentum"), None)
    if method is None:
        return
    if local_steps:
        raise ValueError(
            f"compression {method.name}: on='momentum' does not work with local steps: what is sent then is "
            "the change of a round, and its momentum that of outer=. Take on='gradient'"
        )
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    why = _why_not(optimizer)
    if why:
        raise ValueError(
            f"compression {method.name}: on='momentum' does not work with the optimizer "
            f"{type(optimizer).__name__}, {why}: what is sent is the momentum already, and has to be applied "
            "by plain SGD (momentum=0) or by its sign (a class named SignSGD or SignDescent). Take such an "
            "optimizer, or on='gradient'"
        )


def _why_not(optimizer: Any) -> str:
    name = type(optimizer).__name__
    if name in _BY_SIGN:
        return ""
    if name not in _PLAIN:
        return "which keeps moments or scales steps by itself"
    groups = getattr(optimizer, "param_groups", None)  # torch's
    momenta = [group.get("momentum", 0) for group in groups] if groups is not None else []
    if groups is None and hasattr(optimizer, "get_config"):  # of Keras
        momenta = [optimizer.get_config().get("momentum", 0)]
    largest = max((float(momentum or 0) for momentum in momenta), default=0.0)
    return f"which has momentum={largest:g}" if largest else ""
