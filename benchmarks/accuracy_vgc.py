"""VGC on Fashion-MNIST: test accuracy, bytes, and the fraction of elements sent as training goes on; 4 ranks.

Claim: somewhere on the table 100 times fewer bytes than dense at 0.5 point below it.

    python benchmarks/accuracy_vgc.py                        MLP and a small CNN, 20 epochs: two hours
    python benchmarks/accuracy_vgc.py --model mlp --epochs 5 --methods none vgc:alpha=2
    python benchmarks/accuracy_vgc.py --plot                 the picture, from the CSV files that there are
    python benchmarks/accuracy_vgc.py --quick                a few steps, to see that it runs

Batches of 32 images per rank, SGD with momentum; for a seed all methods see the same images in the same
order.
Writes build/accuracy_vgc.csv (a row per training), build/accuracy_vgc_epochs.csv (a row per epoch) and
build/accuracy_vgc.svg (if matplotlib is there).
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import accuracy_fashion
from accuracy import RANKS, mean_over_ranks, run_cells, summary
from accuracy import add_options as add_common_options
from report import Result, Row, Settings, main, progress
from trainers import Trainer

import dad.torch as hvd

METHODS = ["none", "vgc:alpha=1.0", "vgc:alpha=2.0", "vgc:alpha=1.5", "vgc:alpha=4.0"]
LEARNING_RATES = {"mlp": 0.05, "small_cnn": 0.05}
QUICK_STEPS = 20
_EPOCHS = "accuracy_vgc_epochs.csv"


def work(parameters: dict[str, Any]) -> dict[str, Any]:
    """On every rank; rank 0 writes down what each epoch took."""
    before = {"bytes": hvd.stats()["wire_bytes_sent"], "step": 0}
    rows: list[Row] = []

    def on_epoch(step: int, trainer: Trainer) -> None:
        sent = mean_over_ranks(trainer.bytes_sent() - before["bytes"])
        elements = sum(param.numel() for param in trainer.model.parameters())
        dense = 2 * (hvd.size() - 1) / hvd.size() * 4 * elements * (step - before["step"])
        rows.append(
            {
                "model": parameters["model"],
                "method": parameters["method"],
                "seed": parameters["seed"],
                "epoch": len(rows) + 1,
                "fraction sent": fraction_sent(trainer),
                "ratio": dense / sent,
            }
        )
        before.update(bytes=trainer.bytes_sent(), step=step)

    result = accuracy_fashion.work(parameters, on_epoch)
    if hvd.rank() == 0:
        append(Path(parameters["folder"]) / _EPOCHS, rows)
    return result


def fraction_sent(trainer: Trainer) -> float:
    """Of all elements, in the last step."""
    by_name = hvd.stats()["tensors"]
    sent = total = 0.0
    for name, param in trainer.model.named_parameters():
        total += param.numel()
        effective = by_name.get(name, {}).get("effective", -1.0)
        # A bias rides with its weight, and has the weight's fraction.
        weight = by_name.get(name.replace("bias", "weight"), {}).get("effective", -1.0)
        found = effective if effective >= 0 else weight
        sent += param.numel() * (found if found >= 0 else 1.0)
    return sent / total


def append(path: Path, rows: list[Row]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def plot(folder: Path, rows: list[Row]) -> str:
    """Writes the picture; what to say about it."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install matplotlib, then run with --plot"
    matplotlib.use("svg")
    from matplotlib import pyplot

    with (folder / _EPOCHS).open(newline="") as file:
        epochs = list(csv.DictReader(file))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(2, len(models), figsize=(5 * len(models), 7), squeeze=False)
    for column, model in enumerate(models):
        for method in dict.fromkeys(row["method"] for row in rows if row["model"] == model):
            if method == "none":
                continue
            mine = [row for row in epochs if (row["model"], row["method"]) == (model, method)]
            x = [int(row["epoch"]) for row in mine]
            axes[0][column].plot(x, [float(row["fraction sent"]) for row in mine], label=method)
            axes[1][column].plot(x, [float(row["ratio"]) for row in mine], label=method)
        axes[0][column].set(title=model, ylabel="fraction of elements sent", yscale="log")
        axes[1][column].set(xlabel="epoch", ylabel="times fewer bytes than dense", yscale="log")
        axes[0][column].legend()
    figure.tight_layout()
    path = folder / "accuracy_vgc.svg"
    figure.savefig(path)
    return f"picture: {path.name}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser, "accuracy_vgc", METHODS)
    parser.set_defaults(seeds=[1])
    parser.add_argument("--model", nargs="+", choices=list(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, help=f"highest learning rate; default: {LEARNING_RATES}")
    parser.add_argument("--plot", action="store_true", help="only the picture and the table of what is there")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    result = Result(
        f"VGC on Fashion-MNIST, {RANKS} ranks, {options.epochs} epochs: test accuracy in percent, "
        "differences in points, MB sent by a rank"
    )
    folder = options.csv.parent
    options.resume = options.resume or options.plot
    folder.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        (folder / _EPOCHS).unlink(missing_ok=True)
    cells = [
        {
            "model": model,
            "method": method,
            "seed": seed,
            "epochs": options.epochs,
            "lr": options.lr or LEARNING_RATES[model],
            "at_most": QUICK_STEPS if settings.quick else 0,
            "folder": str(folder.resolve()),
        }
        for model in options.model
        for seed in options.seeds
        for method in options.methods
    ]
    if options.plot and not options.csv.exists():
        result.left_out.append("nothing has been measured yet: run without --plot")
        return result
    rows = run_cells("accuracy_vgc", cells, options, result, timeout=7200, only_known=options.plot)
    result.rows = summary(rows, "accuracy")
    if rows:
        progress(plot(folder, rows))
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
