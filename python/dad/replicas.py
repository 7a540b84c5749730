"""Are the replicas of a model the same, bit by bit? What all frameworks share."""

from __future__ import annotations

from collections.abc import Sequence

from dad.errors import ReplicaError


def raise_unless_equal(ranks: Sequence[dict[str, str]]) -> None:
    """ReplicaError, naming tensors and ranks, unless all ranks have the same digest under every name."""
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    problems = []
    for name in names:
        groups: dict[str | None, list[int]] = {}
        for number, rank in enumerate(ranks):
            groups.setdefault(rank.get(name), []).append(number)
        if len(groups) > 1:
            parts = " / ".join(f"ranks {members}" for members in groups.values())
            problems.append(f'"{name}" differs between {parts}')
    if problems:
        shown = "; ".join(problems[:10])
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ReplicaError(f"replicas are not bit-equal: {shown}{more}")
