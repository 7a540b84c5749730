"""Checkpoints that have the state of all ranks, and arrays of them as torch has them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from dad.local_steps.saved import is_local
from dad.process_sets import ProcessSet, global_process_set
from dad.state.all_ranks import AllRanks, replacing
from dad.state.state_bytes import from_bytes, to_bytes
from dad.state.states import merge
from dad.torch.local_state import with_inner_state

_FORMAT = "dad checkpoint 1"


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
    """Converts the optimizer states of all ranks to another number of ranks.

    Nothing that a rank had kept for later steps is lost. save() and load() do this by themselves. Without
    it a rank takes over what the rank of the same number has saved, which is fine only when ranks are
    added.

    Args:
        states: the state_dict() of the optimizer of every rank.
        new_size: the new number of ranks.

    Returns:
        a state for each new rank, for its load_state_dict().

    Raises:
        ValueError: `states` is empty or incomplete, or `new_size` is less than 1.

    Example::

        states = [torch.load(f"rank{rank}.pt") for rank in range(4)]
        optimizer.load_state_dict(hvd.merge_states(states, 2)[hvd.rank()])
    """
    if new_size < 1:
        raise ValueError(f"new_size={new_size} is not possible; 1 or more")
    if not states:
        raise ValueError("states is empty: it has the state_dict() of every rank")
    if all("dad" not in state for state in states):
        return [dict(states[0]) for _ in range(new_size)]
    saved = {id(state): as_arrays(state["dad"]) for state in states if "dad" in state}
    merged = merge(list(saved.values()), new_size)
    if new_size == len(states):
        return sorted(states, key=lambda state: state["dad"]["rank"])
    first = next(state for state in states if "dad" in state and state["dad"]["rank"] == 0)
    return [{**first, "dad": as_tensors(one)} for one in merged]


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Writes a checkpoint with the state of all ranks to one file.

    All ranks call it; the first one writes. The file replaces an older one only when it is complete. load()
    reads it on any number of ranks.

    Args:
        path: the file, on a disk of the first rank.
        model: whose state_dict() is saved: the parameters of the first rank.
        optimizer: whose state is saved.
        **extra: what else load() shall return, such as epoch=3; the first rank's.

    Raises:
        CheckpointError: a rank has failed; raised on all ranks. An older file is left as it was.

    Example::

        hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch)
    """
    ranks = AllRanks(_process_set_of(optimizer))
    mine: dict[str, Any] = {}
    with ranks.step("read its state"):
        if ranks.is_first and model is not None:
            mine["model"] = model.state_dict()
        if optimizer is not None:
            mine["optimizer"] = optimizer.state_dict()
        state = mine.get("optimizer", {})
        if "dad" in state and is_local(state["dad"]):
            state["dad"] = with_inner_state(state)
        kept = state.pop("dad", None)
        data = b"" if kept is None else to_bytes(as_arrays(kept))
    everyone = ranks.gather_on_first(data)
    with ranks.step(f"write {path}"):
        if ranks.is_first:
            mine.update(format=_FORMAT, extra=extra)
            mine["ranks"] = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in everyone if one]
            with replacing(path) as written:
                torch.save(mine, written)


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint of save() into a model and an optimizer.

    All ranks call it; only the first one reads the file, and the others need not have it. On as many ranks
    as it was saved by, training continues with the same bits. On another number nothing that a rank had
    kept for later steps is lost. It also works in one process that has not called init().

    Args:
        path: the file, on a disk of the first rank.
        model: gets the parameters.
        optimizer: gets the state.
        weights_only: as of torch.load(): False if extra values are objects of your own classes.

    Returns:
        what else was saved, as a dictionary.

    Raises:
        CheckpointError: a rank has failed; raised on all ranks.

    Example::

        epoch = hvd.load("run.pt", model=model, optimizer=optimizer)["epoch"]
    """
    ranks = AllRanks(_process_set_of(optimizer))
    common: dict[str, Any] = {}
    states: list[bytes] = []
    with ranks.step(f"read {path}"):
        if ranks.is_first:
            common, states = read(path, ranks.size, weights_only)
    common = ranks.from_first(common)
    state = ranks.scatter_from_first(states)
    with ranks.step("take over the state"):
        if model is not None:
            model.load_state_dict(common["model"])
        if optimizer is not None:
            loaded = dict(common["optimizer"])
            if state:
                loaded["dad"] = as_tensors(from_bytes(state))
            optimizer.load_state_dict(loaded)
    return common["extra"]


def read(
    path: str | os.PathLike[str], size: int, weights_only: bool = True
) -> tuple[dict[str, Any], list[bytes]]:
    """What all ranks have in common of a checkpoint, and the state of each of `size` ranks."""
    common = torch.load(path, map_location="cpu", weights_only=weights_only)
    if not isinstance(common, dict) or common.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by hvd.save()")
    states = [from_bytes(one.numpy().tobytes()) for one in common.pop("ranks")]
    return common, [to_bytes(one) for one in merge(states, size)] if states else []


def _process_set_of(optimizer: Any) -> ProcessSet:
    sync = getattr(optimizer, "_dad", None)
    return global_process_set if sync is None else sync.process_set
