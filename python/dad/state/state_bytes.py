"""What a rank keeps between steps, as bytes, for checkpoints that hold arrays instead of Python objects."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dad.state.states import merge

_TEXT = "text"


def to_bytes(saved: dict[str, Any]) -> bytes:
    """Encodes dicts and lists of numbers, strings and arrays."""
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if isinstance(value, dict):
            return {"dict": {key: plain(part) for key, part in value.items()}}
        return [plain(part) for part in value] if isinstance(value, list | tuple) else value

    text = json.dumps(plain(saved)).encode()
    file = io.BytesIO()
    named: dict[str, Any] = {_TEXT: np.frombuffer(text, np.uint8)}
    named |= {str(i): array for i, array in enumerate(arrays)}
    np.savez(file, **named)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:

        def full(value: Any) -> Any:
            if isinstance(value, list):
                return [full(part) for part in value]
            if not isinstance(value, dict):
                return value
            if "array" in value:
                return arrays[str(value["array"])]
            return {key: full(part) for key, part in value["dict"].items()}

        saved: dict[str, Any] = full(json.loads(arrays[_TEXT].tobytes()))
        return saved


def of_all_ranks(states: Sequence[bytes]) -> bytes:
    """The states of all ranks as one; empty if no rank keeps anything."""
    kept = [from_bytes(one) for one in states if one]
    return to_bytes({"ranks": kept}) if kept else b""


def for_rank(data: bytes, rank: int, size: int) -> dict[str, Any]:
    """The state with which a rank of `size` continues: its own, if the states of all ranks are there."""
    saved = from_bytes(data)
    return merge(saved["ranks"], size)[rank] if "ranks" in saved else saved
