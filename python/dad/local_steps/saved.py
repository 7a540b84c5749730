"""What ranks keep between rounds, in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Saved = dict[str, Any]


def pack(fragments: Sequence[Saved]) -> Saved:
    """As a dict, which all forms of a checkpoint have."""
    return {str(i): one for i, one in enumerate(fragments)}


def unpack(packed: Saved) -> list[Saved]:
    return [packed[str(i)] for i in range(len(packed))]


def is_local(saved: Saved) -> bool:
    """Whether a rank's state is that of local steps."""
    return "fragments" in saved


def merge_rounds(saved: Sequence[Saved], new_size: int, merge: Any) -> list[Saved]:
    """The states of all ranks, for another number of ranks. What methods have kept is shared out as for
    gradients (states.py). A rank with a number that there was goes on where it was; a new one begins with the
    common weights; and what ranks that are gone had not sent of their round is lost.

    merge: that of states.py.
    """
    by_rank = sorted(saved, key=lambda one: one["rank"])
    fragments = list(zip(*(unpack(one["fragments"]) for one in by_rank), strict=True))
    # Nothing is kept for what goes dense.
    merged = [merge(ranks, new_size) if all(ranks) else [{}] * new_size for ranks in fragments]
    states = []
    for rank in range(new_size):
        old = by_rank[rank] if rank < len(by_rank) else {}
        own = {key: old[key] for key in ("own", "inner") if key in old}
        if not own and "inner" in by_rank[0]:
            own = {"inner": by_rank[0]["inner"]}
        states.append(
            {
                "rank": rank,
                "size": new_size,
                "common": by_rank[0]["common"],
                **own,
                "fragments": pack([fragment[rank] for fragment in merged]),
            }
        )
    return states
