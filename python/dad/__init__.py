"""dad: data-parallel training that sends less and waits less, with Horovod's API.

Use `import dad.torch as hvd` in a script; what is here needs no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dad._version import __version__
from dad.errors import (
    DadInternalError,
    Error,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    ReplicaError,
)

if TYPE_CHECKING:
    from dad.basics import reset_stats, stats
    from dad.compression import Compression
    from dad.runner.api import run

__all__ = [
    "Compression",
    "DadInternalError",
    "Error",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "ReplicaError",
    "__version__",
    "check_replicas",
    "reset_stats",
    "run",
    "stats",
]

# Loaded on first use: the launcher imports this package where no library has been built.
_LAZY = {
    "Compression": "dad.compression",
    "reset_stats": "dad.basics",
    "run": "dad.runner.api",
    "stats": "dad.basics",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dad' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def check_replicas(model: Any) -> None:
    """Raises ReplicaError, naming tensors and ranks, unless `model` has the same bits on all ranks."""
    from dad.torch.replicas import check_replicas as check

    check(model)
