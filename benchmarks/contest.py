"""Times contestants that take turns in the same processes.

Each runs a short block of steps, then the next does, many times over, so that whatever else the
machine does hits all alike. Of a block the slowest rank counts, of the blocks the median.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import dad.torch as hvd

Step = Callable[[], object]

_MIN_WARM_UP = 3  # dad: negotiate, learn the schedule, use it; DDP: rebuild its buckets
_MAX_WARM_UP = 8
_MIN_BLOCKS = 2
_MAX_BLOCKS = 21
_MIN_STEPS = 2
_BYTES_RECEIVED_AT = 128  # in struct tcp_info of linux/tcp.h
_TCP_INFO_SIZE = 136


@dataclass
class Timing:
    """Of one step."""

    ms: float
    # Received by a rank over TCP, mean of the ranks.
    bytes: float
    # Rounds of dad's negotiation.
    negotiations: float
    blocks: int
    steps: int


def say(text: str) -> None:
    """Progress: only rank 0's is shown."""
    print(f"    {text}", flush=True)


def take_turns(contestants: dict[str, Step], seconds: float) -> dict[str, Timing]:
    """Times the steps of all contestants for about so long, and some warm-up before."""
    blocks, lead_in, steps = _plan(_warm_up(contestants, seconds / 3), seconds)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    received = dict.fromkeys(contestants, 0)
    negotiated = dict.fromkeys(contestants, 0)
    order = list(contestants)
    before = _counters()
    for _ in range(blocks):
        for name in order:
            for _ in range(lead_in):
                contestants[name]()
            times[name].append(_time(contestants[name], steps))
            after = _counters()
            received[name] += after[0] - before[0]
            negotiated[name] += after[1] - before[1]
            before = after
        order.reverse()
    count = (steps + lead_in) * blocks
    return {
        name: Timing(
            ms=1000 * statistics.median(_slowest(times[name])),
            bytes=_mean(received[name]) / count,
            negotiations=negotiated[name] / count,
            blocks=blocks,
            steps=steps,
        )
        for name in contestants
    }


def _counters() -> tuple[int, int]:
    """Bytes received and negotiations, read on all ranks while none is in a step."""
    dist.barrier()
    values = _bytes_received(), hvd.stats()["negotiations"]
    dist.barrier()
    return values


def _bytes_received() -> int:
    """What has come in so far over the TCP connections that this process has open."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        except OSError:
            continue  # closed meanwhile, or not TCP
        total += struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0]
    return total


def _time(step: Step, steps: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _warm_up(contestants: dict[str, Step], seconds: float) -> float:
    """Seconds that one step of each takes together, once warm."""
    started = time.perf_counter()
    for number in range(1, _MAX_WARM_UP + 1):
        dist.barrier()
        round_time = sum(_time(step, 1) for step in contestants.values())
        elapsed, round_time = _slowest([time.perf_counter() - started, round_time])
        if number >= _MIN_WARM_UP and elapsed > seconds:
            break
    return round_time


def _plan(round_time: float, seconds: float) -> tuple[int, int, int]:
    """Blocks, untimed and timed steps in each.

    The first step of a block finds TCP connections that were idle for long, and is not timed unless
    steps take so long that it matters little.
    """
    rounds = int(seconds / round_time)
    if rounds < _MIN_BLOCKS * (1 + _MIN_STEPS):
        return _MIN_BLOCKS, 0, 1
    blocks = min(rounds // (1 + _MIN_STEPS), _MAX_BLOCKS)
    return blocks, 1, rounds // blocks - 1


def _slowest(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _mean(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()
