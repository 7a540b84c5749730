"""Arrays of a checkpoint as torch has them, and checkpoints for another number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dad.planner import Plan
from dad.states import add_shares, saved_shares


def as_tensors(value: Any) -> Any:
    """Dicts of arrays, as dicts of tensors."""
    if isinstance(value, dict):
        return {key: as_tensors(part) for key, part in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def as_arrays(value: Any) -> Any:
    """The other way round."""
    if isinstance(value, dict):
        return {key: as_arrays(part) for key, part in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def merge_states(states: list[dict[str, Any]], new_size: int) -> list[dict[str, Any]]:
    """The optimizer states of all ranks (state_dict() of each), for another number of ranks: one for each new
    rank, to be given to its load_state_dict(). Nothing that a rank had kept for later steps is lost.

    Without it a rank takes over what the rank of the same number has saved, and what ranks that are gone
    have kept is lost: fine when ranks are added.
    """
    if new_size < 1:
        raise ValueError(f"new_size={new_size} is not possible; 1 or more")
    if not states:
        raise ValueError("states is empty: it has the state_dict() of every rank")
    if all("dad" not in state for state in states):
        return [dict(states[0]) for _ in range(new_size)]
    size = len(states)
    by_rank = {state["dad"]["rank"]: state for state in states if "dad" in state}
    wrong_size = [state["dad"]["size"] for state in by_rank.values() if state["dad"]["size"] != size]
    if sorted(by_rank) != list(range(size)) or wrong_size:
        raise ValueError(
            f"states are those of ranks {sorted(by_rank)} of {(wrong_size or [size])[0]}; "
            f"all of them are needed, each once"
        )
    if new_size == size:
        return [by_rank[rank] for rank in range(size)]
    merged = []
    for rank in range(new_size):
        kept: dict[str, np.ndarray] = {}
        for old in range(rank, size, new_size):
            add_shares(kept, saved_shares(as_arrays(by_rank[old]["dad"])))
        new = {**by_rank[0]["dad"], "size": new_size, "rank": rank, "plan": None, "states": {}}
        new["hosts"] = []
        new["kept"] = as_tensors(kept)
        new["kept_by"] = Plan().as_dict()
        merged.append({**by_rank[0], "dad": new})
    return merged
