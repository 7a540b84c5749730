"""Step time with the methods of dad, against DDP, PowerSGD and no communication, 4 ranks, SGD.

Claim: the column `at most`, of DDP's step time or of `local`, which is the same step without
communication in the same processes and under the same load.

    python benchmarks/methods.py [--quick] [--json FILE]
    python benchmarks/methods.py --row mlp-exact-100mbit --row bigfc-rank_dad-unshaped
    python benchmarks/methods.py --row transformer-rank_dad-100mbit --method rank_dad:rank=16
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from contest import Step, Timing, say, take_turns
from lab import HERE, UNSHAPED, LaunchError, Link, launch, why_not
from models import IMAGES, MODELS, batch
from report import Result, Row, Settings, main, progress
from trainers import make_trainer

import dad.torch as hvd

Batch = tuple[torch.Tensor, torch.Tensor]
# The data is read as the examples do it.
sys.path.insert(0, str(HERE.parent / "examples"))

LEARNING_RATE = 0.01
# dad plans in its first step and learns the schedule in the next two; PowerSGD begins dense.
WARM_UP = 4
# VGC sends much while all it knows is a few batches, so a training's first steps are not timed.
FIRST_STEPS = 50


@dataclass(frozen=True)
class Claim:
    link: Link
    model: str
    method: str
    at_most: float
    of: str = "ddp"
    # Images of Fashion-MNIST, others in every step, instead of one random batch: what VGC sends depends on
    # what it has seen.
    images: bool = False

    @property
    def name(self) -> str:
        link = str(self.link).replace(" ", "-") if self.link.is_shaped else "unshaped"
        return f"{self.model}-{self.method.partition(':')[0]}-{link}"


_100MBIT = Link("100mbit")
CLAIMS = (
    Claim(_100MBIT, "mlp", "exact", 0.16),
    Claim(_100MBIT, "bigfc", "exact", 0.08),
    Claim(Link("1gbit"), "bigfc", "exact", 0.40),
    Claim(_100MBIT, "mlp", "rank_dad:rank=4", 0.08),
    Claim(_100MBIT, "bigfc", "rank_dad:rank=4", 1.5, "local"),
    Claim(_100MBIT, "cnn", "rank_dad", 1.15, "local"),
    Claim(_100MBIT, "transformer", "rank_dad", 1.15, "local"),
    Claim(Link("100mbit", 10), "mlp", "rank_dad:rank=4", 0.12),
    Claim(Link("100mbit", 25), "mlp", "rank_dad:rank=4", 0.20),
    Claim(Link("100mbit", 25), "transformer", "rank_dad", 0.30),
    Claim(Link("100mbit", 25), "mlp", "exact", 0.25),
    Claim(UNSHAPED, "bigfc", "rank_dad:rank=4", 1.05),
    Claim(_100MBIT, "mlp", "vgc", 0.12, images=True),
    Claim(_100MBIT, "bigfc", "vgc", 0.12, images=True),
    Claim(_100MBIT, "cnn", "vgc", 0.50, images=True),
)
QUICK = ("mlp-exact-100mbit", "mlp-rank_dad-100mbit", "mlp-rank_dad-100mbit-10ms")
PEERS = ("ddp", "powersgd", "local")


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def sgd_with_momentum(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """As the accuracy benchmarks train on images."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def step_of(way: str, model: str, batches: list[Batch]) -> Step:
    """A step of a replica that starts with the same weights on every rank."""
    torch.manual_seed(1)
    make_optimizer = sgd if len(batches) == 1 else sgd_with_momentum
    trainer = make_trainer(way, MODELS[model](), make_optimizer, prefix=f"{model}.{way}.")
    turn = itertools.cycle(batches)

    def step() -> None:
        inputs, targets = next(turn)
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(inputs), targets).backward()
        trainer.optimizer.step()

    return step


