"""A table of what is sent for each tensor, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dad.methods.compression import Method
from dad.planning import planner


class Planned(Protocol):
    """A tensor that a plan describes."""

    name: str
    compressor: Any  # what it uses without a plan
    method: Any  # a method that is planned, or None
    planned: bool

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def element_bytes(self) -> int: ...

    @property
    def floating(self) -> bool: ...


def method_name(chosen: Any) -> str:
    """How a plan calls a compressor."""
    is_ours = isinstance(chosen, Method) or (isinstance(chosen, type) and issubclass(chosen, Method))
    if is_ours:
        return "dense" if chosen.name == "none" else chosen.name
    return getattr(chosen, "__name__", type(chosen).__name__)


class PlanRows(list[dict[str, Any]]):
    """The rows of a plan, and what all of them together add to a step in ms, if known."""

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        predicted_ms: float | None = None,
        measured_ms: float | None = None,
    ) -> None:
        super().__init__(rows)
        self.predicted_ms = predicted_ms
        self.measured_ms = measured_ms


def plan_rows(
    slots: Iterable[Planned],
    choices: Sequence[planner.Choice],
    size: int,
    why: str,
    measured: dict[str, dict[str, Any]],
    exposed: tuple[float | None, float | None] = (None, None),
) -> PlanRows:
    """One row per tensor. Bytes are those that one rank sends in a step, or one host if `size` counts hosts.
    Bytes and ms of tensors that travel together are those of the group, in the row of the first tensor.

    why: for tensors that are not planned. measured: the values of stats() per tensor. They count only from
    when a tensor took its present method; warm-up steps are not part of the plan. exposed: seconds that
    communication adds to a step, predicted and measured."""
    share = 2 * (size - 1) / size
    places: dict[str, tuple[planner.Choice, int]] = {}
    for choice in choices:
        for i, (name, bias) in enumerate(zip(choice.layers, choice.biases, strict=True)):
            if not choice.passes[i]:
                places[name] = (choice, i)
                if bias is not None:
                    places[bias] = (choice, -1)
    rows = []
    for slot in slots:
        if slot.name in places and slot.planned:
            choice, place = places[slot.name]
            rows.append(_planned_row(slot, share, choice, place, measured.get(choice.layers[0], {})))
        else:
            rows.append(_unplanned_row(slot, share, why, measured.get(slot.name, {})))
    predicted_ms, measured_ms = (None if seconds is None else 1e3 * seconds for seconds in exposed)
    return PlanRows(rows, predicted_ms, measured_ms)


def _row(
    slot: Planned, share: float, method: str, why: str, predicted: float, measured: float | None
) -> dict[str, Any]:
    dense = share * math.prod(slot.shape) * slot.element_bytes
    sent = predicted if measured is None else measured
    return {
        "name": slot.name,
        "shape": tuple(slot.shape),
        "rows": None,  # of factors; a dense tensor has none
        "method": method,
        "why": why,
        "predicted_ms": None,
        "measured_ms": None,
        "predicted_bytes": round(predicted),
        "measured_bytes": None if measured is None else round(measured),
        "dense_bytes": round(dense),
        "bytes": round(sent),  # measured, if they are, else predicted
        "ratio": dense / sent if sent else None,
    }


def _measured_ms(measured: dict[str, Any]) -> float | None:
    recent = measured.get("recent")
    return 1e3 * recent["seconds"] / recent["steps"] if recent and recent["steps"] else None


def _measured_bytes(measured: dict[str, Any]) -> float | None:
    """Bytes of a step. Transfers between devices are not seen at the socket."""
    recent = measured.get("recent")
    if not recent or not recent["steps"] or measured.get("device_bytes"):
        return None
    # Between hosts, traffic inside a host does not count, and one rank of each host sends the rest.
    return recent.get("hosts_bytes_sent", recent["wire_bytes_sent"]) / recent["steps"] or None


def _unplanned_row(slot: Planned, share: float, why: str, measured: dict[str, Any]) -> dict[str, Any]:
    method = method_name(slot.compressor)
    itemsize = 2 if method in ("fp16", "bf16") and slot.floating else slot.element_bytes
    if slot.method is not None:
        method, why = "dense", f"warm-up of {slot.method.name}, or not seen yet"
    # Packed values need fewer bytes than the elements have.
    predicted = share * math.prod(slot.shape) * itemsize
    row = _row(slot, share, method, why, predicted, _measured_bytes(measured))
    row["measured_ms"] = _measured_ms(measured)
    return row


def _planned_row(
    slot: Planned, share: float, choice: planner.Choice, place: int, measured: dict[str, Any]
) -> dict[str, Any]:
    first = next(name for name, _ in choice.own())
    method, why = planner.describe(choice), choice.why
    if place == -1:
        weight = next(n for n, b in zip(choice.layers, choice.biases, strict=True) if b == slot.name)
        why = f"rides with {weight}"
    elif slot.name != first:
        why = f"in the chain that begins with {first}"
    elif choice.row.reports_part and "effective" in measured:
        why += f"; {100 * measured['effective']:.3g} % sent in the last step"
    sent = (choice.num_bytes, _measured_bytes(measured)) if slot.name == first else (0.0, None)
    row = _row(slot, share, method, why, *sent)
    row["rows"] = choice.rows if choice.capture != "off" else None
    if slot.name == first:
        row["predicted_ms"] = 1e3 * choice.seconds
        row["measured_ms"] = _measured_ms(measured)
    return row
