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
    """The reduction of a value over the ranks: by default their mean."""
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
    """The ranks' values one after the other; their first dimensions may differ."""
    return framework().collectives.allgather(framework().tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value, on all ranks."""
    return framework().collectives.broadcast(framework().tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the reduced value."""
    return framework().collectives.reducescatter(framework().tensor(value), name=name, op=op)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on all ranks; it travels pickled."""
    return framework().collectives.broadcast_object(obj, root_rank, name=name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank; they travel pickled."""
    return framework().collectives.allgather_object(obj, name=name)


def broadcast_variables(variables: Any, root_rank: int) -> None:
    """Gives all ranks the root's values of variables of Keras."""
    framework().broadcast_variables(list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Keras 3 has no global variables."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. "
        "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
    )
