"""Are the replicas of a model the same, bit by bit?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dad._lib import _core
from dad.state.replicas import Cures, raise_unless_equal
from dad.torch.functions import allgather_object

CURES = Cures(
    tensors="Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training",
    settings="Give all ranks the same settings, for example by "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0), and the same scheduler",
    outside="No DistributedOptimizer has it, so nothing keeps it equal: give its parameters to the "
    "optimizer, or leave them out of named_parameters= if ranks should differ",
)

# How a step is computed, not what it computes: ranks may differ in these.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor. One on a device is copied to the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def dense(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """The memory of those that can be compared bit by bit."""
    for name, tensor in named:
        if tensor.layout == torch.strided and not torch.nn.parameter.is_lazy(tensor):
            yield name, memory_of(tensor)


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The settings of each parameter group, as text."""
    found = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            text = _as_text(value)
            if key != "params" and key not in _WAYS and text is not None:
                found[f"{key} of parameter group {number}"] = text
    return found


def _as_text(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        parts = [_as_text(part) for part in value]
        return None if None in parts else f"({', '.join(part for part in parts if part is not None)})"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    items = model if isinstance(model, dict) else model.state_dict()
    return {name: value for name, value in items.items() if isinstance(value, torch.Tensor)}


def check_replicas(model: Any) -> None:
    """Compares a model on all ranks, buffers included; all ranks call it.

    Args:
        model: a torch.nn.Module or a dict of tensors.

    Raises:
        ReplicaError: bits differ; the message names tensors and ranks.

    Example::

        hvd.check_replicas(model)
    """
    digests = {
        name: f"{tensor.dtype} {list(tensor.shape)} {_core.digest(memory_of(tensor)):x}"
        for name, tensor in _tensors(model).items()
    }
    raise_unless_equal(allgather_object(digests, name="check_replicas"))