def work(parameters: dict[str, Any]) -> list[Row]:
    """A row for each method; all take turns with the same peers."""
    model, methods, seconds = parameters["model"], parameters["methods"], parameters["seconds"]
    say(f"{model}: {', '.join(methods)}; about {seconds:g} s or a few steps")
    batches = image_batches() if parameters["images"] else [batch(model)]
    steps = {way: step_of(way, model, batches) for way in [*methods, *parameters["peers"]]}
    if parameters["images"]:
        for method in methods:
            for _ in range(FIRST_STEPS):
                steps[method]()
    timings = take_turns(steps, seconds, warm_up=WARM_UP, even_time=True)
    return [row_of(method, timings) for method in methods]


def image_batches() -> list[Batch]:
    from datasets import fashion_mnist

    images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
    return list(zip(images.flatten(1).split(IMAGES), labels.split(IMAGES), strict=True))


def row_of(method: str, timings: dict[str, Timing]) -> Row:
    dad, ddp, local = timings[method], timings["ddp"], timings["local"]
    powersgd = timings.get("powersgd")
    return {
        "method": method,
        "time / DDP": dad.ms / ddp.ms,
        "time / local": dad.ms / local.ms,
        "PowerSGD / DDP": powersgd.ms / ddp.ms if powersgd else None,
        "PowerSGD / local": powersgd.ms / local.ms if powersgd else None,
        "dad ms": dad.ms,
        "DDP ms": ddp.ms,
        "local ms": local.ms,
        "dad MB": dad.dad_sent / 1e6,
        "DDP MB": megabytes(ddp),
        "PowerSGD MB": megabytes(powersgd) if powersgd else None,
        "negotiations": dad.negotiations,
        "blocks x steps": f"{dad.blocks} x {dad.steps}",
    }


def megabytes(peer: Timing) -> float:
    """Through the interface; where there is none of its own, over TCP."""
    return (peer.bytes if peer.interface_sent is None else peer.interface_sent) / 1e6


def judge(claim: Claim, row: Row) -> Row:
    """The row, with what was claimed in front of what was measured."""
    reached = row["time / DDP"] if claim.of == "ddp" else row["time / local"]
    of = "DDP" if claim.of == "ddp" else "local"
    verdict = {"at most": f"{claim.at_most:g} x {of}", "holds": "yes" if reached <= claim.at_most else "no"}
    first = {key: row[key] for key in ("method", "time / DDP", "time / local")}
    return {"row": claim.name} | first | verdict | {k: v for k, v in row.items() if k not in first}


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [claim.name for claim in CLAIMS]
    parser.add_argument(
        "--row", action="append", choices=names, metavar="NAME", help=f"that one: {', '.join(names)}"
    )
    parser.add_argument("--method", metavar="SPEC", help="instead of the one that the rows name")
    parser.add_argument("--seconds", type=float, help="for the timed steps of a run (60; quick: 8)")
    parser.add_argument("--no-powersgd", action="store_true", help="saves some time")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    wanted = options.row or (QUICK if settings.quick else [claim.name for claim in CLAIMS])
    claims = [claim for claim in CLAIMS if claim.name in wanted]
    result = Result(
        "methods of dad, 4 ranks, one thread each: step time, and MB sent per step and rank\n"
        "(dad's MB as dad.stats() counts them; the peers' as their interface does, where it is theirs)"
    )
    peers = [peer for peer in PEERS if not (options.no_powersgd and peer == "powersgd")]
    seconds = options.seconds or (8 if settings.quick else 60)
    # Rows of one model on one link are measured in one run.
    for link, model, images in dict.fromkeys((claim.link, claim.model, claim.images) for claim in claims):
        mine = [c for c in claims if (c.link, c.model, c.images) == (link, model, images)]
        reason = why_not(link)
        if reason:
            result.left_out += [f"{claim.name}: {reason}" for claim in mine]
            continue
        methods = list(dict.fromkeys(options.method or claim.method for claim in mine))
        progress(f"methods: {model}, 4 ranks, link {link}")
        parameters = {
            "model": model,
            "methods": methods,
            "peers": peers,
            "seconds": seconds,
            "images": images,
        }
        try:
            rows = launch("methods", parameters, link=link, timeout=1800)[0]
        except LaunchError as error:
            result.failed += [f"{claim.name}: {error}" for claim in mine]
            continue
        by_method = {row["method"]: row for row in rows}
        result.rows += [judge(claim, by_method[options.method or claim.method]) for claim in mine]
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
