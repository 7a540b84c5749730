"""What a rank keeps between the rounds of local steps, as one tensor of bytes."""

from __future__ import annotations

import io
from typing import Any

import torch


def to_tensor(state: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def from_tensor(data: torch.Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def with_inner_state(state: dict[str, Any]) -> dict[str, Any]:
    """What a rank keeps, with the state of its own optimizer, which is another one on each rank."""
    return {**state["dad"], "inner": to_tensor(state["state"])}
