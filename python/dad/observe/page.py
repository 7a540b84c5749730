"""`dad report run.jsonl`: one page, which needs no network, from what DAD_REPORT has written."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dad.planning.text import format_bytes

Line = dict[str, Any]
Point = tuple[float, float]

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --rule: #d0d7de; --page: #fff;
  --sent: #1a7f5a; --line: #2563c9 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d;
  --page: #0d1117; --sent: #3fb984; --line: #6ea8fe } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 2em auto; max-width: 76em; padding: 0 1.5em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
.soft { color: var(--soft) } .scroll { overflow-x: auto }
.cards { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.2em 0 }
.card { border: 1px solid var(--rule); border-radius: 6px; padding: .6em 1em; min-width: 8em }
.card b { display: block; font-size: 1.5em }
table { border-collapse: collapse; width: 100% }
th, td { padding: .2em .7em; text-align: right; white-space: nowrap }
th { position: sticky; top: 0; background: var(--page); border-bottom: 1px solid var(--rule);
  cursor: pointer } th:first-child, td:first-child, .text { text-align: left }
td { border-bottom: 1px solid var(--rule) } .why { white-space: normal; min-width: 16em }
svg { overflow: visible } svg text { fill: var(--soft); font-size: 11px }
.axis { stroke: var(--rule) } polyline { fill: none; stroke: var(--line); stroke-width: 1.5 }
.bar { display: inline-block; height: .7em; background: var(--sent); vertical-align: middle }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22em, 1fr)); gap: 1.5em }
input { font: inherit; padding: .2em .5em; margin-bottom: .6em }
"""

# Sorts a table by the column that is clicked, and hides rows that do not contain what is typed.
_SCRIPT = """
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0];
  table.querySelectorAll('th').forEach((head, i) => head.onclick = () => {
    const down = head.dataset.down = head.dataset.down === '1' ? '0' : '1';
    const key = row => row.cells[i].dataset.v ?? row.cells[i].textContent;
    const sign = down === '1' ? -1 : 1;
    [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], n = x - y;
      return sign * (isNaN(n) ? x.localeCompare(y) : n);
    }).forEach(row => body.append(row));
  });
}
const find = document.getElementById('find');
if (find) find.oninput = () => {
  for (const row of document.getElementById('tensors').tBodies[0].rows)
    row.hidden = !row.textContent.includes(find.value);
};
"""


class ReportError(ValueError):
    """The file is not a report."""


def read_report(path: str | Path) -> dict[str, list[Line]]:
    """The lines of each job in the file, in the order of their ranks; jobs in the order of their ends.

    Raises:
        ReportError: a line is not one that DAD_REPORT writes; the message has its number.
    """
    jobs: dict[str, list[Line]] = {}
    for number, text in enumerate(Path(path).read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            line["rank"], line["stats"]["tensors"]
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path}:{number}: not a line of a report (dadrun --report {path} …)") from None
        jobs.setdefault(str(line.get("job")), []).append(line)
    if not jobs:
        raise ReportError(f"{path}: empty; a rank adds its line when it ends")
    return {job: sorted(lines, key=lambda line: int(line["rank"])) for job, lines in jobs.items()}


