"""What the engine itself costs: per tensor, with nobody to talk to, and when idle.

Claim: a tensor of one element, known by name, in a world of one process, is done less than 20 µs
after it was submitted, call from Python and wait included; an idle engine uses no CPU.

    python benchmarks/overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from contest import say
from lab import LaunchError, launch
from report import Result, Row, Settings, main, progress

import dad.torch as hvd

DAD_ALONE = True
BLOCKS = 20
IDLE_SECONDS = 3.0


def submit_to_done(tensors: list[torch.Tensor]) -> None:
    handles = [
        hvd.allreduce_async_(tensor, name=f"tensor {number}", op=hvd.Sum)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def microseconds_per_tensor(batch: int, total: int) -> float:
    """Median of blocks."""
    tensors = [torch.zeros(1) for _ in range(batch)]
    repeats = max(total // BLOCKS // batch, 1)
    times = []
    for _ in range(BLOCKS + 1):
        start = time.perf_counter()
        for _ in range(repeats):
            submit_to_done(tensors)
        times.append((time.perf_counter() - start) / (repeats * batch))
    return 1e6 * statistics.median(times[1:])


def idle_cpu_ms() -> float:
    """CPU time of all threads of this process while its user sleeps."""
    time.sleep(0.5)  # what init() or the last collective left to do
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    return 1000 * (time.process_time() - before)


def work(parameters: dict[str, Any]) -> dict[str, Any]:
    per_tensor = {}
    for batch in parameters["batches"]:
        say(f"{parameters['total']} tensors of 1 element, {batch} at a time")
        per_tensor[str(batch)] = microseconds_per_tensor(batch, parameters["total"])
    say(f"idle for {IDLE_SECONDS:g} s")
    return {"per_tensor": per_tensor, "idle_cpu_ms": idle_cpu_ms()}


def run(settings: Settings) -> Result:
    result = Result("engine overhead")
    total = 2_000 if settings.quick else 10_000
    try:
        progress("overhead: 1 process")
        alone = launch("overhead", {"batches": [1, 4], "total": total}, ranks=1)[0]
        progress("overhead: 4 ranks, idle")
        ranks = launch("overhead", {"batches": [], "total": 0})
    except LaunchError as error:
        result.failed.append(str(error))
        return result
    for batch, microseconds in alone["per_tensor"].items():
        result.rows.append(_row(f"per tensor, {batch} at a time, 1 process", microseconds, "µs"))
    idle = f"CPU when idle for {IDLE_SECONDS:g} s"
    result.rows.append(_row(f"{idle}, 1 process", alone["idle_cpu_ms"], "ms"))
    result.rows.append(_row(f"{idle}, worst of 4 ranks", max(rank["idle_cpu_ms"] for rank in ranks), "ms"))
    return result


def _row(what: str, value: float, unit: str) -> Row:
    return {"what": what, "value": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
