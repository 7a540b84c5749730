"""Which tensors are exchanged together, where a model is exchanged in parts."""

from __future__ import annotations

from collections.abc import Sequence


def split(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """The places of tensors of these sizes in `fragments` runs of similar total size, in order, none of them
    empty unless there are fewer tensors than fragments."""
    total = sum(sizes)
    parts: list[list[int]] = [[] for _ in range(fragments)]
    part, done = 0, 0
    for i, size in enumerate(sizes):
        left = len(sizes) - i
        # Half of a tensor on either side of the border: it goes where more of it lies.
        is_full = done + size / 2 > total * (part + 1) / fragments
        must_move = left <= fragments - part - 1
        if parts[part] and part + 1 < fragments and (is_full or must_move):
            part += 1
        parts[part].append(i)
        done += size
    return [members for members in parts if members]


def offset(fragment: int, fragments: int, steps: int) -> int:
    """After how many steps of a round a fragment is exchanged; the last one at the end."""
    return (fragment + 1) * steps // fragments
