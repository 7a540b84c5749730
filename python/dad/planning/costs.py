"""The costs that the planner counts with: the line, the machine, and the overlap with backward()."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dad.planning.types import Choice, Layer

# Memory traffic, in bytes read and written, that takes as long as sending and receiving one byte over TCP.
_MEMORY_OF_BYTE = 38.0
# The part of backward() that can hide communication: gradients of the first layers come at its end.
_HIDDEN = 0.75
# Dense tensors up to this size are sent to all ranks at once, larger ones to owners and back: the default of
# DAD_DIRECT_BYTES.
DIRECT_BYTES = 4096


@dataclass(frozen=True)
class Line:
    """The rate at which a rank can send, and the one-way delay of a message in seconds.

    Where ranks share a host there are two lines: to ranks on that host, and to the others. The rate is the
    total to all peers of one kind, while all ranks send."""

    bytes_per_second: float
    delay: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The costs that the planner counts with. Rates are the lowest over the ranks, delays the largest.

    Bytes are those that a rank sends. If one rank of each host exchanges for it (circle.py), they are those
    of the host, and `size` is the number of hosts."""

    size: int
    bytes_per_second: float  # to other hosts; to all ranks if all are on one
    flops_per_second: float  # of products
    seed: int = 0  # of what is rounded at random
    hosts: tuple[int, ...] = ()  # how many ranks each has; empty: methods go between all ranks
    delay: float = 0.0  # seconds one way, as bytes_per_second
    near: Line | None = None  # to ranks of the same host, where there are both
    near_part: float = 0.0  # of the peers of a rank, how many are on its host
    memory_per_second: float = float("inf")  # bytes read and written
    backward_seconds: float = 0.0  # of a step, from the first gradient to the last
    shares_cores: bool = False  # what a method computes takes cores from the framework
    measured: bool = False  # else they stay as they are, whatever steps show
    # How a trial of a plan weighs costs: how much a second of the line counts relative to a second of work,
    # which is less if backward() hides it; and whether methods that can choose avoid an owner, which saves a
    # round.
    line_price: float = 1.0
    one_round: bool = False

    @property
    def num_ranks(self) -> int:
        return sum(self.hosts) or self.size

    @property
    def factor_copies(self) -> int:
        """How often a rank's factors leave its host, together with those of the host's other ranks."""
        largest = max(self.hosts, default=1)
        return largest * (self.num_ranks - largest)

    def dense_bytes(self, layer: Layer) -> float:
        return 2 * (self.size - 1) / self.size * layer.elements * layer.element_bytes

    def line_seconds(self, num_bytes: float) -> float:
        """The time that many bytes travel. Both kinds of pairs transfer at the same time."""
        if self.near is None:
            return num_bytes / self.bytes_per_second
        return max(
            num_bytes * (1 - self.near_part) / self.bytes_per_second,
            num_bytes * self.near_part / self.near.bytes_per_second,
        )

    def work_seconds(self, flops: float, memory: float = 0.0) -> float:
        return flops / self.flops_per_second + memory / self.memory_per_second

    def seconds(self, num_bytes: float, flops: float, memory: float = 0.0) -> float:
        """The costs of one tensor on its own, without delays, as this trial weighs them."""
        return self.line_price * self.line_seconds(num_bytes) + self.work_seconds(
            flops, memory + self._memory_of_bytes(num_bytes)
        )

    def _memory_of_bytes(self, num_bytes: float) -> float:
        """The core time that sending and receiving takes. Within a host, the rate of the line includes it."""
        return _MEMORY_OF_BYTE * num_bytes if self.shares_cores and not self.is_one_host else 0.0

    @property
    def is_one_host(self) -> bool:
        return self.near is None and self.near_part == 1.0

    def exposed_seconds(self, choices: Iterable[Choice]) -> float:
        """By how much a step takes longer than without communication.

        Bytes to other hosts travel while backward() goes on. Those within a host take a core, and so does
        what methods compute, so both are hidden only where cores are free. Requests overlap each other: a
        step waits for the delays of the one with the most rounds."""
        sent = [choice for choice in choices if choice.num_bytes > 0]
        num_bytes = sum(choice.num_bytes for choice in sent)
        line = self.line_seconds(num_bytes)
        work = self.work_seconds(
            sum(choice.flops for choice in sent),
            sum(choice.memory for choice in sent) + self._memory_of_bytes(num_bytes),
        )
        rounds = max((choice.rounds for choice in sent), default=0)
        if self._size_of_dense(sent) > DIRECT_BYTES:
            rounds = max(rounds, 2)
        delays = self.delay * rounds
        hides = _HIDDEN * self.backward_seconds
        if not self.shares_cores:
            return max(0.0, line + work - hides) + delays
        return max(0.0, line - (0.0 if self.is_one_host else hides)) + work + delays

    def _size_of_dense(self, choices: Iterable[Choice]) -> float:
        """Costs of all dense tensors together, which travel in the same messages."""
        num_bytes = sum(choice.num_bytes for choice in choices if choice.kind == "dense")
        return num_bytes * self.size / max(2 * (self.size - 1), 1)
