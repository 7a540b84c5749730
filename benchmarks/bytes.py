"""Bytes that one rank sends in a step, by method and model, 4 ranks; and whether dad.stats() tells the truth.

Claim: a step of the mlp sends at most 2.0 MB with dad, 1.2 MB with edad and 0.020 MB with rank_dad of rank 4
(dense: 11.2 MB); what the interface has sent, with all headers and acknowledgements, is at most 8% more than
dad.stats() says, over 10 MB.

    python benchmarks/bytes.py [--quick] [--json FILE]
    python benchmarks/bytes.py --model mlp --methods dad rank_dad:rank=8
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contest import in_a_lab, interface_sent, say
from lab import UNSHAPED, LaunchError, Link, launch, why_not
from models import MODELS, batch
from report import Result, Row, Settings, main, progress
from trainers import Trainer, make_trainer

import dad.torch as hvd

LINK = Link("1gbit")
METHODS = ["none", "fp16", "int8", "dad", "edad", "rank_dad:rank=4", "auto", "ddp", "powersgd"]
QUICK_METHODS = ["none", "dad", "edad", "rank_dad:rank=4"]
AT_MOST_MB = {("mlp", "dad"): 2.0, ("mlp", "edad"): 1.2, ("mlp", "rank_dad:rank=4"): 0.020}
# auto begins with five dense steps, makes its plan in the sixth, and learns the schedule after that.
WARM_UP = 9
STEPS = 3
COUNTED_BYTES = 10_000_000
COUNTED_MODEL = "mlp"


def work(parameters: dict[str, Any]) -> list[Row]:
    model = parameters["model"]
    data = batch(model)
    rows = []
    for method in parameters["methods"]:
        say(f"{model}, {method}")
        rows.append(measure(model, method, data, parameters["least_bytes"]))
    return rows


def measure(name: str, method: str, data: tuple[torch.Tensor, ...], least_bytes: float) -> Row:
    torch.manual_seed(1)
    model = MODELS[name]()
    trainer = make_trainer(
        method, model, lambda params: torch.optim.SGD(params, lr=0.01), prefix=f"{name}.{method}."
    )
    run_steps(trainer, data, WARM_UP)
    sent, _ = run_steps(trainer, data, 1)
    # One step is counted with a barrier, so it looks a little larger than it is.
    steps = max(STEPS, math.ceil(1.1 * least_bytes / sent))
    sent, through_interface = run_steps(trainer, data, steps)
    elements = sum(param.numel() for param in model.parameters())
    dense = 2 * (hvd.size() - 1) / hvd.size() * 4 * elements
    return {
        "model": name,
        "method": method,
        "MB per step": sent / steps / 1e6,
        "at most": AT_MOST_MB.get((name, method)),
        "ratio": dense * steps / sent,
        "over MB": sent / 1e6,
        "interface, % more": 100 * (through_interface / sent - 1) if trainer.is_dad and in_a_lab() else None,
    }


def run_steps(trainer: Trainer, data: tuple[torch.Tensor, ...], steps: int) -> tuple[float, float]:
    """Bytes that a rank has sent meanwhile: as dad or TCP counts them, and through the interface."""
    inputs, targets = data
    before = counters(trainer)
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(inputs), targets).backward()
        trainer.optimizer.step()
    grown = torch.tensor(counters(trainer), dtype=torch.float64) - torch.tensor(before)
    dist.all_reduce(grown)
    sent, through_interface = (grown / dist.get_world_size()).tolist()
    return sent, through_interface


def counters(trainer: Trainer) -> tuple[float, float]:
    """Read while nothing is on its way. dad's own barrier is in both counts, gloo's would be in one."""
    barrier = hvd.barrier if trainer.is_dad else dist.barrier
    barrier()
    values = float(trainer.bytes_sent()), float(interface_sent())
    barrier()
    return values


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=" ".join(METHODS))


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    result = Result(
        "MB sent per step and rank, 4 ranks (ratio: to a dense allreduce; over MB: sent while counting;\n"
        "ddp and powersgd, as torch has them, by TCP's count)"
    )
    reason = why_not(LINK)
    if reason:
        result.left_out.append(f"the interface's count: {reason}")
    link = UNSHAPED if reason else LINK
    for model in options.model or ([COUNTED_MODEL] if settings.quick else list(MODELS)):
        progress(f"bytes: {model}, 4 ranks, link {link}")
        counted = model == COUNTED_MODEL and not settings.quick
        parameters = {
            "model": model,
            "methods": options.methods or (QUICK_METHODS if settings.quick else METHODS),
            "least_bytes": COUNTED_BYTES if counted else 0,
        }
        try:
            result.rows += launch("bytes", parameters, link=link, timeout=1800)[0]
        except LaunchError as error:
            result.failed.append(f"{model}: {error}")
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
