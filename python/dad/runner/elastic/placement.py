"""Decides the rank of each worker. A worker that stays keeps its rank if possible.

A worker is identified by its seat, the host and the slot on it, as in Horovod. The slot is its local rank
(and so its GPU) for its whole life. A host that has lost slot 0 therefore has a local rank 1 of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dad.runner.hosts import Slot


@dataclass(frozen=True, order=True)
class Seat:
    host: str
    slot: int

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}"


def parse_seat(key: str) -> Seat:
    """Raises ValueError."""
    host, _, slot = key.rpartition(":")
    if not host:
        raise ValueError(f"{key!r} is not HOST:SLOT")
    return Seat(host, int(slot))


def number(seats: Iterable[Seat], before: Mapping[Seat, int]) -> dict[Seat, int]:
    """Ranks for these seats, in their order.

    A seat of `before` keeps its rank if there are enough ranks. Rank 0, from which the others take the state,
    is one of `before` if any of these is left.
    """
    seats = list(seats)
    kept = sorted((seat for seat in seats if seat in before), key=before.__getitem__)
    ranks: dict[Seat, int] = {}
    homeless = [seat for seat in kept if before[seat] >= len(seats)]
    if kept and before[kept[0]] != 0:
        ranks[(homeless or kept)[0]] = 0
    for seat in kept:
        if seat not in ranks and before[seat] < len(seats):
            ranks[seat] = before[seat]
    taken = set(ranks.values())
    free = iter(rank for rank in range(len(seats)) if rank not in taken)
    # Workers that stay come first: Horovod's users expect low ranks to be the old ones.
    for seat in [*homeless, *seats]:
        if seat not in ranks:
            ranks[seat] = next(free)
    return ranks


def places(ranks: Mapping[Seat, int]) -> dict[Seat, Slot]:
    """The six numbers of each worker."""
    by_rank = sorted(ranks, key=ranks.__getitem__)
    found = {}
    for seat in by_rank:
        peers = [other.host for other in by_rank if other.slot == seat.slot]
        found[seat] = Slot(
            host=seat.host,
            rank=ranks[seat],
            size=len(ranks),
            local_rank=seat.slot,
            local_size=sum(other.host == seat.host for other in by_rank),
            cross_rank=peers.index(seat.host),
            cross_size=len(peers),
        )
    return found
