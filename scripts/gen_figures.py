"""Writes the tables of README.md and docs/choosing.md, and the picture, from what benchmarks have measured.

python benchmarks/methods.py --json benchmarks/results/methods.json    measures again
python scripts/gen_figures.py                                          writes them
python scripts/gen_figures.py --check                                  fails if they are not current
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "methods.json"
README = ROOT / "README.md"
CHOOSING = ROOT / "docs" / "choosing.md"
PICTURE = ROOT / "docs" / "img" / "faster_than_ddp.svg"
BEGIN, END = "<!-- from benchmarks/results -->\n", "<!-- end -->\n"

LINKS = {
    "100mbit": "100 Mbit",
    "100mbit-10ms": "100 Mbit, 10 ms each way",
    "100mbit-25ms": "100 Mbit, 25 ms each way",
    "1gbit": "1 Gbit",
    "unshaped": "unlimited",
}
MODELS = {
    "mlp": "MLP, 1.9 M parameters",
    "bigfc": "wide MLP, 20 M",
    "cnn": "CNN, 1.7 M",
    "transformer": "transformer, 3.3 M",
}


def split(row):
    """A row's model and link: bigfc-rank_dad-100mbit-10ms."""
    model, _, link = row["row"].split("-", 2)
    return model, link


def short(value):
    """Two digits."""
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def table(rows):
    lines = [
        "| line | model | method | faster than DDP | PowerSGD | MB sent per step | DDP's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        model, link = split(row)
        lines.append(
            f"| {LINKS[link]} | {model} | `{row['method'].partition(':')[0]}` "
            f"| **{short(1 / row['time / DDP'])} times** | {short(1 / row['PowerSGD / DDP'])} times "
            f"| {short(row['dad MB'])} | {short(row['DDP MB'])} |"
        )
    return "\n".join(lines) + "\n"


def relative_table(rows):
    """Times over DDP's, a line for each model and link."""
    cells = {}
    for row in rows:
        place = cells.setdefault(split(row), {})
        place[row["method"].partition(":")[0]] = short(row["time / DDP"])
        place["powersgd"] = short(row["PowerSGD / DDP"])
    lines = ["| model | line | `exact` | `rank_dad` | PowerSGD hook of torch |", "|---|---|---|---|---|"]
    for (model, link), place in sorted(cells.items(), key=lambda cell: list(MODELS).index(cell[0][0])):
        values = " | ".join(place.get(method, "") for method in ("exact", "rank_dad", "powersgd"))
        lines.append(f"| {MODELS[model]} | {LINKS[link]} | {values} |")
    return "\n".join(lines) + "\n"


def between_marks(page, text):
    before, rest = page.read_text().split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


# Readable on a white page and on a dark one.
STYLE = """
  text { font: 13px sans-serif; fill: #1f2328 }
  .small { font-size: 12px; fill: #59636e }
  .title { font-weight: bold; font-size: 15px }
  .rank_dad { fill: #1a7f5a } .exact { fill: #4c8bf5 } .powersgd { fill: #b0b7c0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .powersgd { fill: #6e7681 }
  }"""
LABELS = {"rank_dad": "dad, rank_dad", "exact": "dad, exact", "powersgd": "PowerSGD, rank 4"}


def picture(rows):
    """Bars: how many times faster than DDP a step is at 100 Mbit."""
    bars = {}
    for row in rows:
        model, link = split(row)
        if link == "100mbit":
            group = bars.setdefault(model, {})
            group[row["method"].partition(":")[0]] = 1 / row["time / DDP"]
            group["powersgd"] = 1 / row["PowerSGD / DDP"]
    scale = 400 / max(value for group in bars.values() for value in group.values())
    top, parts = 58, []
    for model, group in bars.items():
        parts.append(f'<text x="10" y="{top + 16}">{MODELS[model]}</text>')
        for method in LABELS:
            if method not in group:
                continue
            width = group[method] * scale
            parts.append(f'<rect class="{method}" x="190" y="{top + 3}" width="{width:.1f}" height="16"/>')
            parts.append(
                f'<text x="{196 + width:.1f}" y="{top + 16}">{short(group[method])}'
                f'<tspan class="small" dx="5">{LABELS[method]}</tspan></text>'
            )
            top += 22
        top += 12
    title = "Training steps at 100 Mbit: how many times faster than PyTorch DDP"
    note = "4 ranks, one thread each, on a machine with 2 cores; benchmarks/methods.py"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top + 6}" role="img" '
        f'aria-label="{title}">\n<style>{STYLE}\n</style>\n'
        f'<text class="title" x="10" y="22">{title}</text>\n<text class="small" x="10" y="42">{note}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main():
    rows = json.loads(RESULTS.read_text())["rows"]
    pages = {
        README: between_marks(README, table(rows)),
        CHOOSING: between_marks(CHOOSING, relative_table(rows)),
        PICTURE: picture(rows),
    }
    for path, text in pages.items():
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                sys.exit(f"{path.relative_to(ROOT)} is not current: run scripts/gen_figures.py")
        else:
            path.write_text(text)


if __name__ == "__main__":
    main()
