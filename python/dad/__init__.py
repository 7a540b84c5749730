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
    from dad.observe.progress import Progress
    from dad.observe.tensorboard import TensorBoard
    from dad.planning.compare import Rows
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
    "Progress",
    "ReplicaError",
    "TensorBoard",
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
    "Progress": "dad.observe.progress",
    "TensorBoard": "dad.observe.tensorboard",
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
) -> Rows:
    """Predicts in one process what `size` ranks would send for a model, and why.

    It runs a forward and a backward pass; the model is not changed. As a list the result has the rows of
    optimizer.plan() for one method, which format_plan() prints. Printed by itself, it compares all methods:
    bytes and predicted times of a step and of each layer, and which method to begin with. `dad plan train.py`
    does the same for a whole script.

    Args:
        model: a torch.nn.Module or a model of Keras.
        example_batch: what goes into the model on one rank, without labels: a tensor, or a tuple or
            dict of arguments.
        size: the number of ranks.
        link: what a rank can send, and the delay one way if there is one: 10gbit, or 100mbit,25ms.
        compression: a method of Compression. None: what DAD_COMPRESSION says, else auto.
        loss: a function that makes a number of the model's output. None: the output's `loss`, else the
            sum of its first tensor, or of all outputs of a model of Keras.

    Returns:
        one dictionary per tensor, as docs/methods.md tells; `comparison` has the numbers of all methods.

    Raises:
        ValueError: an argument is not possible, or no number can be made of the output.

    Example::

        plan = dad.plan(model, torch.randn(32, 784), size=8, link="100mbit,25ms")
        print(plan)
        print(dad.format_plan(plan))
    """
    if hasattr(model, "get_weights") and not hasattr(model, "named_parameters"):  # Keras on TensorFlow
        from dad.tensorflow.dry_run import plan as dry_run
    else:
        from dad.torch.dry_run import plan as dry_run

    return dry_run(model, example_batch, size, link, compression, loss)


def check_replicas(model: Any) -> None:
    """Compares a model on all ranks, buffers included; all ranks call it.

    Args:
        model: a torch.nn.Module, a dict of tensors, or a model of Keras.

    Raises:
        ReplicaError: bits differ; the message names tensors and ranks.

    Example::

        dad.check_replicas(model)
    """
    if hasattr(model, "get_weights"):  # of Keras
        from dad._keras.replicas import check_replicas as check
    else:
        from dad.torch.replicas import check_replicas as check

    check(model)
