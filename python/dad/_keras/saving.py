"""Checkpoints with what all ranks keep between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from dad.process_sets import global_process_set
from dad.state.all_ranks import AllRanks
from dad.state.state_bytes import of_all_ranks


@contextlib.contextmanager
def writing(reducers: Sequence[Any], path: Any) -> Iterator[bool]:
    """Within it the reducers of the first rank save the states of all ranks. Gives whether this is that rank,
    which then has to write them. CheckpointError on all ranks if one fails."""
    ranks = AllRanks(reducers[0].process_set if reducers else global_process_set)
    for reducer in reducers:
        data = b""
        with ranks.step("read its state"):
            data = reducer.save_state()
        everyone = ranks.gather_on_first(data)
        if ranks.is_first:
            reducer.of_all_ranks = of_all_ranks(everyone)
    try:
        with ranks.step(f"write {path}"):
            yield ranks.is_first
    finally:
        for reducer in reducers:
            reducer.of_all_ranks = None
