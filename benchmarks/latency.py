"""Round trips of small collectives, with 25 ms of delay each way, 4 ranks.

Claim: in the steady state a 1 KB allreduce takes at most 2 round trips (gloo's own: 6). Also what it
costs the first time, when the ranks must agree on a new tensor, and with 200 tensors in one call.

    python benchmarks/latency.py [--quick] [--json FILE]
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from contest import Step, say, take_turns
from lab import Link
from report import Result, Row, Settings, main, measure_on

import dad.torch as hvd

LINK = Link("none", 25)


def contestants() -> dict[str, Step]:
    numbers = itertools.count()
    known, fresh, theirs = (torch.zeros(256) for _ in range(3))
    group = [torch.zeros(256) for _ in range(200)]
    bucket = torch.zeros(200 * 256)
    return {
        "dad, 1 KB": lambda: hvd.allreduce_(known, name="known", op=hvd.Sum),
        "dad, 1 KB under a new name": lambda: hvd.allreduce_(fresh, name=f"new {next(numbers)}", op=hvd.Sum),
        "gloo, 1 KB": lambda: dist.all_reduce(theirs),
        "dad, 200 x 1 KB grouped": lambda: hvd.grouped_allreduce_(group, name="group", op=hvd.Sum),
        "gloo, 200 KB": lambda: dist.all_reduce(bucket),
    }


def work(parameters: dict[str, Any]) -> list[Row]:
    say(f"about {parameters['seconds']} s")
    timings = take_turns(contestants(), parameters["seconds"])
    return [
        {
            "allreduce": name,
            "ms": timing.ms,
            "round trips": timing.ms / parameters["round_trip_ms"],
            "KB": timing.bytes / 1e3,
            "negotiations": timing.negotiations,
            "blocks x steps": f"{timing.blocks} x {timing.steps}",
        }
        for name, timing in timings.items()
    ]


def run(settings: Settings) -> Result:
    result = Result(f"allreduce with {LINK.delay_ms:g} ms of delay each way, 4 ranks")
    parameters = {"seconds": 10 if settings.quick else 30, "round_trip_ms": LINK.round_trip_ms}
    measure_on([LINK], "latency", lambda link: parameters, result)
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
