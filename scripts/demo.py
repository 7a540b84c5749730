"""The demo (`make demo`): four processes train on a slow line, and a picture of what that took.

    python scripts/demo.py                            100 Mbit with 10 ms each way
    python scripts/demo.py --rate 1gbit --delay 25    another line
    python scripts/demo.py --rate none --delay 0      loopback

The slow line needs root: hosts are network namespaces (tools/netlab). Without root the demo runs
over loopback. The training is examples/fashion_mnist.py; the results go to build/demo.
"""

import argparse
import html
import io
import json
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from lab import UNSHAPED, LaunchError, Link, run_ranks, why_not  # noqa: E402

OUT = ROOT / "build" / "demo"
MARKS = "oxv*+#"


def text_plot(histories, column, label, width=64, height=14):
    """Accuracy over seconds or MB, on a scale of powers, in letters for a terminal."""
    points = [(p[column], p["accuracy"]) for history in histories.values() for p in history]
    first, last = (math.log(f(x for x, _ in points)) for f in (min, max))
    low, high = min(y for _, y in points), max(y for _, y in points)
    rows = [[" "] * width for _ in range(height)]
    for mark, history in zip(MARKS, histories.values(), strict=False):
        for point in history:
            x = (math.log(point[column]) - first) / max(last - first, 1e-9)
            y = (point["accuracy"] - low) / max(high - low, 1e-9)
            rows[height - 1 - round(y * (height - 1))][round(x * (width - 1))] = mark
    lines = [f"test accuracy over {label}"]
    for number, row in enumerate(rows):
        side = {0: f"{high:6.1%}", height - 1: f"{low:6.1%}"}.get(number, " " * 6)
        lines.append(f"{side} |{''.join(row)}".rstrip())
    left, right = (f"{math.exp(end):.3g} {'s' if column == 'seconds' else column}" for end in (first, last))
    lines.append(" " * 7 + "+" + "-" * width)
    lines.append(" " * 8 + left + right.rjust(width - len(left)))
    lines.append("  ".join(f"{mark} {name}" for mark, name in zip(MARKS, histories, strict=False)))
    return "\n".join(lines)


def figure(histories, title):
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    drawing = Figure(figsize=(10, 4.2), layout="constrained")
    over_time, over_bytes = drawing.subplots(1, 2, sharey=True)
    for name, history in histories.items():
        accuracy = [100 * point["accuracy"] for point in history]
        over_time.plot([point["seconds"] for point in history], accuracy, marker="o", label=name)
        over_bytes.plot([point["MB"] for point in history], accuracy, marker="o", label=name)
    for axes, label in ((over_time, "seconds"), (over_bytes, "MB sent per process")):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    over_time.set_ylabel("test accuracy, %")
    over_time.legend()
    drawing.suptitle(title)
    return drawing


def table(histories):
    first = next(iter(histories.values()))[-1]
    rows = []
    for name, history in histories.items():
        end = history[-1]
        rows.append(
            (
                name,
                f"{end['accuracy']:.2%}",
                f"{end['MB']:.2f}",
                f"{first['MB'] / end['MB']:.0f} times" if end is not first else "",
                f"{end['seconds']:.1f}",
                f"{first['seconds'] / end['seconds']:.1f} times" if end is not first else "",
            )
        )
    return ("method", "test accuracy", "MB sent", "fewer bytes", "seconds", "faster"), rows


def write_page(drawing, histories, title):
    head, rows = table(histories)
    svg = io.StringIO()
    drawing.savefig(svg, format="svg")
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    (OUT / "demo.html").write_text(
        f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        "<style>:root {color-scheme: light dark} svg {background: white}"
        " body {font-family: sans-serif; margin: 2em auto; max-width: 60em}"
        " td, th {padding: .3em 1em; text-align: right} svg {max-width: 100%; height: auto}</style>\n"
        f"<h1>{title}</h1>\n<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>\n{cells}</table>\n"
        + svg.getvalue()[svg.getvalue().index("<svg") :]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", default="100mbit", help="of each host's line, or none (default: %(default)s)"
    )
    parser.add_argument(
        "--delay", type=float, default=10, metavar="MS", help="one way, in ms (default: %(default)s)"
    )
    parser.add_argument("--compression", nargs="+", default=["none", "exact", "vgc", "auto"])
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()

    link = Link(args.rate, args.delay)
    if reason := why_not(link):
        print(f"demo: a line of {link} {reason}; going on over loopback, where compression hardly pays")
        link = UNSHAPED
    where = f"{args.rate}, {args.delay:g} ms each way" if link.is_shaped else "loopback"
    print(f"demo: four processes, {where}; about three minutes", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    history = OUT / "history.json"
    command = [sys.executable, str(ROOT / "examples/fashion_mnist.py"), "--history", str(history)]
    command += ["--epochs", str(args.epochs), "--compression", *args.compression]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(command, Path(folder), 4, link, 1800 * args.epochs, sys.stdout)
    except LaunchError as error:
        sys.exit(f"demo: {error}")

    histories = json.loads(history.read_text())
    print(f"\n{text_plot(histories, 'seconds', 'time')}\n")
    print(f"{text_plot(histories, 'MB', 'MB sent per process')}\n")
    drawing = figure(histories, f"Fashion-MNIST on four processes: {where}")
    drawing.savefig(OUT / "demo.png", dpi=120)
    write_page(drawing, histories, f"dad: four processes, {where}")
    print(f"\nthe picture: {OUT.relative_to(ROOT)}/demo.png and demo.html")
    print("next, what your own script would save on your own line (docs/observe.md):")
    print("    .venv/bin/dad plan --size 8 --link 100mbit,25ms examples/torch_mlp.py")


if __name__ == "__main__":
    main()
