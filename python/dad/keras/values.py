"""The collectives of Horovod's Keras module: on numbers, arrays and tensors, in eager mode."""

from __future__ import annotations

from typing import Any, NoReturn

from dad.basics import Average
from dad.keras.framework import framework


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = "none",
) -> Any:
    """Reduces a number, an array or a tensor over the ranks, by default to their mean.

    Args:
        value: what to reduce.
        name: of the value in errors and timelines, the same on all ranks.
        average: deprecated: use `op`.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        op: Average, Sum, Adasum, Min, Max or Product. None: Average.
        compression: none, fp16 or bf16: how the tensor travels.

    Returns:
        a tensor of Keras' backend.

    Example::

        accuracy = float(hvd.allreduce(accuracy, name="accuracy"))
    """
    return framework().collectives.allreduce(
        framework().tensor(value),
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins the ranks' values along their first dimension, in the order of ranks.

    Args:
        value: an array or a tensor; first dimensions may differ.
        name: of the value in errors and timelines, the same on all ranks.

    Returns:
        all rows, as a tensor of Keras' backend.

    Example::

        predictions = hvd.allgather(predictions)
    """
    return framework().collectives.allgather(framework().tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Gives every rank the value of one of them.

    Args:
        value: has the same shape and dtype on all ranks.
        root_rank: whose value it is.
        name: of the value in errors and timelines, the same on all ranks.

    Returns:
        the root's value, as a tensor of Keras' backend.

    Example::

        seed = int(hvd.broadcast(seed, root_rank=0))
    """
    return framework().collectives.broadcast(framework().tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces a value over the ranks and gives every rank some of its rows.

    Args:
        value: has at least one dimension.
        name: of the value in errors and timelines, the same on all ranks.
        op: Average, Sum, Min, Max or Product.

    Returns:
        this rank's rows, as a tensor of Keras' backend.

    Example::

        mine = hvd.reducescatter(values, op=hvd.Sum)
    """
    return framework().collectives.reducescatter(framework().tensor(value), name=name, op=op)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Gives all ranks the object of one of them; it travels pickled.

    Args:
        obj: anything that cloudpickle takes.
        root_rank: whose object it is.
        name: of the collective, the same on all ranks.

    Returns:
        the root's object.

    Example::

        settings = hvd.broadcast_object(settings, root_rank=0)
    """
    return framework().collectives.broadcast_object(obj, root_rank, name=name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gives all ranks the objects of all of them; they travel pickled.

    Args:
        obj: anything that cloudpickle takes.
        name: of the collective, the same on all ranks.

    Returns:
        the list of objects, by rank.

    Example::

        hosts = hvd.allgather_object(socket.gethostname())
    """
    return framework().collectives.allgather_object(obj, name=name)


def broadcast_variables(variables: Any, root_rank: int) -> None:
    """Gives all ranks the values of one rank's variables.

    Args:
        variables: of Keras, such as model.variables.
        root_rank: whose values they are.

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)
    """
    framework().broadcast_variables(list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Kept for scripts written for Horovod: Keras 3 has no global variables.

    Args:
        root_rank: not used.

    Raises:
        RuntimeError: always; it names broadcast_variables().

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)  # instead
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. "
        "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
    )