def page(job: str, lines: Sequence[Line]) -> str:
    """The page of one job."""
    first = lines[0]
    stats, samples = first["stats"], first.get("samples", [])
    seconds = samples[-1]["seconds"] if samples else None
    sent = sum(line["stats"]["wire_bytes_sent"] for line in lines)
    dense = sum(line["stats"]["dense_bytes"] for line in lines)
    cards = [
        (str(first.get("size", len(lines))), "ranks"),
        (f"{stats['steps']:,}", "steps"),
        (format_bytes(sent), "sent by all ranks"),
        (format_bytes(dense), "dense gradients would be"),
        (f"{dense / sent:.3g} times" if sent and dense else "-", "fewer bytes"),
    ]
    if seconds and stats["steps"]:
        cards.append((f"{1e3 * seconds / stats['steps']:.3g} ms", "per step, all included"))
    if lags := _lags(lines):
        rank, seen = max(lags.items(), key=lambda item: item[1]["lag_seconds"] * item[1]["last_in"])
        cards.append((f"rank {rank}", f"slowest: {1e3 * seen['lag_seconds']:.3g} ms behind"))
    parts = [
        f"<h1>{_text(job)}</h1>",
        f'<p class="soft">written {_text(first.get("time", ""))}, read from {len(lines)} of '
        f"{first.get('size', len(lines))} ranks</p>",
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{_text(value)}</b>{_text(name)}</div>' for value, name in cards)
        + "</div>",
        _over_time(samples),
        _tensors(lines, first.get("plan", []), samples),
        _ranks(lines),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dad report {_text(job)}</title>\n'
        f"<style>{_STYLE}</style>\n<body>\n{body}\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: float | None, text: str) -> str:
    """A cell that is sorted by its value."""
    return f'<td data-v="{-1 if value is None else value}">{text}</td>'


def _over_time(samples: Sequence[Line]) -> str:
    if len(samples) < 3:
        return ""
    pairs = list(zip(samples, samples[1:], strict=False))
    rates = [
        (b["seconds"], b["seconds"] - a["seconds"], a, b) for a, b in pairs if b["seconds"] > a["seconds"]
    ]
    speed = [(at, (b["steps"] - a["steps"]) / over) for at, over, a, b in rates]
    traffic = [(at, (b["wire_bytes_sent"] - a["wire_bytes_sent"]) / over / 1e6) for at, over, a, b in rates]
    charts = _chart("steps per second", speed) + _chart("MB per second sent by rank 0", traffic)
    return f'<h2>Over time</h2>\n<div class="charts">{charts}</div>'


def _chart(title: str, points: Sequence[Point], width: int = 420, height: int = 120) -> str:
    top = max((y for _, y in points), default=0) or 1.0
    end = points[-1][0] if points else 1.0
    path = " ".join(f"{x / end * width:.1f},{height - y / top * height:.1f}" for x, y in points)
    return (
        f'<figure style="margin:0"><figcaption>{_text(title)}</figcaption>'
        f'<svg viewBox="0 0 {width + 50} {height + 18}" width="100%" role="img" aria-label="{_text(title)}">'
        f'<line class="axis" x1="0" y1="{height}" x2="{width}" y2="{height}"/>'
        f'<polyline points="{path}"/><text x="{width + 5}" y="10">{top:.3g}</text>'
        f'<text x="0" y="{height + 14}">0 s</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{end:.3g} s</text></svg></figure>'
    )


def _spark(values: Sequence[float], width: int = 110, height: int = 18) -> str:
    """How a value went, from 0 to its largest."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = width / (len(values) - 1)
    path = " ".join(f"{i * step:.1f},{height - value / top * height:.1f}" for i, value in enumerate(values))
    return f'<svg width="{width}" height="{height}" aria-hidden="true"><polyline points="{path}"/></svg>'


def _tensors(lines: Sequence[Line], plan: Iterable[Line], samples: Sequence[Line]) -> str:
    rows_of = {str(row["name"]): row for row in plan}
    first = lines[0]["stats"]["tensors"]
    total = {
        name: sum(line["stats"]["tensors"].get(name, tensor)["wire_bytes_sent"] for line in lines)
        for name, tensor in first.items()
    }
    most = max(total.values(), default=0) or 1
    rows = []
    for name in sorted(first, key=lambda name: -total[name]):
        tensor, row = first[name], rows_of.get(name, {})
        steps = tensor["steps"] or 1
        reached = [sample["effective"][name] for sample in samples if name in sample["effective"]]
        effective = tensor.get("effective")
        worst = tensor.get("worst") or {}
        predicted = row.get("predicted_bytes")
        late = f"rank {worst['last_rank']}" if worst.get("last_rank", -1) >= 0 else ""
        slowest = 1e3 * worst.get("seconds", 0)
        rows.append(
            f'<tr><td>{_text(name)}</td><td class="text">{_text(row.get("method", ""))}</td>'
            + _number(total[name], _bar(total[name] / most) + format_bytes(total[name]))
            + _number(tensor["wire_bytes_sent"] / steps, format_bytes(tensor["wire_bytes_sent"] / steps))
            + _number(predicted, "" if predicted is None else format_bytes(predicted))
            + _number(tensor["ratio"], f"{tensor['ratio']:.3g}" if tensor["ratio"] else "")
            + _number(effective, "" if effective is None else _effective(effective))
            + f"<td>{_spark(reached)}</td>"
            + _number(slowest, f"{slowest:.3g} ms {late}")
            + f'<td class="text why">{_text(row.get("why", ""))}</td></tr>'
        )
    heads = ["tensor", "method", "sent", "per step", "predicted", "ratio", "effective", "over time"]
    heads += ["worst step", "why"]
    return (
        "<h2>Tensors</h2>\n<p class='soft'>Bytes sent by all ranks; those per step by rank 0."
        " Effective is the rank of what was applied (rank_dad), or the part of the elements that was"
        " sent (vgc and others), in the last step and over time. The worst step took longest, and the"
        " rank named there sent last.</p>\n"
        '<input id="find" placeholder="find a tensor" aria-label="find a tensor">\n<div class="scroll">'
        f'<table id="tensors"><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _effective(value: float) -> str:
    return f"rank {value:.0f}" if value >= 1 else f"{100 * value:.3g} %"


def _bar(part: float) -> str:
    return f'<span class="bar" style="width:{6 * part:.2f}em"></span> '


def _lags(lines: Sequence[Line]) -> dict[int, Line]:
    """Of the ranks that others have named as the slowest: what the one that waited longest has seen."""
    lags: dict[int, Line] = {}
    for line in lines:
        seen = line["stats"].get("slowest")
        if not seen or seen["rank"] == line["rank"]:
            continue
        known = lags.get(seen["rank"])
        if known is None or seen["lag_seconds"] > known["lag_seconds"]:
            lags[seen["rank"]] = seen
    return lags


def _lag(seen: Line | None) -> tuple[float | None, str]:
    if seen is None:
        return None, ""
    return seen["lag_seconds"], f"{1e3 * seen['lag_seconds']:.3g} ms in {seen['last_in']} of {seen['steps']}"


def _ranks(lines: Sequence[Line]) -> str:
    late: dict[int, int] = {}
    for line in lines:
        for tensor in line["stats"]["tensors"].values():
            rank = (tensor.get("worst") or {}).get("last_rank", -1)
            if rank >= 0:
                late[rank] = late.get(rank, 0) + 1
    lags = _lags(lines)
    rows = [
        f"<tr><td>{line['rank']}</td>"
        + _number(line["stats"]["wire_bytes_sent"], format_bytes(line["stats"]["wire_bytes_sent"]))
        + _number(line["stats"]["wire_bytes_received"], format_bytes(line["stats"]["wire_bytes_received"]))
        + _number(line["stats"]["messages_sent"], f"{line['stats']['messages_sent']:,}")
        + _number(late.get(line["rank"], 0), str(late.get(line["rank"], 0)))
        + _number(*_lag(lags.get(line["rank"])))
        + f'<td class="text">{_text(line.get("ended_by", "ended well"))}</td></tr>'
        for line in lines
    ]
    heads = ("rank", "sent", "received", "messages", "last in worst steps", "lag, last 100 steps", "end")
    return (
        '<h2>Ranks</h2>\n<div class="scroll"><table><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )
