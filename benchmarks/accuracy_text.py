"""Loss of a byte-level transformer on held-out text and the bytes it took, 4 ranks on this machine.

Claim: after 2,000 steps `auto` is within 0.05 nats of dense at 30 times fewer bytes, and no worse than
torch's PowerSGD of rank 4 at a quarter of its bytes.

    python benchmarks/accuracy_text.py --seeds 1             hours on two cores: a step takes about a second
    python benchmarks/accuracy_text.py --methods none rank_dad:rank=8 --steps 500 --batch 4
    python benchmarks/accuracy_text.py --quick               a few steps, to see that it runs

The transformer of models.py (4 layers, 256 wide, 128 bytes of context, 3.3 M parameters) reads the King
James Bible; the last twentieth is held out. AdamW. For a seed all methods start from the same weights and
see the same text in the same order.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import RANKS, mean_over_ranks, run_cells, summary, train
from accuracy import add_options as add_common_options
from models import CONTEXT, SEQUENCES, Transformer
from report import Result, Settings, main
from torch import nn

import dad.torch as hvd

METHODS = ["none", "auto", "rank_dad:rank=16", "powersgd"]
HELD_OUT = 0.05
TEST_SEQUENCES = 128  # per rank
QUICK_STEPS = 12  # more than auto's warm-up


def sequences(text: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[places[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def nats(model: nn.Module, text: torch.Tensor, count: int) -> float:
    """Mean loss per byte over windows that are spread evenly over the text, and over the ranks."""
    places = torch.linspace(0, len(text) - CONTEXT - 1, count * hvd.size()).long()[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(inputs), targets).item()
            for inputs, targets in (sequences(text, chunk) for chunk in places.split(8))
        ]
    return mean_over_ranks(sum(losses) / len(losses))


def work(parameters: dict[str, Any]) -> dict[str, Any]:
    from datasets import king_james_text

    text = king_james_text()
    end = int(len(text) * (1 - HELD_OUT))
    order = torch.Generator().manual_seed(1000 * parameters["seed"] + hvd.rank())

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        places = torch.randint(end - CONTEXT - 1, (parameters["batch"],), generator=order)
        inputs, targets = sequences(text, places)
        return F.cross_entropy(model(inputs), targets)

    def adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=parameters["lr"], weight_decay=0.01)

    use_local_steps(parameters.get("local_steps", 1))
    torch.manual_seed(parameters["seed"])
    model = Transformer()
    done = train(parameters["method"], model, adamw, loss_of, parameters["num_steps"], report_every=100)
    return done.as_dict(nats(model, text[end:], parameters["test_sequences"]))


def use_local_steps(count: int) -> None:
    """As dadrun --local-steps sets it for an unchanged script."""
    if count == 1:
        return
    if "local_steps" not in inspect.signature(hvd.DistributedOptimizer).parameters:
        raise RuntimeError("this version of dad has no local steps")
    os.environ["DAD_LOCAL_STEPS"] = str(count)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser, "accuracy_text", METHODS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=SEQUENCES, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")


def cell(settings: Settings, options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """A training, for work()."""
    return {
        "model": "transformer",
        "method": method,
        "seed": seed,
        "num_steps": QUICK_STEPS if settings.quick else options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "test_sequences": 8 if settings.quick else TEST_SEQUENCES,
    }


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    steps = QUICK_STEPS if settings.quick else options.steps
    result = Result(
        f"King James Bible, {RANKS} ranks, {steps} steps of {options.batch} sequences each: nats per byte of "
        "held-out text, MB sent by a rank\n(from, to: least and largest difference to dense of a seed)"
    )
    cells = [
        cell(settings, options, method, seed)
        for seed in (options.seeds[:1] if settings.quick else options.seeds)
        for method in options.methods
    ]
    rows = run_cells("accuracy_text", cells, options, result, timeout=6 * 3600)
    result.rows = summary(rows, "nats")
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
