"""What the planner counts with: rates between and on the ranks, measured when a plan is made."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dad._lib import _core
from dad.methods.compression import seed_from_environment
from dad.planning.circle import circle_of
from dad.planning.planner import Costs
from dad.process_sets import ProcessSet

_PROBE_BYTES = 512 << 10
# rows, out and columns of a product like those of the exchange.
_PRODUCT = (128, 512, 1024)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# Where nothing depends on them but the times that a plan shows.
_GUESSED_RATES = (1e8, 1e10)
# dᵀ a by whatever the framework multiplies with.
Multiply = Callable[[np.ndarray, np.ndarray], object]


def multiply_arrays(d: np.ndarray, a: np.ndarray) -> object:
    return d.T @ a


def measure_costs(
    process_set: ProcessSet, measures_rates: bool, multiply: Multiply = multiply_arrays
) -> Costs:
    """The same on every rank."""
    rates = _GUESSED_RATES
    if measures_rates:
        mine = json.dumps([_link_rate(process_set), product_rate(multiply)]).encode()
        all_ranks = map(json.loads, _core.gather_bytes("rates", mine, process_set.id))
        links, products = zip(*all_ranks, strict=True)
        rates = min(links), min(products)
    link, product = rates
    circle = circle_of(process_set)
    return Costs(
        size=circle.size,
        bytes_per_second=link,
        flops_per_second=product,
        seed=seed_from_environment(),
        hosts=tuple(map(len, circle.hosts)),
    )


def _link_rate(process_set: ProcessSet) -> float:
    """Bytes per second that a rank, or a host, sends while all do: of a large sum less a small one."""
    size = circle_of(process_set).size

    def probe(count: int) -> float:
        return _best_of_three(lambda: _core.reduce_zeros(f"link_probe.{count}", count, process_set.id))

    few, many = probe(1), probe(_PROBE_BYTES // 4)
    return 2 * (size - 1) / size * _PROBE_BYTES / max(many - few, 1e-6)


def product_rate(multiply: Multiply = multiply_arrays) -> float:
    """Floating operations per second of a product like those of the exchange."""
    rows, out, columns = _PRODUCT
    d, a = np.ones((rows, out), np.float32), np.ones((rows, columns), np.float32)
    return 2 * rows * out * columns / _best_of_three(lambda: multiply(d, a))


def _best_of_three(work: Callable[[], object]) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Line:
    """What a rank can send, and the delay of a message one way, in seconds."""

    bytes_per_second: float
    delay: float = 0.0


def line_of(link: str) -> Line:
    """Of a rate, with a delay if there is one: `100mbit`, or `100mbit,25ms`."""
    rate, _, delay = str(link).partition(",")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", delay.lower()) if delay else None
    if delay and match is None:
        raise ValueError(f"link={link!r} is not possible; a rate and a delay such as 100mbit,25ms")
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else 0.0
    return Line(bytes_per_second=bytes_per_second(rate), delay=seconds)


def bytes_per_second(link: str) -> float:
    """Bytes per second of a rate such as 100mbit."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)bit(?:/s|ps)?\s*", str(link).lower())
    try:
        rate = float(match[1]) * _UNITS[match[2]] / 8 if match else 0.0
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ValueError(f"link={link!r} is not possible; a rate such as 100mbit or 10gbit")
    return rate
