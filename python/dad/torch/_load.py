"""Loads dad._lib._torch, after a look at what it was built for."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall . (in dad's source directory)"


def check_versions(built_for: str | None, installed: str) -> None:
    """ImportError in one line where torch is not the one that the library was built for: loading it
    would end in an undefined symbol."""
    if built_for is None:
        raise ImportError(f"dad was built without torch; to build it for torch {installed}: {_REBUILD}")
    if built_for != installed:
        raise ImportError(f"dad was built for torch {built_for}, but torch {installed} is loaded: {_REBUILD}")


_info = Path(__file__).parents[1] / "_lib" / "build_info.json"
if _info.exists():
    check_versions(json.loads(_info.read_text()).get("torch"), torch.__version__)

from dad._lib import _torch  # noqa: E402  only after the check

__all__ = ["_torch"]
