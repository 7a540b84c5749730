"""Subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dad._lib import _core
from dad.elastic.launcher import is_elastic
from dad.rank_groups import name_ranks


class ProcessSet:
    """Some ranks of the job, which run collectives among themselves.

    A set can be used after init(process_sets=[…]) or add_process_set() has given it an id.

    Args:
        ranks: the ranks, or an mpi4py communicator, whose members all construct the set.

    Raises:
        ValueError: `ranks` has something other than distinct ranks.

    Example::

        even = hvd.add_process_set(hvd.ProcessSet(range(0, hvd.size(), 2)))
        if even.included():
            hvd.allreduce(tensor, process_set=even)
    """

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        communicator: Any = ranks if hasattr(ranks, "Get_size") else None
        if communicator is not None:
            ranks = communicator.allgather(_world_in_mpi().Get_rank())
        ranks = sorted(ranks)
        self.mpi_comm = communicator
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of ranks, which are integers; got {ranks}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a ProcessSet names each rank once; got {ranks}")
        self.process_set_id: int | None = None
        self.ranks: list[int] = ranks
        self.why_gone = ""  # where it had an id in an earlier round of an elastic job

    @property
    def id(self) -> int:
        """Its id. ValueError while it has none."""
        if self.process_set_id is None:
            raise ValueError(f"{self} was not given to init() or add_process_set(), or has been removed")
        return self.process_set_id

    @property
    def place(self) -> tuple[int, int]:
        """rank() and size(). ValueError while it has no id."""
        rank, size = self.rank(), self.size()
        if rank is None or size is None:
            raise ValueError(f"{self} was not given to init() or add_process_set(), or has been removed")
        return rank, size

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
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def _world_in_mpi() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


# Of an elastic job, where init() is called again for each round: the sets that it got first, and others.
_of_job: list[ProcessSet] = []
_added: list[ProcessSet] = []


def of_round(process_sets: Sequence[ProcessSet], size: int) -> list[ProcessSet]:
    """The sets to make in a round of an elastic job: these, or those of the round before. A set with a rank
    that this round does not have is left out, and using it is an error until a round has that rank again.
    Sets of add_process_set() are gone: the ranks of this round may add them again."""
    if process_sets:
        _of_job[:] = process_sets
    for one in _added:
        one.process_set_id = None
        one.why_gone = "it was added in an earlier round of this elastic job; add it again"
    _added.clear()
    for one in _of_job:
        one.process_set_id = None
        missing = [rank for rank in one.ranks if rank >= size]
        one.why_gone = f"{name_ranks(missing)} of it are gone; the job has {size} now" if missing else ""
    return [one for one in _of_job if not one.why_gone]


def ranks_of_all(process_sets: Sequence[ProcessSet]) -> list[list[int]]:
    """The ranks of all sets that init() makes, the same list on every rank.

    Ranks may pass different communicators at one position, such as the parts of a split: each part becomes
    a set, ordered by its lowest rank.
    """
    all_ranks = []
    for process_set in process_sets:
        parts = [tuple(process_set.ranks)]
        if process_set.mpi_comm is not None:
            parts = sorted({tuple(ranks) for ranks in _world_in_mpi().allgather(process_set.ranks)})
        all_ranks += [list(ranks) for ranks in parts]
    return all_ranks


def check(all_ranks: Sequence[Sequence[int]], size: int) -> None:
    """ValueError unless init() can make sets of these ranks in a world of `size` ranks."""
    seen = {tuple(range(size))}
    for number, ranks in enumerate(map(tuple, all_ranks)):
        if not ranks or ranks[0] < 0 or ranks[-1] >= size:
            raise ValueError(f"process_sets[{number}] has ranks {list(ranks)}; possible are 0 to {size - 1}")
        if ranks in seen:
            raise ValueError(f"process_sets[{number}] is a duplicate: ranks {list(ranks)} have a set already")
        seen.add(ranks)


def attach(process_sets: Sequence[ProcessSet], size: int) -> None:
    """Gives the sets of init() their ids. ValueError if one does not exist, which happens only when init()
    is called again."""
    global_process_set.ranks = list(range(size))
    numbers = {tuple(ranks): number for number, ranks in ids_and_ranks().items()}
    for process_set in process_sets:
        number = numbers.get(tuple(process_set.ranks), 0)
        if number == 0:
            raise ValueError(
                f"{process_set} cannot be made by init() after the first call: use add_process_set()"
            )
        process_set.process_set_id = number


def ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every process set, the global one (0) included, by id."""
    return {number: list(_core.process_set_ranks(number)) for number in sorted(_core.process_set_ids())}


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a new process set; all ranks of the job call it with the same ranks.

    Args:
        process_set: a ProcessSet, or its ranks.

    Returns:
        the ProcessSet, which has an id now.

    Raises:
        ValueError: these ranks have a set already, or are not ranks of the job.
        MismatchError: ranks have passed different sets.

    Example::

        first_two = hvd.add_process_set([0, 1])
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks in ids_and_ranks().values():
        raise ValueError(f"ranks {process_set.ranks} have a process set already")
    process_set.process_set_id = _core.add_process_set(process_set.ranks)
    process_set.why_gone = ""
    if is_elastic():
        _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it.

    Args:
        process_set: what add_process_set() or init() has made.

    Returns:
        False for the global set and for one without an id; nothing has happened then.

    Example::

        hvd.remove_process_set(first_two)
    """
    if not process_set.process_set_id:
        return False
    _core.remove_process_set(process_set.process_set_id)
    process_set.process_set_id = None
    return True
