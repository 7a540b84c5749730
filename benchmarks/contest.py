"""Times contestants that take turns in the same processes.

Each runs a short block of steps, then the next does, many times over, so that whatever else the
machine does hits all alike. Of a block the slowest rank counts, of the blocks the median.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

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
# Of a host in a lab; elsewhere what an interface has sent is not ours alone.
_INTERFACE_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


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
    # Sent by a rank, mean of the ranks: as dad counts it, and through the interface of its host with
    # all headers (None outside of a lab).
    dad_sent: float = 0.0
    interface_sent: float | None = None
    # Of every block. Block i of one contestant and block i of another had the machine one after the other.
    each_ms: list[float] = field(default_factory=list)
    # CPU time of a rank, in all its threads and in those that were asked for; mean of the ranks.
    cpu_ms: float = 0.0
    cpu_ms_of_threads: float = 0.0


@dataclass
class _Turn:
    """Steps of one contestant in each block."""

    untimed: int
    timed: int


def say(text: str) -> None:
    """Progress: only rank 0's is shown."""
    print(f"    {text}", flush=True)


def take_turns(
    contestants: dict[str, Step],
    seconds: float,
    warm_up: int = _MIN_WARM_UP,
    even_time: bool = False,
    want_blocks: int = _MIN_BLOCKS,
    threads: Collection[int] = (),
) -> dict[str, Timing]:
    """Times the steps of all contestants for about so long, after at least `warm_up` untimed ones.

    All run the same number of steps; with `even_time` each has the same time instead, so that one slow
    contestant does not leave the others with two steps. `want_blocks` of them, then, if they fit into the
    time with one timed step each. `threads`: those whose CPU time is also told by itself.
    """
    each = _warm_up(contestants, seconds / 3, warm_up)
    blocks, turns = _share_time(each, seconds, want_blocks) if even_time else _share_steps(each, seconds)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    cpu = {name: [0.0, 0.0] for name in contestants}
    counted = {name: [0] * _NUM_COUNTERS for name in contestants}
    order = list(contestants)
    before = _counters()
    for _ in range(blocks):
        for name in order:
            cpu_before = _cpu_ms(threads)
            for _ in range(turns[name].untimed):
                contestants[name]()
            times[name].append(_time(contestants[name], turns[name].timed))
            cpu_after = _cpu_ms(threads)
            cpu[name] = [c + y - x for c, x, y in zip(cpu[name], cpu_before, cpu_after, strict=True)]
            after = _counters()
            counted[name] = [c + y - x for c, x, y in zip(counted[name], before, after, strict=True)]
            before = after
        order.reverse()
    in_lab = in_a_lab()
    result = {}
    for name, turn in turns.items():
        count = (turn.untimed + turn.timed) * blocks
        received, negotiated, dad_sent, interface_sent = (_mean(value) / count for value in counted[name])
        cpu_ms, cpu_ms_of_threads = (_mean(value) / count for value in cpu[name])
        each_ms = [1000 * block for block in _slowest(times[name])]
        result[name] = Timing(
            ms=statistics.median(each_ms),
            bytes=received,
            negotiations=negotiated,
            blocks=blocks,
            steps=turn.timed,
            dad_sent=dad_sent,
            interface_sent=interface_sent if in_lab else None,
            each_ms=each_ms,
            cpu_ms=cpu_ms,
            cpu_ms_of_threads=cpu_ms_of_threads,
        )
    return result


_NUM_COUNTERS = 4


def _counters() -> tuple[int, int, int, int]:
    """Bytes received, negotiations, bytes that dad and the interface have sent, on all ranks while none is
    in a step."""
    dist.barrier()
    stats = hvd.stats()
    values = bytes_received(), stats["negotiations"], stats["wire_bytes_sent"], interface_sent()
    dist.barrier()
    return values


def threads_of_others() -> set[int]:
    """The threads that this process has now, but for the one that asks."""
    return {int(entry) for entry in os.listdir("/proc/self/task")} - {threading.get_native_id()}


def _cpu_ms(threads: Collection[int]) -> tuple[float, float]:
    """CPU time so far: of all threads of this process, and of these."""
    apart = 0.0
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            apart += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e6
    return time.process_time() * 1000, apart


def in_a_lab() -> bool:
    """Whether this process has a host of its own."""
    return os.environ.get("LOCAL_WORLD_SIZE") == "1" and os.environ.get("DAD_GLOO_IFACE") == "eth0"


def interface_sent() -> int:
    """Bytes that this host of a lab has sent, headers included; 0 outside of a lab."""
    return int(_INTERFACE_SENT.read_text()) if in_a_lab() else 0


def bytes_received() -> int:
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


def _warm_up(contestants: dict[str, Step], seconds: float, least: int) -> dict[str, float]:
    """Seconds that a step of each takes, once warm."""
    started = time.perf_counter()
    for number in range(1, max(_MAX_WARM_UP, least) + 1):
        dist.barrier()
        times = [_time(step, 1) for step in contestants.values()]
        elapsed, *times = _slowest([time.perf_counter() - started, *times])
        if number >= least and elapsed > seconds:
            break
    return dict(zip(contestants, times, strict=True))


# The first step of a block is not timed: while the others had their turns the kernel has closed the
# windows of its connections, and with a delay even a step of ten seconds takes a fifth longer.


def _share_steps(each: dict[str, float], seconds: float) -> tuple[int, dict[str, _Turn]]:
    """How many blocks, and what happens in each: the same number of steps for all."""
    rounds = int(seconds / sum(each.values()))
    if rounds < _MIN_BLOCKS * (1 + _MIN_STEPS):
        return _MIN_BLOCKS, {name: _Turn(1, 1) for name in each}
    blocks = min(rounds // (1 + _MIN_STEPS), _MAX_BLOCKS)
    return blocks, {name: _Turn(1, rounds // blocks - 1) for name in each}


def _share_time(each: dict[str, float], seconds: float, want_blocks: int) -> tuple[int, dict[str, _Turn]]:
    """The same, with as many steps for each as fit into its share of the time."""
    share = seconds / len(each)
    blocks = int(share / max(each.values())) // (1 + _MIN_STEPS)
    fitting = int(seconds / sum(2 * step for step in each.values()))  # with one timed step each
    blocks = min(max(blocks, _MIN_BLOCKS, min(want_blocks, fitting)), _MAX_BLOCKS)
    turns = {name: _Turn(1, max(int(share / blocks / step) - 1, 1)) for name, step in each.items()}
    return blocks, turns


def _slowest(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _mean(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()
