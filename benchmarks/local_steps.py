"""Local steps and delay on a slow line: seconds of a step, as a multiple of a step without communication.

All ways take turns in the same processes, in blocks of whole rounds, so that they meet the same load. What is
compared is the median of the blocks.

    python benchmarks/local_steps.py [--model mlp] [--ranks 2] [--rate 100mbit] [--delay-ms 25] [--blocks 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lab import Link, launch
from models import MODELS, batch

import dad.torch as hvd

DAD_ALONE = True  # no peer of torch.distributed in these processes
BLOCK = 64  # steps: whole rounds of every way
WARM_UP = 3  # blocks
WAYS: dict[str, dict[str, Any]] = {
    "local": {},
    "none": {"compression": "none"},
    "rank_dad": {"compression": "rank_dad:rank=4"},
    "rank_dad H=8": {"compression": "rank_dad:rank=4", "local_steps": 8},
    "rank_dad H=32": {"compression": "rank_dad:rank=4", "local_steps": 32},
    "rank_dad delay": {"compression": "rank_dad:rank=4", "delay": 1},
    "rank_dad H=8 delay": {"compression": "rank_dad:rank=4", "local_steps": 8, "delay": 1},
    "int8 H=32": {"compression": "int8", "local_steps": 32},
    "none H=32": {"compression": "none", "local_steps": 32},
}


def step_of(way: str, model_name: str) -> Callable[[], None]:
    torch.manual_seed(1)
    model, (inputs, targets) = MODELS[model_name](), batch(model_name)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if options := WAYS[way]:
        named = [(f"{way}.{name}", param) for name, param in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(optimizer, named, **options)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def work(parameters: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each way: seconds, and bytes sent by this rank, of a step."""
    ways = parameters["ways"]
    steps = {way: step_of(way, parameters["model"]) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent = dict.fromkeys(ways, 0.0)
    for block in range(WARM_UP + parameters["blocks"]):
        for way in ways:
            short = block < WARM_UP and way in ("none", "rank_dad")
            count = 8 if short else BLOCK
            hvd.barrier()
            bytes_before, begin = hvd.stats()["wire_bytes_sent"], time.perf_counter()
            for _ in range(count):
                steps[way]()
            if block >= WARM_UP:
                seconds[way].append((time.perf_counter() - begin) / count)
                sent[way] += (hvd.stats()["wire_bytes_sent"] - bytes_before) / count
    blocks = parameters["blocks"]
    return {way: (statistics.median(seconds[way]), sent[way] / blocks) for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay-ms", type=float, default=25.0)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument(
        "--way", action="append", choices=WAYS, help="besides local; may be given several times"
    )
    arguments = parser.parse_args()
    ways = list(dict.fromkeys(["local", *(arguments.way or WAYS)]))
    parameters = {"model": arguments.model, "blocks": arguments.blocks, "ways": ways}
    link = Link(arguments.rate, arguments.delay_ms)
    by_rank = launch("local_steps", parameters, arguments.ranks, link)
    # The slowest rank is the pace of all.
    seconds = {way: max(result[way][0] for result in by_rank) for way in ways}
    print(f"{arguments.model}, {arguments.ranks} ranks, {link}")
    print(f"{'way':20} {'ms a step':>10} {'of local':>9} {'kB a step':>10}")
    for way in ways:
        sent = statistics.mean(result[way][1] for result in by_rank) / 1e3
        print(f"{way:20} {1e3 * seconds[way]:10.2f} {seconds[way] / seconds['local']:9.2f} {sent:10.2f}")


if __name__ == "__main__":
    main()
