"""Which ranks a method exchanges between: all ranks of a process set or, if sums go from host to host
(HOROVOD_HIERARCHICAL_ALLREDUCE), one rank of each host.

A host's gradient is its sum, or its share of the mean, so that a method sees a job with one rank per host.
The state between steps is kept by the first rank of each host; the other ranks have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dad._lib import _core
from dad.process_sets import ProcessSet

Hosts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Place:
    """How a state is distributed: how many ranks exchange, on which of them it is, and whether they
    average."""

    size: int
    rank: int
    average: bool


@dataclass(frozen=True)
class Circle:
    """hosts: the ranks of each; empty if methods go between all ranks. rank: this one's in the set."""

    num_ranks: int
    rank: int
    hosts: Hosts = ()
    ranks: tuple[int, ...] = ()  # of the set, as the job counts them

    @property
    def size(self) -> int:
        """How many take part in a method's exchange."""
        return len(self.hosts) or self.num_ranks

    @property
    def keeps(self) -> bool:
        """Whether this rank has what methods keep."""
        return not self.hosts or any(host[0] == self.rank for host in self.hosts)

    def name_of(self, member: int) -> str:
        """What a member of the set stands for, in messages."""
        rank = f"rank {self.ranks[member]}"
        return f"the host of {rank}" if self.hosts else rank

    def place(self, average: bool) -> Place:
        """The place of this rank, if it has one."""
        number = self.rank
        if self.hosts:
            number = next(i for i, host in enumerate(self.hosts) if self.rank in host)
        return Place(self.size, number, average)


def circle_of(process_set: ProcessSet) -> Circle:
    hosts = _core.hosts() if process_set.process_set_id == 0 else []
    rank, size = process_set.place
    return Circle(size, rank, as_hosts(hosts), tuple(process_set.ranks))


def as_hosts(hosts: Sequence[Sequence[int]]) -> Hosts:
    """Also used for the description in a checkpoint."""
    return tuple(tuple(host) for host in hosts)
