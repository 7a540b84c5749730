"""dad: data-parallel training that sends less and waits less, with Horovod's API.

Use `import dad.torch as hvd` in a script; what is here needs no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dad._version import __version__
from dad.errors import (
    CheckpointError,
    DadInternalError,
    Error,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    ReplicaError,
)

if TYPE_CHECKING:
    from dad.basics import reset_stats, stats
    from dad.methods.compression import Compression
    from dad.planning.text import format_plan
    from dad.runner.api import run

__all__ = [
    "CheckpointError",
    "Compression",
    "DadInternalError",
    "Error",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "ReplicaError",
    "__version__",
    "check_replicas",
    "format_plan",
    "plan",
    "reset_stats",
    "run",
    "stats",
]

# Loaded on first use: the launcher imports this package where no library has been built.
_LAZY = {
    "Compression": "dad.methods.compression",
    "format_plan": "dad.planning.text",
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


def plan(
    model: Any,
    example_batch: Any,
    size: int = 8,
    link: str = "100mbit",
    compression: Any = None,
    loss: Any = None,
) -> list[dict[str, Any]]:
    """What `size` ranks would send for the model, and why: the table of optimizer.plan(), predicted from one
    forward and backward pass in this process. The model is not changed. format_plan() prints it.

    example_batch: what goes into the model on one rank, without labels: a tensor, or a tuple or dict of
        arguments.
    link: what a rank can send, such as 100mbit or 10gbit.
    compression: a method of Compression. None: what DAD_COMPRESSION says, else auto.
    loss: makes a number of the model's output. None: its `loss`, else the sum of its first tensor, or
        of all outputs of a model of Keras.
    """
    if hasattr(model, "get_weights") and not hasattr(model, "named_parameters"):  # Keras on TensorFlow
        from dad.tensorflow.dry_run import plan as dry_run
    else:
        from dad.torch.dry_run import plan as dry_run

    return dry_run(model, example_batch, size, link, compression, loss)


def check_replicas(model: Any) -> None:
    """Raises ReplicaError, naming tensors and ranks, unless `model` has the same bits on all ranks."""
    if hasattr(model, "get_weights"):  # of Keras
        from dad._keras.replicas import check_replicas as check
    else:
        from dad.torch.replicas import check_replicas as check

    check(model)
