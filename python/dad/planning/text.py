"""A plan as text: a summary, a table with one line per tensor or repeated layer, and a total.

The same for every framework and for dry runs. Everything but `PlanPrinter` is a pure function of the
rows that `plan()` returns.
"""

from __future__ import annotations

import collections
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_HEADER = (
    *("tensor", "shape", "rows", "method"),
    *("predicted bytes", "ratio", "ms"),
    *("measured bytes", "ratio", "ms"),
    "why",
)
# DAD_PLAN prints after this many steps with a plan. In the first ones, ranks may send something twice while
# they settle on what travels together.
PRINTED_AFTER_STEPS = 3


def format_plan(rows: Sequence[Row], exposed_ms: float | None = None) -> str:
    """Makes text of a plan, with a summary, a line for each layer and a total.

    Args:
        rows: what `optimizer.plan()` or `dad.plan()` returned.
        exposed_ms: for how long the training thread waited for gradients in a step, on average. Single
            tensors overlap each other and backward(), so their times cannot be added; this one can.

    Returns:
        the text, of several lines.

    Example::

        print(dad.format_plan(optimizer.plan()))
    """
    lines = [_cells(line) for line in fold(rows)]
    predicted_ms = getattr(rows, "predicted_ms", None)
    if exposed_ms is None:
        exposed_ms = getattr(rows, "measured_ms", None)
    lines.append(_total(rows, predicted_ms, exposed_ms))
    widths = [max(map(len, column)) for column in zip(_HEADER, *lines, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [_HEADER, *lines]
    ]
    return "\n".join([summary(rows), *table])


def summary(rows: Sequence[Row]) -> str:
    """One line: bytes of a step, dense and by this plan, and how many tensors go by each method."""
    dense = _sum(rows, "dense_bytes")
    predicted, measured = _sum(rows, "predicted_bytes"), _measured_total(rows)
    if measured is not None:
        sent = f"{_change(dense, measured)} measured ({format_bytes(predicted)} predicted)"
    else:
        sent = f"{_change(dense, predicted)} predicted"
    counts = collections.Counter(row["method"] for row in rows)
    methods = ", ".join(
        f"{count} dense" if method == "dense" else f"{count} by {method}"
        for method, count in counts.most_common()
    )
    return f"plan: {sent}; {methods or 'no tensors'}"


def fold(rows: Sequence[Row]) -> list[Row]:
    """Repeated layers as one row: `h.{0-11}.mlp.weight ×12`. Its bytes and predicted ms are the sum of its
    tensors, its measured ms their mean."""
    by_name = {row["name"]: row for row in rows}
    groups = grouped(list(by_name), lambda name: _key(by_name[name]))
    return [_joined([by_name[name] for name in names]) for names in groups]


def grouped(names: Sequence[str], key: Callable[[str], Any]) -> list[list[str]]:
    """Groups of names that differ in one number, ordered by the first name of each group."""
    alike: dict[Any, list[str]] = collections.defaultdict(list)
    for name in names:
        alike[key(name)].append(name)
    groups = {group[0]: group for members in alike.values() for group in _by_one_number(members)}
    return [groups[name] for name in names if name in groups]


def format_bytes(count: float) -> str:
    """With three digits: 812 B, 39.2 kB, 1.75 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:.0f} GB"


def is_plan_shown() -> bool:
    """Whether DAD_PLAN or DAD_REPORT asks for the plan."""
    from dad import report  # needs the core, which a launcher may not have

    return bool(os.environ.get("DAD_PLAN")) or report.path() is not None


def show_plan(rows: Sequence[Row], exposed_ms: float | None = None) -> None:
    """Prints the plan if DAD_PLAN asks for it, and notes it for the report."""
    from dad import report

    if os.environ.get("DAD_PLAN"):
        print(format_plan(rows, exposed_ms), file=sys.stderr, flush=True)
    report.note_plan(rows, exposed_ms)


class PlanPrinter:
    """Shows the plan of one optimizer once, after a few steps with it, if DAD_PLAN or DAD_REPORT asks for
    it."""

    def __init__(self) -> None:
        self._steps = 0
        self._waited_before = 0.0

    def step_done(self, plan: Callable[[], list[Row]], waited_seconds: float | None = None) -> None:
        """Call after each step with a plan, on the rank that prints.

        Args:
            plan: returns the rows.
            waited_seconds: for how long the training thread has waited for gradients in all steps so far.
        """
        if self._steps >= PRINTED_AFTER_STEPS or not is_plan_shown():
            return
        self._steps += 1
        if self._steps == 1:
            self._waited_before = waited_seconds or 0.0
        if self._steps == PRINTED_AFTER_STEPS:
            exposed_ms = None
            if waited_seconds is not None:
                exposed_ms = 1e3 * (waited_seconds - self._waited_before) / (PRINTED_AFTER_STEPS - 1)
            show_plan(plan(), exposed_ms)


# Folding


def _key(row: Row) -> tuple[Any, ...]:
    """Merges rows that differ only in numbers in their texts and in what was measured."""
    texts = (without_numbers(row[column]) for column in ("name", "why"))
    is_measured = row["measured_bytes"] is not None
    return (*texts, row["shape"], row["rows"], row["method"], row["predicted_bytes"], is_measured)


def without_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)


def _by_one_number(names: list[str]) -> list[list[str]]:
    """Groups of names that differ in one number: the number that takes the most values."""
    numbers = [_NUMBER.findall(name) for name in names]
    if len(names) == 1 or not numbers[0]:
        return [[name] for name in names]
    place = max(range(len(numbers[0])), key=lambda i: len({of_name[i] for of_name in numbers}))
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for name, of_name in zip(names, numbers, strict=True):
        others = (*of_name[:place], *of_name[place + 1 :])
        groups[others].append(name)
    return list(groups.values())


def _joined(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    sums = ("dense_bytes", "predicted_bytes", "measured_bytes", "predicted_ms")
    times = [row["measured_ms"] for row in rows if row["measured_ms"] is not None]
    return {
        **rows[0],
        "name": f"{common([row['name'] for row in rows])} ×{len(rows)}",
        "why": common([row["why"] for row in rows]),
        **{column: _sum(rows, column, empty=None) for column in sums},
        "measured_ms": sum(times) / len(times) if times else None,
    }


def common(texts: Sequence[str]) -> str:
    """Merges texts that differ only in numbers."""
    numbers = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))
    return _NUMBER.sub(lambda _: _range(next(numbers)), texts[0])


def _range(numbers: Sequence[str]) -> str:
    different = list(dict.fromkeys(numbers))
    if len(different) == 1:
        return different[0]
    values = sorted(map(float, different))
    least, most = f"{values[0]:g}", f"{values[-1]:g}"
    is_run = values == [values[0] + i for i in range(len(values))]
    if is_run or any("." in number for number in different):
        return f"{{{least}-{most}}}"
    return "{" + ",".join(f"{value:g}" for value in values) + "}"


# Cells


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["name"],
        "x".join(map(str, row["shape"])) or "scalar",
        _number(row["rows"], 0),
        row["method"],
        *_sent(row["dense_bytes"], row["predicted_bytes"], row["predicted_ms"]),
        *_sent(row["dense_bytes"], row["measured_bytes"], row["measured_ms"]),
        row["why"],
    )


def _total(rows: Sequence[Row], predicted_ms: float | None, exposed_ms: float | None) -> tuple[str, ...]:
    dense = _sum(rows, "dense_bytes")
    why = f"{len(rows)} tensors"
    if predicted_ms is not None:
        why += "; predicted ms: what a step takes longer than without communication"
    if exposed_ms is not None:
        why += "; measured ms: what a step waited for gradients (those of tensors overlap)"
    if predicted_ms is None:
        predicted_ms = _sum(rows, "predicted_ms", empty=None)
    return (
        *("total", "", "", ""),
        *_sent(dense, _sum(rows, "predicted_bytes"), predicted_ms),
        *_sent(dense, _measured_total(rows), exposed_ms),
        why,
    )


def _sent(dense: float, sent: float | None, ms: float | None) -> tuple[str, str, str]:
    if not sent:  # unknown, or it travels with another tensor
        return "", "", _number(ms, 2)
    return format_bytes(sent), f"{dense / sent:.1f}", _number(ms, 2)


def _change(dense: float, sent: float) -> str:
    ratio = f", {dense / sent:.3g}x" if sent else ""
    return f"{format_bytes(dense)} → {format_bytes(sent)} per step{ratio}"


def _measured_total(rows: Sequence[Row]) -> float | None:
    """Only if everything that is sent was measured."""
    if any(row["measured_bytes"] is None and row["predicted_bytes"] for row in rows):
        return None
    total: float | None = _sum(rows, "measured_bytes", empty=None)
    return total


def _sum(rows: Iterable[Row], column: str, empty: Any = 0) -> Any:
    values = [row[column] for row in rows if row[column] is not None]
    return sum(values) if values else empty


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
