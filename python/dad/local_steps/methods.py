"""What other options have to be like for local steps."""

from __future__ import annotations

from typing import Any

from dad.basics import Average
from dad.log import log
from dad.methods import compression as _methods

_BY_ROWS = (_methods.Dad, _methods.Exact)  # Edad is a Dad


def for_changes(compression: Any, none: Any, says: bool = True) -> Any:
    """The compression, for the changes of a round. Methods that exchange the factors of a gradient have none
    to exchange: the change is sent dense (`none`), and the rank that `says` so has a log line."""
    if isinstance(compression, type) and issubclass(compression, _methods.Method):
        compression = compression()
    if isinstance(compression, _methods.PerLayer):
        methods = {glob: for_changes(one, none, says) for glob, one in compression.methods.items()}
        return _methods.PerLayer(methods)
    if not isinstance(compression, _BY_ROWS):
        return compression
    if says:
        log.warning(
            "compression %s exchanges the factors of a step's gradient, and the change of a round of local "
            "steps has none: it is sent dense. Methods that take it: rank_dad, int8, topk, vgc, strom, qsgd, "
            "powersgd, auto",
            compression.name,
        )
    return none


def require_average(op: int) -> None:
    """ValueError if ranks are to do something else with what they exchange."""
    if op != Average:
        raise ValueError("local steps need op=Average: ranks average the changes of their weights")
