"""Test accuracy on Fashion-MNIST and the bytes it took, 4 ranks on this machine, equal steps.

Claim: after 3 epochs rank_dad with rank 4 and int4 is within 0.5 point of dense on the MLP and on the CNN
at 100 times fewer bytes, and no worse than torch's PowerSGD of rank 4 at a quarter of its bytes.

    python benchmarks/accuracy_fashion.py                    both models, three seeds: an hour or more
    python benchmarks/accuracy_fashion.py --model mlp --seeds 1 --methods none auto
    python benchmarks/accuracy_fashion.py --quick            a few steps, to see that it runs

Batches of 32 images per rank, SGD with momentum. For a seed all methods start from the same weights and
see the same images in the same order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import RANKS, mean_over_ranks, run_cells, summary, train
from accuracy import add_options as add_common_options
from models import IMAGES, MODELS
from report import Result, Settings, main
from torch import nn
from trainers import Trainer

import dad.torch as hvd

METHODS = ["none", "rank_dad:rank=4", "auto", "powersgd"]
# Highest learning rates for 128 images per step.
LEARNING_RATES = {"mlp": 0.05, "cnn": 0.03}
QUICK_STEPS = 20


def load(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    from datasets import fashion_mnist

    images, labels = fashion_mnist(part, hvd.rank(), hvd.size())
    return images.flatten(1), labels


def percent_right(model: nn.Module) -> float:
    images, labels = load("t10k")
    with torch.no_grad():
        found = torch.cat([model(chunk).argmax(dim=1) for chunk in images.split(250)])
    return 100 * mean_over_ranks((found == labels).double().mean().item())


def work(
    parameters: dict[str, Any], on_epoch: Callable[[int, Trainer], None] | None = None
) -> dict[str, Any]:
    images, labels = load("train")
    steps_per_epoch = len(images) // IMAGES
    steps = parameters["at_most"] or parameters["epochs"] * steps_per_epoch
    order = torch.Generator().manual_seed(1000 * parameters["seed"] + hvd.rank())
    batches: list[torch.Tensor] = []

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        if step % steps_per_epoch == 0:
            batches[:] = torch.randperm(len(images), generator=order).split(IMAGES)
        batch = batches[step % steps_per_epoch]
        return F.cross_entropy(model(images[batch]), labels[batch])

    def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=parameters["lr"], momentum=0.9, nesterov=True)

    torch.manual_seed(parameters["seed"])
    model = MODELS[parameters["model"]]()
    done = train(parameters["method"], model, sgd, loss_of, steps, steps_per_epoch, on_epoch)
    return done.as_dict(percent_right(model))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser, "accuracy_fashion", METHODS)
    parser.add_argument("--model", nargs="+", choices=list(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, help=f"highest learning rate; default: {LEARNING_RATES}")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    result = Result(
        f"Fashion-MNIST, {RANKS} ranks, {options.epochs} epochs: test accuracy in percent, differences in "
        "points, MB sent by a rank\n(from, to: least and largest difference to dense of a seed)"
    )
    cells = [
        {
            "model": model,
            "method": method,
            "seed": seed,
            "epochs": options.epochs,
            "lr": options.lr or LEARNING_RATES[model],
            "at_most": QUICK_STEPS if settings.quick else 0,
        }
        for model in options.model
        for seed in (options.seeds[:1] if settings.quick else options.seeds)
        for method in options.methods
    ]
    rows = run_cells("accuracy_fashion", cells, options, result, timeout=7200)
    result.rows = summary(rows, "accuracy")
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
