"""dad.stats() as named numbers, for TensorBoard and others."""

from __future__ import annotations

from typing import Any


def number_of(value: Any) -> float:
    """Reads a number, or a tensor that holds one."""
    return float(value.detach() if hasattr(value, "detach") else value)


def scalars(stats: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, float]:
    """Statistics of the steps since `before`, or of all steps.

    Example:
        >>> scalars(dad.stats())["dad/bytes_per_step"]
        39210.5
    """
    old = before or {"steps": 0, "wire_bytes_sent": 0, "wire_bytes_received": 0, "tensors": {}}
    steps = max(1, stats["steps"] - old["steps"])
    found = {
        "dad/bytes_sent": float(stats["wire_bytes_sent"]),
        "dad/bytes_per_step": (stats["wire_bytes_sent"] - old["wire_bytes_sent"]) / steps,
        "dad/received_per_step": (stats["wire_bytes_received"] - old["wire_bytes_received"]) / steps,
    }
    if stats.get("ratio"):
        found["dad/ratio"] = float(stats["ratio"])
    for name, tensor in stats["tensors"].items():
        if tensor.get("effective") is not None:
            found[f"dad_effective/{name}"] = float(tensor["effective"])
    return found
