"""Which methods are planned for, and when their plans begin: the same in all frameworks."""

from __future__ import annotations

from typing import Any

from dad import dry_run
from dad.methods import compression as _methods

_BY_VARIANCE = (_methods.Vgc, _methods.VgcStrom)
_PLANNED = (_methods.Dad, _methods.Exact, _methods.Lossy)
# auto's dense steps: the first gradients are the least like those that follow.
_AUTO_WARM_UP = 5


def planned_method(compression: Any, name: str) -> Any:
    """The method of a tensor, if it is one that is planned for."""
    watching = dry_run.current()
    if watching is not None:
        watching.asked = compression
        return watching.method
    method = compression
    if isinstance(method, _methods.PerLayer):
        method = method.method_for(name)
    return method if isinstance(method, _PLANNED) else None


def has_planned_method(compression: Any) -> bool:
    if dry_run.current() is not None:
        return True
    methods = compression.methods.values() if isinstance(compression, _methods.PerLayer) else [compression]
    return any(isinstance(method, _PLANNED) for method in methods)


def looks_at_variance(method: Any) -> bool:
    return isinstance(method, _BY_VARIANCE)


def warm_up_steps(method: Any) -> int:
    steps = getattr(method, "warmup_steps", 0)
    return max(steps, _AUTO_WARM_UP) if isinstance(method, _methods.Auto) else steps
