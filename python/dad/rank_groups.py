"""Which ranks have which value: how messages name ranks that differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """The ranks that have each value, in the order of the lowest of them."""
    groups: dict[Value, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 0, 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def who_has_what(values: Mapping[int, Hashable]) -> str:
    """ "4 on rank 0, 8 on ranks 1, 2"."""
    groups = ranks_by_value(values)
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items())
