"""What the planner counts with: rates between and on the ranks, measured when a plan is made."""

from __future__ import annotations

import time

import torch

from dad.compression import seed_from_environment
from dad.planner import Costs
from dad.process_sets import ProcessSet
from dad.torch.functions import allgather_object
from dad.torch.ops import allreduce

_PROBE_BYTES = 512 << 10


# Where nothing depends on them but the times that a plan shows.
_GUESSED_RATES = (1e8, 1e10)


def measure_costs(process_set: ProcessSet, measures_rates: bool) -> Costs:
    """The same on every rank."""
    rates = _GUESSED_RATES
    if measures_rates:
        mine = (_link_rate(process_set), product_rate())
        rates = map(min, zip(*allgather_object(mine, name="rates", process_set=process_set), strict=True))
    link, product = rates
    return Costs(
        size=process_set.size(),
        bytes_per_second=link,
        flops_per_second=product,
        seed=seed_from_environment(),
    )


def _link_rate(process_set: ProcessSet) -> float:
    """Bytes per second that a rank sends while all do: of a large sum less a small one."""
    size = process_set.size()
    times = {}
    for count in (1, _PROBE_BYTES // 4):
        tensor = torch.zeros(count)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            allreduce(tensor, name=f"link_probe.{count}", process_set=process_set)
            best = min(best, time.perf_counter() - start)
        times[count] = best
    seconds = max(times[_PROBE_BYTES // 4] - times[1], 1e-6)
    return 2 * (size - 1) / size * _PROBE_BYTES / seconds


def product_rate() -> float:
    """Floating operations per second of a product like those of the exchange."""
    a, d = torch.ones(128, 1024), torch.ones(128, 512)  # the random numbers are the user's
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(d.t(), a)
        best = min(best, time.perf_counter() - start)
    return 2 * 128 * 1024 * 512 / best
