"""Bandwidth of an allreduce, against torch.distributed over gloo, 4 ranks.

Claim: with 64 MB and with 1 MB dad has at least 0.95 of gloo's bandwidth at 1 Gbit, and at least all
of it where nothing limits the link. 1 KB shows the latency.

    python benchmarks/allreduce.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from contest import say, take_turns
from lab import UNSHAPED, Link
from report import Result, Row, Settings, main, measure_on

import dad.torch as hvd

LINKS = (UNSHAPED, Link("1gbit"))
SIZES = {"64 MB": 64 << 20, "1 MB": 1 << 20, "1 KB": 1 << 10}
QUICK_SIZES = {"4 MB": 4 << 20, "1 KB": 1 << 10}


def work(parameters: dict[str, Any]) -> list[Row]:
    return [measure(size, count, parameters["seconds"]) for size, count in parameters["sizes"].items()]


def measure(size: str, num_bytes: int, seconds: float) -> Row:
    say(f"{size}, about {seconds:g} s")
    ours, theirs = (torch.full((num_bytes // 4,), hvd.rank() + 1.0) for _ in range(2))

    def dad(op: int = hvd.Average) -> None:
        hvd.allreduce_(ours, name=f"allreduce {size} {op}", op=op)

    def gloo() -> None:
        dist.all_reduce(theirs)

    dad(hvd.Sum)
    gloo()
    if not torch.equal(ours, theirs):
        raise RuntimeError(f"{size}: the contestants do not agree")
    # Averages stay finite however often they are taken. gloo has none, and takes as long for sums of zeros;
    # those of dad might travel packed into nothing.
    ours.normal_()
    theirs.zero_()
    timings = take_turns({"dad": dad, "gloo": gloo}, seconds)
    ours_per_step, theirs_per_step = timings["dad"], timings["gloo"]
    return {
        "size": size,
        "dad ms": ours_per_step.ms,
        "gloo ms": theirs_per_step.ms,
        "bandwidth dad/gloo": theirs_per_step.ms / ours_per_step.ms,
        "dad MB": ours_per_step.bytes / 1e6,
        "gloo MB": theirs_per_step.bytes / 1e6,
        "negotiations": ours_per_step.negotiations,
        "blocks x steps": f"{ours_per_step.blocks} x {ours_per_step.steps}",
    }


def run(settings: Settings) -> Result:
    result = Result(
        "allreduce in place, 4 ranks: bandwidth against torch.distributed gloo (above 1: dad is faster)"
    )
    parameters = {"sizes": QUICK_SIZES, "seconds": 2} if settings.quick else {"sizes": SIZES, "seconds": 20}
    measure_on(LINKS, "allreduce", lambda link: parameters, result)
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
