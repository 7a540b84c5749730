"""Elastic training: ranks join and leave while a job runs. This package holds what all frameworks share.

`hvd.elastic` of dad.torch, dad.tensorflow and dad.keras has the states of their models; docs/elastic.md shows
how to use them.
"""

from __future__ import annotations

import importlib
from typing import Any

# Loaded on first use: the launcher's modules are needed even if the core is absent.
_PLACES = {
    "HostUpdateResult": "wire",
    "ObjectState": "state",
    "State": "state",
    "notification_manager": "notification",
    "run": "run",
    "run_fn": "run",
}

__all__ = ["HostUpdateResult", "ObjectState", "State", "notification_manager", "run", "run_fn"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dad.elastic.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
