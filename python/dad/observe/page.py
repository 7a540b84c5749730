"""`dad report run.jsonl`: one page that needs no network, from what DAD_REPORT has written."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dad.observe.charts import (
    bar,
    chart,
    count,
    gantt,
    heat_map,
    milliseconds,
    number,
    spark,
    table,
    text,
)
from dad.observe.style import SCRIPT, STYLE
from dad.planning.text import format_bytes

Line = dict[str, Any]
# For these kinds `effective` is a rank; for others it is a part.
_BY_RANK = ("rank_dad", "powersgd")


class ReportError(ValueError):
    """The file is not a report."""


def read_report(path: str | Path) -> dict[str, list[Line]]:
    """The lines of each job in the file, ordered by rank; jobs ordered by their ends.

    Raises:
        ReportError: a line is not one that DAD_REPORT writes; the message has its number.
    """
    jobs: dict[str, list[Line]] = {}
    for place, written in enumerate(Path(path).read_text().splitlines(), 1):
        if not written.strip():
            continue
        try:
            line = json.loads(written)
            line["rank"], line["stats"]["tensors"]
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path}:{place}: not a line of a report (dadrun --report {path} …)") from None
        jobs.setdefault(str(line.get("job")), []).append(line)
    if not jobs:
        raise ReportError(f"{path}: empty; a rank adds its line when it ends")
    return {job: sorted(lines, key=lambda line: int(line["rank"])) for job, lines in jobs.items()}


def page(job: str, lines: Sequence[Line]) -> str:
    """The page of one job."""
    first = lines[0]
    plan, samples = first.get("plan", []), first.get("samples", [])
    parts = [
        f"<h1>{text(job)}</h1>",
        f'<p class="soft">written {text(first.get("time", ""))}, read from {len(lines)} of '
        f"{first.get('size', len(lines))} ranks</p>",
        _cards(lines, samples),
        _over_time(samples),
        _methods(lines, plan, first.get("exposed_ms")),
        _effective_maps(first, plan, samples),
        _step(first),
        _events(lines),
        _tensors(lines, plan, samples),
        _ranks(lines),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>dad report {text(job)}</title>\n"
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _cards(lines: Sequence[Line], samples: Sequence[Line]) -> str:
    first = lines[0]
    stats = first["stats"]
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
    shown = (f'<div class="card"><b>{text(value)}</b>{text(name)}</div>' for value, name in cards)
    return f'<div class="cards">{"".join(shown)}</div>'


def _over_time(samples: Sequence[Line]) -> str:
    if len(samples) < 3:
        return ""
    pairs = list(zip(samples, samples[1:], strict=False))
    rates = [
        (b["seconds"], b["seconds"] - a["seconds"], a, b) for a, b in pairs if b["seconds"] > a["seconds"]
    ]
    speed = [(at, (b["steps"] - a["steps"]) / over) for at, over, a, b in rates]
    traffic = [(at, (b["wire_bytes_sent"] - a["wire_bytes_sent"]) / over / 1e6) for at, over, a, b in rates]
    charts = chart("steps per second", speed) + chart("MB per second sent by rank 0", traffic)
    return f'<h2>Over time</h2>\n<div class="charts">{charts}</div>'


def _methods(lines: Sequence[Line], plan: Sequence[Line], exposed_ms: float | None) -> str:
    """Predicted and measured values by method."""
    if not plan:
        return ""
    total = _sent_by_all(lines)
    groups: dict[str, list[Line]] = collections.defaultdict(list)
    for row in plan:
        groups[row["method"]].append(row)
    # Bytes that a plan does not include, such as metrics and broadcast parameters.
    named = {row["name"] for row in plan}
    most = max((sum(total.get(row["name"], 0) for row in rows) for rows in groups.values()), default=0) or 1
    rows = []
    for method, members in sorted(
        groups.items(), key=lambda item: -sum(total.get(r["name"], 0) for r in item[1])
    ):
        sent = sum(total.get(row["name"], 0) for row in members)
        rows.append(
            f"<tr><td>{text(method)}</td>"
            + number(len(members), str(len(members)))
            + number(sent, bar(sent / most) + format_bytes(sent))
            + count(_sum(members, "dense_bytes"))
            + _pair(members, "bytes")
            + _pair(members, "ms")
            + "</tr>"
        )
    others = {name: sent for name, sent in total.items() if name not in named and sent}
    if others:
        sent = sum(others.values())
        cells = "<td></td>" * 7
        rows.append(
            f"<tr><td>others</td>{number(len(others), str(len(others)))}"
            f"{number(sent, bar(sent / most) + format_bytes(sent))}{cells}</tr>"
        )
    heads = (
        "method",
        "tensors",
        "sent by all",
        "dense",
        "predicted",
        "measured",
        "",
        "ms predicted",
        "measured",
        "",
    )
    waited = (
        f" A step waited {exposed_ms:.3g} ms for gradients when the plan was measured." if exposed_ms else ""
    )
    return (
        "<h2>Methods: predicted against measured</h2>\n"
        '<p class="soft">Bytes and ms per step are those of one rank, measured after the first steps by the '
        f"plan. Tensors overlap, so their times are more than that of a step.{waited} Others are metrics, "
        "parameters and the like.</p>" + table(heads, rows)
    )


def _pair(rows: Sequence[Line], unit: str) -> str:
    """Cells: predicted, measured, and how far apart they are."""
    predicted, measured = _sum(rows, f"predicted_{unit}"), _sum(rows, f"measured_{unit}")
    show = count if unit == "bytes" else milliseconds
    off = measured / predicted if predicted and measured else None
    return show(predicted) + show(measured) + number(off, "" if off is None else f"{off:.3g}x")


def _sum(rows: Sequence[Line], column: str) -> float | None:
    values = [row[column] for row in rows if row.get(column) is not None]
    return sum(values) if values else None


def _effective_maps(first: Line, plan: Sequence[Line], samples: Sequence[Line]) -> str:
    if len(samples) < 2:
        return ""
    method_of = {str(row["name"]): str(row["method"]) for row in plan}
    order = {name: i for i, name in enumerate([*method_of, *first["stats"]["tensors"]])}
    names = sorted(
        {name for sample in samples for name in sample["effective"]}, key=lambda n: order.get(n, 0)
    )
    rows = {name: [_rounded(sample["effective"].get(name)) for sample in samples] for name in names}
    ranks = [name for name in names if _is_rank(method_of.get(name, ""), rows[name])]
    parts = [name for name in names if name not in ranks]
    maps = ""
    if ranks:
        maps += heat_map("ranks", "Effective rank", [(name, rows[name]) for name in ranks], "0")
    if parts:
        percent = [(n, [None if v is None else round(100 * v, 3) for v in rows[n]]) for n in parts]
        maps += heat_map("parts", "Part of the elements that was sent, in %", percent, "0")
    if not maps:
        return ""
    return (
        "<h2>Beyond the gradient veil</h2>\n"
        "<p class='soft'>What gradients needed over time: the rank of what was applied (rank_dad, powersgd), "
        "or the part of the elements that was sent (vgc and others). "
        "A row whose colour stays strong carries the training; one that fades has learned what it can.</p>"
        f'<div class="charts">{maps}</div>'
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _is_rank(method: str, values: Sequence[float | None]) -> bool:
    if method:
        return method in _BY_RANK
    return any(value is not None and value > 1 for value in values)


def _step(first: Line) -> str:
    step = first.get("step")
    if not step or not step["tensors"]:
        return ""
    last = collections.Counter(row[4] for row in step["tensors"] if row[4] >= 0)
    late, rank = "", -1
    if last:
        rank, times = last.most_common(1)[0]
        late = (
            f' <span class="late">Rank {rank} was last for {times} of {len(step["tensors"])} tensors.</span>'
        )
    return (
        "<h2>A step</h2>\n"
        f'<p class="soft">The slowest of a traced second on rank 0: step {step["step"]}.{late}'
        '<span class="key" style="background:var(--wait)"></span>waits until all ranks have it'
        '<span class="key" style="background:var(--sent)"></span>is on its way</p>'
        + gantt(step["tensors"], rank)
    )


def _events(lines: Sequence[Line]) -> str:
    """Plans with their reasons, warnings, and how ranks ended."""
    found = [
        (event["seconds"], line["rank"], event["kind"], event["text"])
        for line in lines
        for event in line.get("events", [])
    ]
    size = int(lines[0].get("size", len(lines)))
    there = {int(line["rank"]) for line in lines}
    for line in lines:
        if "ended_by" in line:
            found.append((None, line["rank"], "fault", f"was ended by {line['ended_by']}"))
    for rank in range(size):
        if rank not in there:
            found.append((None, rank, "fault", "wrote no line: it was killed, or has not ended"))
    if not found:
        return ""
    found.sort(key=lambda event: (event[0] is None, event[0] or 0.0, event[1]))
    rows = [
        "<tr>"
        + number(
            seconds if seconds is not None else 1e12, "at the end" if seconds is None else f"{seconds:g} s"
        )
        + number(rank, str(rank))
        + f'<td class="text{"" if kind == "plan" else " late"}">{text(kind)}</td>'
        + f'<td class="text why">{text(what)}</td></tr>'
        for seconds, rank, kind, what in found
    ]
    return "<h2>Plans and faults</h2>\n" + table(("time", "rank", "kind", "what"), rows)


def _sent_by_all(lines: Sequence[Line]) -> dict[str, int]:
    return {
        name: sum(line["stats"]["tensors"].get(name, tensor)["wire_bytes_sent"] for line in lines)
        for name, tensor in lines[0]["stats"]["tensors"].items()
    }


def _tensors(lines: Sequence[Line], plan: Sequence[Line], samples: Sequence[Line]) -> str:
    rows_of = {str(row["name"]): row for row in plan}
    first = lines[0]["stats"]["tensors"]
    total = _sent_by_all(lines)
    most = max(total.values(), default=0) or 1
    rows = []
    for name in sorted(first, key=lambda name: -total[name]):
        tensor, row = first[name], rows_of.get(name, {})
        steps = tensor["steps"] or 1
        reached = [sample["effective"][name] for sample in samples if name in sample["effective"]]
        effective = tensor.get("effective")
        worst = tensor.get("worst") or {}
        late = (
            f' <span class="late">rank {worst["last_rank"]}</span>' if worst.get("last_rank", -1) >= 0 else ""
        )
        slowest = 1e3 * worst.get("seconds", 0)
        rows.append(
            f'<tr><td>{text(name)}</td><td class="text">{text(row.get("method", ""))}</td>'
            + number(total[name], bar(total[name] / most) + format_bytes(total[name]))
            + count(tensor["wire_bytes_sent"] / steps)
            + count(row.get("predicted_bytes"))
            + number(tensor["ratio"], f"{tensor['ratio']:.3g}" if tensor["ratio"] else "")
            + number(effective, "" if effective is None else _effective(effective))
            + f"<td>{spark(reached)}</td>"
            + number(slowest, f"{slowest:.3g} ms{late}")
            + f'<td class="text why">{text(row.get("why", ""))}</td></tr>'
        )
    heads = ["tensor", "method", "sent", "per step", "predicted", "ratio", "effective", "over time"]
    heads += ["worst step", "why"]
    return (
        "<h2>Tensors</h2>\n<p class='soft'>Bytes sent by all ranks; those per step by rank 0."
        " Effective is the rank of what was applied, or the part of the elements that was"
        " sent, in the last step and over time. The worst step took longest, and the"
        " rank named there sent last.</p>\n"
        '<input id="find" placeholder="find a tensor" aria-label="find a tensor">\n'
        + table(heads, rows, "tensors")
    )


def _effective(value: float) -> str:
    return f"rank {value:.0f}" if value >= 1 else f"{100 * value:.3g} %"


def _lags(lines: Sequence[Line]) -> dict[int, Line]:
    """Among the ranks that others named as the slowest: what the rank that waited longest observed."""
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
    late: collections.Counter[int] = collections.Counter()
    for line in lines:
        for tensor in line["stats"]["tensors"].values():
            late[(tensor.get("worst") or {}).get("last_rank", -1)] += 1
    lags = _lags(lines)
    rows = [
        f"<tr><td>{line['rank']}</td>"
        + count(line["stats"]["wire_bytes_sent"])
        + count(line["stats"]["wire_bytes_received"])
        + number(line["stats"]["messages_sent"], f"{line['stats']['messages_sent']:,}")
        + number(late[line["rank"]], str(late[line["rank"]]))
        + number(*_lag(lags.get(line["rank"])))
        + f'<td class="text">{text(line.get("ended_by", "ended well"))}</td></tr>'
        for line in lines
    ]
    heads = ("rank", "sent", "received", "messages", "last in worst steps", "lag, last 100 steps", "end")
    return "<h2>Ranks</h2>\n" + table(heads, rows)
