"""Decides which rank sends the state of a job to which, after its group has changed. It is a pure function of
what ranks report.

A *version* is a state of the job that all ranks of a group had: each commit makes one, and each sync(). A
rank keeps a version as pending until it knows that all others have it too, and keeps the previous one until
then. So there is always a version that all survivors have. The *group* of a version is the processes of its
ranks, since ranks change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dad.errors import LostStateError
from dad.rank_groups import name_ranks


@dataclass
class Claim:
    """What a rank says about itself when a round begins.

    member: names this process for its whole life. versions: those that it could go back to. confirmed: the
    newest that all of `group` are known to have; 0: it has never had the state of the job. left_in_order: it
    came to this round because all of its group agreed to, not because some were lost. total: it has the sum
    of what all of them kept for later steps. norms: the norm of what each member kept, at the confirmed
    version.
    """

    member: str
    versions: list[int] = field(default_factory=list)
    confirmed: int = 0
    group: list[str] = field(default_factory=list)
    left_in_order: bool = False
    has_total: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    rank: int = 0
    size: int = 0
    knows_of_state: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Decision:
    """version: the one that all survivors continue from; 0: there is no state, this is the beginning.
    survivors: the ranks that have it; the first is the source. next_version: the version that they have
    afterwards. lost: members of the last group that are missing. in_order: the group parted by agreement.
    unchanged: every rank has its previous place."""

    version: int
    survivors: tuple[int, ...]
    next_version: int = 1
    lost: tuple[str, ...] = ()
    norms: dict[str, float] = field(default_factory=dict)
    in_order: bool = False
    uses_totals: bool = False
    unchanged: bool = False

    @property
    def source(self) -> int:
        return self.survivors[0]


def decide(claims: Sequence[Claim], minority_may_go_on: bool = False) -> Decision:
    """Decides from the claims of all ranks, in rank order, the same on each of them. Raises LostStateError if
    the job must not continue."""
    newest = max(claims, key=lambda claim: claim.confirmed)
    if newest.confirmed == 0:
        if any(claim.knows_of_state for claim in claims):
            raise LostStateError(
                "no rank of this round has the state of the job: all that had it are gone. Start the job "
                "again from a checkpoint"
            )
        return Decision(0, tuple(range(len(claims))))
    group = set(newest.group)
    here = [rank for rank, claim in enumerate(claims) if claim.member in group and claim.versions]
    lost = tuple(member for member in newest.group if member not in {claims[rank].member for rank in here})
    in_order = all(claims[rank].left_in_order for rank in here)
    # Half is enough: there is one launcher, and it has said that this half is the job.
    if not in_order and 2 * len(here) < len(group) and not minority_may_go_on:
        raise LostStateError(
            f"{name_ranks(here)} of this round {'is' if len(here) == 1 else 'are'} all that is left of the "
            f"{len(group)} ranks that had committed the last state: less than half must not go on as if it "
            "were the job. Start the job again from a checkpoint, or set DAD_ELASTIC_QUORUM=any"
        )
    common = set.intersection(*(set(claims[rank].versions) for rank in here))
    if common:
        version, survivors = max(common), here
    else:  # a state whose save() was called without commit()
        version = max(max(claims[rank].versions) for rank in here)
        survivors = [rank for rank in here if version in claims[rank].versions]
    # The source must have nothing newer, so that what it has now is this version.
    survivors.sort(key=lambda rank: (max(claims[rank].versions) != version, rank))
    return Decision(
        version,
        tuple(survivors),
        next_version=1 + max(max(claim.versions, default=0) for claim in claims),
        lost=lost,
        norms=newest.norms,
        in_order=in_order,
        uses_totals=bool(lost) and in_order and all(claims[rank].has_total for rank in here),
        unchanged=sorted(survivors) == list(range(len(claims)))
        and all((claim.rank, claim.size) == (rank, len(claims)) for rank, claim in enumerate(claims)),
    )
