"""Bringing all ranks to the same state: parameters, optimizer state, any object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch

from dad.basics import rank
from dad.local_steps.saved import is_local
from dad.log import log
from dad.process_sets import ProcessSet, global_process_set
from dad.torch.handles import synchronize
from dad.torch.move_ops import allgather, broadcast_, broadcast_async_


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives all ranks the parameters of one of them, in place.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(), or lists of these.
        root_rank: whose values they are.

    Raises:
        ValueError: `params` is or has something else.
        MismatchError: ranks have passed different parameters.

    Example::

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | bytes | torch.Tensor):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"params of type {type(params).__name__}: give a state_dict or a list of parameters")
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"params[{name!r}] is a {type(tensor).__name__}, not a tensor")
    # Not the bare name, which is that of the gradient: stats() keeps them apart, as Horovod's timeline does.
    _broadcast_all(
        [(name and f"broadcast.{name}", tensor) for name, tensor in named if tensor is not None], root_rank
    )


def _broadcast_all(named: list[tuple[str | None, torch.Tensor]], root_rank: int) -> None:
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


class _TensorSlot:
    """Stands for a tensor in a pickled state; the tensor itself follows by broadcast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _map_tree(tree: Any, kind: type, function: Any) -> Any:
    """A copy of nested dicts, lists and tuples with function(leaf) for the leaves of that type."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_tree(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [_map_tree(value, kind, function) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives all ranks the state and options of one rank's optimizer.

    It works for any optimizer: structure, numbers and None travel pickled, tensors by broadcast.

    Args:
        optimizer: a torch.optim.Optimizer, wrapped or not.
        root_rank: whose state it is.
        model: accepted for Horovod's sake.

    Example::

        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    is_root = rank() == root_rank
    tensors: list[torch.Tensor] = []

    def leave_slot(tensor: torch.Tensor) -> _TensorSlot:
        tensors.append(tensor)
        return _TensorSlot(tensor)

    def fill_slot(slot: _TensorSlot) -> torch.Tensor:
        tensors.append(torch.empty(slot.shape, dtype=slot.dtype))
        return tensors[-1]

    state = optimizer.state_dict() if is_root else {}
    keeps = "dad" in state  # for later steps, which is its own
    if keeps and is_local(state["dad"]):
        state = {key: value for key, value in state.items() if key != "dad"}
    elif keeps:
        if state["dad"]["states"] or state["dad"]["kept"]:
            log.warning(
                "broadcast_optimizer_state() gives all ranks the state of rank %d: what they had kept "
                "themselves for later steps is lost. For checkpoints use hvd.save() and hvd.load(), which "
                "keep the state of all ranks",
                root_rank,
            )
        state = {**state, "dad": {**state["dad"], "states": {}, "kept": {}}}
    structure = _map_tree(state, torch.Tensor, leave_slot) if is_root else None
    structure = broadcast_object(structure, root_rank, name="optimizer_state")
    if not is_root:
        state = _map_tree(structure, _TensorSlot, fill_slot)
    _broadcast_all([(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if not is_root:
        optimizer.load_state_dict(state)
    elif keeps:
        optimizer._dad.doubt()


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gives all ranks the object of one of them; it travels pickled.

    Args:
        obj: anything that cloudpickle takes. On the other ranks it is not looked at.
        root_rank: whose object it is.
        name: of the collective, the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        the root's object.

    Example::

        settings = hvd.broadcast_object(settings, root_rank=0)
    """
    # Not the type of obj, as in Horovod: ranks that have only None to give would use another name.
    name = name or "broadcast_object"
    is_root = rank() == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    count = torch.tensor([data.numel()])
    broadcast_(count, root_rank, f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(count), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives all ranks the objects of all of them; they travel pickled.

    Args:
        obj: anything that cloudpickle takes.
        name: of the collective, the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        the list of objects, by rank.

    Example::

        hosts = hvd.allgather_object(socket.gethostname())
    """
    name = name or "allgather_object"
    data = _to_bytes(obj)
    counts = allgather(torch.tensor([data.numel()]), name=f"{name}.size", process_set=process_set).tolist()
    everything = allgather(data, name=f"{name}.data", process_set=process_set)
    return [cloudpickle.loads(piece.numpy().tobytes()) for piece in everything.split(counts)]
