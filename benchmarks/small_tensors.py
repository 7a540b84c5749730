"""Many small tensors, against one bucket of the same bytes, 4 ranks.

Claim: 200 tensors of 1 KB in the steady state take no longer than one torch.distributed allreduce of
their bytes (a bucket of DDP) plus 1 ms when given in one grouped call, plus 5 ms as 200 calls from
Python.

    python benchmarks/small_tensors.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from contest import Step, say, take_turns
from lab import UNSHAPED, Link
from report import Result, Row, Settings, main, measure_on

import dad.torch as hvd

LINKS = (UNSHAPED, Link("1gbit"))
TENSORS, ELEMENTS = 200, 256


def contestants() -> dict[str, Step]:
    grouped, single = ([torch.zeros(ELEMENTS) for _ in range(TENSORS)] for _ in range(2))
    names = [f"small {number}" for number in range(TENSORS)]
    bucket = torch.zeros(TENSORS * ELEMENTS)

    def one_call_each() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            for tensor, name in zip(single, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return {
        "bucket": lambda: dist.all_reduce(bucket),
        "grouped": lambda: hvd.grouped_allreduce_(grouped, name="small group", op=hvd.Sum),
        "calls": one_call_each,
    }


def work(parameters: dict[str, Any]) -> list[Row]:
    say(f"{TENSORS} tensors of {4 * ELEMENTS} bytes, about {parameters['seconds']} s")
    timings = take_turns(contestants(), parameters["seconds"])
    bucket = timings["bucket"].ms
    ways = {
        "one gloo allreduce of the bytes": "bucket",
        "dad, one grouped call": "grouped",
        f"dad, {TENSORS} calls": "calls",
    }
    return [
        {
            "way": way,
            "ms": timings[name].ms,
            "more than gloo, ms": timings[name].ms - bucket,
            "time / gloo": timings[name].ms / bucket,
            "KB": timings[name].bytes / 1e3,
            "negotiations": timings[name].negotiations,
            "blocks x steps": f"{timings[name].blocks} x {timings[name].steps}",
        }
        for way, name in ways.items()
    ]


def run(settings: Settings) -> Result:
    result = Result(f"{TENSORS} tensors of 1 KB per step, 4 ranks, steady state")
    parameters = {"seconds": 2 if settings.quick else 15}
    measure_on(LINKS, "small_tensors", lambda link: parameters, result)
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
