"""Subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dad._lib import _core


class ProcessSet:
    """Some ranks of the job. It can be used once init() or add_process_set() gave it an id."""

    def __init__(self, ranks: Iterable[int]) -> None:
        # An mpi4py communicator is accepted for the ranks that are in it.
        if hasattr(ranks, "Get_size"):
            ranks = ranks.allgather(_world_rank_in_mpi())
        ranks = sorted(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of ranks, which are integers; got {ranks}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a ProcessSet names each rank once; got {ranks}")
        self.process_set_id: int | None = None
        self.ranks: list[int] = ranks

    def size(self) -> int | None:
        """How many ranks are in it; None while it has no id."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it, which is not the rank that broadcast() takes; None without id."""
        if self.process_set_id is None:
            return None
        rank = _core.rank()
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in {self}")
        return self.ranks.index(rank)

    def included(self) -> bool:
        """Whether this process is in it."""
        return _core.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def _world_rank_in_mpi() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


def check(process_sets: Sequence[ProcessSet], size: int) -> None:
    """ValueError unless init() can make these sets in a world of `size` ranks."""
    seen = {tuple(range(size))}
    for number, process_set in enumerate(process_sets):
        ranks = tuple(process_set.ranks)
        if not ranks or ranks[0] < 0 or ranks[-1] >= size:
            raise ValueError(f"process_sets[{number}] has ranks {list(ranks)}; possible are 0 to {size - 1}")
        if ranks in seen:
            raise ValueError(f"process_sets[{number}] is a duplicate: ranks {list(ranks)} have a set already")
        seen.add(ranks)


def attach(process_sets: Sequence[ProcessSet], size: int) -> None:
    """Gives the sets that init() made their ids: 1, 2, … in the order given."""
    global_process_set.ranks = list(range(size))
    for number, process_set in enumerate(process_sets, start=1):
        process_set.process_set_id = number


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a new set; all ranks of the job call it with the same ranks."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    existing = [_core.process_set_ranks(number) for number in _core.process_set_ids()]
    if process_set.ranks in [list(ranks) for ranks in existing]:
        raise ValueError(f"ranks {process_set.ranks} have a process set already")
    process_set.process_set_id = _core.add_process_set(process_set.ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set on all ranks. False for the global one and for one without id."""
    if not process_set.process_set_id:
        return False
    _core.remove_process_set(process_set.process_set_id)
    process_set.process_set_id = None
    return True
