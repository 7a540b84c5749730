"""Measures the planner's costs in less than a second: the line between the ranks, and the machine.

All ranks measure at the same time, so that the effect of shared cores, memory and cables is included.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dad._lib import _core
from dad.methods.compression import seed_from_environment
from dad.planning.circle import circle_of
from dad.planning.costs import Costs, Line
from dad.process_sets import ProcessSet

# Bytes of the sum that first estimates the line rate; the next sum is sized to take this many seconds.
_FIRST_BYTES = 32 << 10
_PROBE_SECONDS = 0.06
_MOST_BYTES = 1 << 20
_NEAR_BYTES = 256 << 10
# Rows, outputs and columns of a product like those of the exchange, and how often it is repeated.
_PRODUCT = (128, 512, 1024)
_PRODUCTS = 12
# Elements of arrays that exceed a core's own cache.
_MEMORY_ELEMENTS = 1 << 20
# Two threads share a core if they take more than this many times as long as one.
_SHARES = 1.5
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# Computes dᵀ a by whatever the framework multiplies with.
Multiply = Callable[[np.ndarray, np.ndarray], object]


@dataclass(frozen=True)
class Measured:
    """What one rank has measured."""

    delay: float
    bytes_per_second: float
    flops_per_second: float
    memory_per_second: float
    shares_cores: bool
    near_delay: float = 0.0
    near_bytes_per_second: float = 0.0
    near_part: float = 0.0


# 100 Mbit: used if times matter only for display, and if results are deterministic.
GUESSED = Measured(0.0, 1.25e7, 1e10, 1e10, False)


def multiply_arrays(d: np.ndarray, a: np.ndarray) -> object:
    return d.T @ a


def measure_costs(
    process_set: ProcessSet, measures_rates: bool, multiply: Multiply = multiply_arrays
) -> Costs:
    """The same on every rank."""
    circle = circle_of(process_set)
    everyone = [GUESSED]
    measures_rates = measures_rates and circle.size > 1 and not _is_deterministic()
    if measures_rates:
        mine = json.dumps(asdict(measure(process_set, multiply))).encode()
        everyone = [Measured(**json.loads(one)) for one in _gather("rates", mine, process_set)]
    costs = costs_of(everyone, circle.size, tuple(map(len, circle.hosts)))
    return replace(costs, measured=measures_rates)


def _is_deterministic() -> bool:
    """Whether results must not depend on timing (DAD_DETERMINISTIC); plans must not either."""
    return os.environ.get("DAD_DETERMINISTIC", "0").lower() not in ("", "0", "false", "no", "off")


def costs_of(everyone: list[Measured], size: int, hosts: tuple[int, ...] = ()) -> Costs:
    """The slowest rank sets the pace for all."""

    def least(name: str) -> float:
        return min(float(getattr(one, name)) for one in everyone)

    def most(name: str) -> float:
        return max(float(getattr(one, name)) for one in everyone)

    near = None
    if least("near_part") > 0 and most("near_part") < 1:
        near = Line(least("near_bytes_per_second"), most("near_delay"))
    return Costs(
        size=size,
        bytes_per_second=least("bytes_per_second"),
        flops_per_second=least("flops_per_second"),
        seed=seed_from_environment(),
        hosts=hosts,
        delay=most("delay"),
        near=near,
        near_part=least("near_part"),
        memory_per_second=least("memory_per_second"),
        shares_cores=any(one.shares_cores for one in everyone),
    )


def measure(process_set: ProcessSet, multiply: Multiply = multiply_arrays) -> Measured:
    """What this rank measures while all others do."""
    circle = circle_of(process_set)
    share = 2 * (circle.size - 1) / circle.size  # the part of a sum's bytes that one rank sends

    def probe(num_bytes: int, times: int) -> float:
        name = f"link_probe.{num_bytes}"
        return _best(lambda: _core.reduce_zeros(name, num_bytes // 4, _number(process_set)), times)

    few, first = probe(4, 3), probe(_FIRST_BYTES, 2)
    # Not the cross rank: where hosts have different numbers of ranks, it does not tell them apart.
    host = os.environ.get("DAD_HOSTNAME") or os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    mine = json.dumps([few, first, host]).encode()
    heard = [json.loads(one) for one in _gather("rates.first", mine, process_set)]
    # The same count on all ranks. A sum takes two delays, one so small that all send it to all takes one.
    rate = _FIRST_BYTES / max(max(one[1] - 2 * one[0] for one in heard), 1e-5)
    count = int(min(max(rate * _PROBE_SECONDS, _FIRST_BYTES), _MOST_BYTES)) // 4096 * 4096
    many = first if count == _FIRST_BYTES else probe(count, 2)  # a slow line was busy long enough
    rate = share * count / max(many - 2 * few, many / 4)
    on_host = [one[2] == host for one in heard]
    near_part = 0.0 if circle.hosts else (sum(on_host) - 1) / (len(on_host) - 1)
    near_delay = near_rate = 0.0
    if max(_near_parts(heard)) > 0 and min(_near_parts(heard)) < 1 and not circle.hosts:
        near_delay, near_rate = _near_line(process_set, on_host)
        rate *= 1 - near_part
    flops, memory = _product_rate_of_many(multiply), memory_rate()
    return Measured(few, rate, flops, memory, shares_cores(), near_delay, near_rate, near_part)


def _near_parts(heard: list[list[Any]]) -> list[float]:
    """For each rank: the part of its peers that is on its host."""
    hosts = [one[2] for one in heard]
    return [(hosts.count(host) - 1) / (len(hosts) - 1) for host in hosts]


def _near_line(process_set: ProcessSet, on_host: list[bool]) -> tuple[float, float]:
    """Seconds one way, and bytes per second that this rank sends to the other ranks of its host."""
    rank, _ = process_set.place
    peers = [near and i != rank for i, near in enumerate(on_host)]

    def probe(num_bytes: int) -> float:
        parts = [bytes(num_bytes) if peer else b"" for peer in peers]
        return _best(lambda: _core.send_bytes("near_probe", parts, _number(process_set)), 2)

    few, many = probe(1), probe(_NEAR_BYTES)
    return few / 2, max(sum(peers), 1) * _NEAR_BYTES / max(many - few, many / 4)


def _gather(name: str, mine: bytes, process_set: ProcessSet) -> list[bytes]:
    return _core.gather_bytes(name, mine, _number(process_set))


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    assert number is not None
    return number


# The machine


def product_rate(multiply: Multiply = multiply_arrays) -> float:
    """Floating operations per second of a product like those of the exchange, at its best."""
    rows, out, columns = _PRODUCT
    d, a = np.ones((rows, out), np.float32), np.ones((rows, columns), np.float32)
    return 2 * rows * out * columns / _best(lambda: multiply(d, a))


def _product_rate_of_many(multiply: Multiply) -> float:
    """The same as a mean, which shows whether ranks share cores."""
    rows, out, columns = _PRODUCT
    d, a = np.ones((rows, out), np.float32), np.ones((rows, columns), np.float32)
    multiply(d, a)
    start = time.perf_counter()
    for _ in range(_PRODUCTS):
        multiply(d, a)
    return 2 * rows * out * columns * _PRODUCTS / (time.perf_counter() - start)


def memory_rate() -> float:
    """Bytes per second that one thread reads and writes."""
    a, b = np.ones(_MEMORY_ELEMENTS, np.float32), np.ones(_MEMORY_ELEMENTS, np.float32)
    return 3 * a.nbytes / _best(lambda: np.add(a, b, out=a))


def shares_cores() -> bool:
    """Whether a second thread of this process slows down the first."""

    def work() -> None:
        a = np.ones(1 << 16, np.float32)
        for _ in range(200):
            np.multiply(a, 1.0, out=a)  # holds no lock of Python

    def both() -> None:
        other = threading.Thread(target=work)
        other.start()
        work()
        other.join()

    return _best(both) > _SHARES * _best(work)


def _best(work: Callable[[], object], times: int = 3) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


# User-supplied link specifications


def line_of(link: str) -> Line:
    """Parses a rate with an optional delay: `100mbit`, or `100mbit,25ms`."""
    rate, _, delay = str(link).partition(",")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", delay.lower()) if delay else None
    if delay and match is None:
        raise ValueError(f"link={link!r} is not possible; a rate and a delay such as 100mbit,25ms")
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else 0.0
    return Line(bytes_per_second=bytes_per_second(rate), delay=seconds)


def bytes_per_second(link: str) -> float:
    """Bytes per second for a rate such as 100mbit."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)bit(?:/s|ps)?\s*", str(link).lower())
    try:
        rate = float(match[1]) * _UNITS[match[2]] / 8 if match else 0.0
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ValueError(f"link={link!r} is not possible; a rate such as 100mbit or 10gbit")
    return rate


def described_costs(line: Line, size: int, multiply: Multiply = multiply_arrays) -> Costs:
    """Costs for `size` ranks on such a line, each on a host like this one with cores to spare."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size={size!r} is not possible; a number of ranks, 1 or more")
    one = Measured(line.delay, line.bytes_per_second, product_rate(multiply), memory_rate(), False)
    return costs_of([one], size)
