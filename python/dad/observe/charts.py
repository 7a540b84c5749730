"""Pieces of the report page: cells, charts and tables, as text."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from dad.planning.text import format_bytes

Point = tuple[float, float]
_TEXTS = ("method", "kind", "what", "why", "end")  # columns that begin at the left


def text(value: object) -> str:
    return html.escape(str(value))


def number(value: float | None, shown: str) -> str:
    """A cell that is sorted by its value."""
    return f'<td data-v="{-1 if value is None else value}">{shown}</td>'


def count(value: float | None) -> str:
    """A cell with bytes; empty if the number is unknown."""
    return number(value, "" if value is None else format_bytes(value))


def milliseconds(value: float | None) -> str:
    return number(value, "" if value is None else f"{value:.3g}")


def bar(part: float) -> str:
    return f'<span class="bar" style="width:{6 * part:.2f}em"></span>'


def table(heads: Iterable[str], rows: Sequence[str], name: str = "") -> str:
    marked = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll"><table{marked}><thead><tr>'
        + "".join(f'<th class="text">{head}</th>' if head in _TEXTS else f"<th>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def chart(title: str, points: Sequence[Point], width: int = 420, height: int = 120) -> str:
    top = max((y for _, y in points), default=0) or 1.0
    end = points[-1][0] if points else 1.0
    path = " ".join(f"{x / end * width:.1f},{height - y / top * height:.1f}" for x, y in points)
    return (
        f"<figure><figcaption>{text(title)}</figcaption>"
        f'<svg viewBox="0 0 {width + 50} {height + 18}" width="100%" role="img" aria-label="{text(title)}">'
        f'<line class="axis" x1="0" y1="{height}" x2="{width}" y2="{height}"/>'
        f'<polyline points="{path}"/><text x="{width + 5}" y="10">{top:.3g}</text>'
        f'<text x="0" y="{height + 14}">0 s</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{end:.3g} s</text></svg></figure>'
    )


def spark(values: Sequence[float], width: int = 110, height: int = 18) -> str:
    """The course of a value, from 0 to its largest."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = width / (len(values) - 1)
    path = " ".join(f"{i * step:.1f},{height - value / top * height:.1f}" for i, value in enumerate(values))
    return (
        f'<svg class="spark" width="{width}" height="{height}" aria-hidden="true">'
        f'<polyline points="{path}"/></svg>'
    )


def heat_map(name: str, title: str, rows: Sequence[tuple[str, list[float | None]]], least: str) -> str:
    """A row for each tensor, a column for each sample; the darkest cell is the largest of all values."""
    most = max((value for _, values in rows for value in values if value is not None), default=0.0) or 1.0
    # "</" would end the script.
    data = json.dumps({"rows": rows, "most": most}).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{text(title)}: {text(least)} "
        f'<span class="scale"></span> {most:.3g}</figcaption>'
        f'<script type="application/json" id="{name}">{data}</script>'
        f'<canvas data-from="{name}" role="img" aria-label="{text(title)}"></canvas>'
        f'<figcaption class="soft">{_tensors(len(rows))} from top to bottom, time to the right</figcaption>'
        "</figure>"
    )


def _tensors(number: int) -> str:
    return f"{number} tensor{'s' if number != 1 else ''}"


def gantt(rows: Sequence[Sequence[Any]], late: int, width: int = 900) -> str:
    """Rows of (name, submitted, first byte, result, last rank), in µs. Names are shown if there is room;
    otherwise the tensors for which rank `late` was last have a mark."""
    end = max(row[3] for row in rows) or 1
    thick = 16 if len(rows) <= 60 else 4
    named = thick >= 12
    left = 220 if named else 0
    scale = (width - left - 60) / end
    height = thick * len(rows)
    parts = []
    for i, (name, submitted, first, result, last) in enumerate(rows):
        y, tall = i * thick + 0.1 * thick, 0.8 * thick
        tip = f"{name}: submitted at {submitted / 1e3:.3g} ms, first byte at {first / 1e3:.3g} ms, " + (
            f"result at {result / 1e3:.3g} ms" + (f", rank {last} was last" if last >= 0 else "")
        )
        parts.append(
            f"<g><title>{text(tip)}</title>"
            f'<rect class="waits" x="{left + submitted * scale:.1f}" y="{y:.1f}" '
            f'width="{max(first - submitted, 0) * scale:.1f}" height="{tall:.1f}"/>'
            f'<rect class="sends" x="{left + first * scale:.1f}" y="{y:.1f}" '
            f'width="{max((result - first) * scale, 1):.1f}" height="{tall:.1f}"/>'
        )
        if named:
            shown = name if len(name) <= 34 else f"…{name[-33:]}"
            parts.append(
                f'<text x="{left - 8}" y="{y + tall - 2:.1f}" text-anchor="end">{text(shown)}</text>'
            )
            if last >= 0:
                x = left + result * scale + 5
                parts.append(f'<text class="late" x="{x:.1f}" y="{y + tall - 2:.1f}">rank {last}</text>')
        elif last == late:
            x = left + result * scale + 2
            parts.append(f'<rect class="late" x="{x:.1f}" y="{y:.1f}" width="4" height="{tall:.1f}"/>')
        parts.append("</g>")
    parts.append(
        f'<line class="axis" x1="{left}" y1="{height}" x2="{left + end * scale:.1f}" y2="{height}"/>'
    )
    parts.append(f'<text x="{left}" y="{height + 14}">0 ms</text>')
    parts.append(
        f'<text x="{left + end * scale:.1f}" y="{height + 14}" text-anchor="end">{end / 1e3:.3g} ms</text>'
    )
    svg = f'<svg viewBox="0 0 {width} {height + 20}" width="100%">{"".join(parts)}</svg>'
    return f'<div class="scroll">{svg}</div>'
