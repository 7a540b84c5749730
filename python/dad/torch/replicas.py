"""Are the replicas of a model the same, bit by bit?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from dad.replicas import raise_unless_equal
from dad.torch.functions import allgather_object


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor.detach().cpu().contiguous()
    header = f"{dense.dtype} {list(dense.shape)} "
    return hashlib.blake2b(header.encode() + dense.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    items = model if isinstance(model, dict) else model.state_dict()
    return {name: value for name, value in items.items() if isinstance(value, torch.Tensor)}


def check_replicas(model: Any) -> None:
    """Raises ReplicaError, naming tensors and ranks, unless all ranks have the same bits.

    model: a torch.nn.Module or a dict of tensors.
    """
    digests = {name: _digest(tensor) for name, tensor in _tensors(model).items()}
    raise_unless_equal(allgather_object(digests, name="check_replicas"))
