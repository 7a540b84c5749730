"""Bytes against loss on the King James text, for every method: a CSV file and a plot, 4 ranks.

    python benchmarks/frontier.py                                 all methods, three seeds: a day on two cores
    python benchmarks/frontier.py --seeds 1 --steps 300 --batch 2 --methods none auto chunk_topk
    python benchmarks/frontier.py --local-steps 1 8 30            also with local steps
    python benchmarks/frontier.py --only-plot                     the picture, from the CSV file that there is
    python benchmarks/frontier.py --quick                         a few steps, to see that it runs

The model, its data and its optimizer are those of accuracy_text.py. Writes frontier_text.csv, a row per
training, which grows as trainings end and is taken up again by --resume, and frontier_text.svg: for each
method and number of local steps the mean over the seeds of its loss less that of dense, and the range.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from html import escape

import accuracy_text
from accuracy import RANKS, run_cells, summary
from lab import HERE
from report import Result, Row, Settings, main

METHODS = [
    "none",
    "auto",
    "int8",
    "qsgd",
    "rank_dad:rank=4",
    "rank_dad:rank=8",
    "rank_dad:rank=16",
    "powersgd",
    "powersgd:16",
    "vgc",
    "topk:ratio=0.01",
    "topk:ratio=0.001",
    "chunk_topk:k=256",
    "chunk_topk:k=64",
    "chunk_topk:k=64,decay=0.95",
    "chunk_topk:k=16",
    "chunk_topk:k=4",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    accuracy_text.add_options(parser)
    results = HERE / "results" / "frontier_text.csv"
    parser.set_defaults(methods=METHODS, csv=results)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[1], metavar="H")
    parser.add_argument("--only-plot", action="store_true", help="of the cells that the CSV file has")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    options.resume = options.resume or options.only_plot
    if settings.quick:  # what results/ has comes from whole runs
        options.csv = HERE.parent / "build" / options.csv.name
    result = Result(
        f"King James Bible, {RANKS} ranks: nats per byte of held-out text, MB sent by a rank\n(from, to: "
        "least and largest difference to dense of a seed)"
    )
    cells = [
        accuracy_text.cell(settings, options, method, seed) | {"local_steps": local_steps}
        for seed in (options.seeds[:1] if settings.quick else options.seeds)
        for local_steps in options.local_steps
        for method in options.methods
    ]
    rows = run_cells("accuracy_text", cells, options, result, 6 * 3600, only_known=options.only_plot)
    named = [row | {"method": name_of(row)} for row in rows]
    result.rows = summary(named, "nats")
    options.csv.with_suffix(".svg").write_text(plot(points_of(named)))
    return result


def name_of(row: Row) -> str:
    local_steps = int(row.get("local_steps", 1))
    return row["method"] if local_steps == 1 else f"{row['method']}, {local_steps} local steps"


def points_of(rows: list[Row]) -> list[tuple[str, float, list[float]]]:
    """(method, how many times fewer bytes than dense, loss less that of dense for each seed)"""
    dense = {row["seed"]: row["score"] for row in rows if row["method"] == "none"}
    points = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["seed"] in dense]
        if mine and method != "none":
            ratio = statistics.mean(row["dense_bytes"] / row["bytes_sent"] for row in mine)
            points.append((method, ratio, [row["score"] - dense[row["seed"]] for row in mine]))
    return sorted(points, key=lambda point: point[1])


# The plot

_WIDTH, _HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 230, 20, 50


def plot(points: list[tuple[str, float, list[float]]]) -> str:
    """SVG: bytes on a logarithmic scale to the right, loss upwards."""
    losses = [loss for _, _, each in points for loss in each] + [0.0, 0.02]
    low, high = min(losses), max(losses)
    last = max(1, math.ceil(math.log10(max((ratio for _, ratio, _ in points), default=10))))

    def x(ratio: float) -> float:
        return _LEFT + math.log10(max(ratio, 1.0)) / last * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for power in range(last + 1):
        at = x(10**power)
        lines.append(f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        lines.append(_text(at, _HEIGHT - _BOTTOM + 18, f"{10**power:,}x", "middle"))
    step = _round_step((high - low) / 6)
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        at = y(i * step)
        lines.append(
            f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="{"#888" if i == 0 else "#ddd"}"/>'
        )
        lines.append(_text(_LEFT - 6, at + 4, f"{i * step:+.3g}", "end"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(_text(middle, _HEIGHT - 12, "fewer bytes than dense", "middle"))
    lines.append(_text(_LEFT - 60, _TOP - 6, "nats per byte more than dense"))
    for i, (method, ratio, each) in enumerate(points):
        colour = f"hsl({i * 137 % 360} 70% 42%)"
        at, mean = x(ratio), y(statistics.mean(each))
        if len(each) > 1:
            span = f"M{at:.1f} {y(min(each)):.1f}V{y(max(each)):.1f}"
            lines.append(f'<path d="{span}" stroke="{colour}"/>')
        lines.append(f'<circle cx="{at:.1f}" cy="{mean:.1f}" r="4" fill="{colour}"/>')
        lines.append(_text(at + 7, mean - 5, method, colour=colour))
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _round_step(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
