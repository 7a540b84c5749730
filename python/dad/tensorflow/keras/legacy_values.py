"""The collectives of Horovod's tf.keras module: on numbers, arrays and tensors, in eager mode."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import dad.tensorflow as hvd
from dad.basics import Average


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = "none",
) -> Any:
    """The reduction of a value over the ranks: by default their mean."""
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' values one after the other; their first dimensions may differ."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value, on all ranks."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the reduced value."""
    return hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)
