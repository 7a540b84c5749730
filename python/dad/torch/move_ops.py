"""The collectives that move tensors: allgather, broadcast and alltoall.

Names and argument order are Horovod's; ops.py says what blocking, asynchronous and in-place forms do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dad.arguments import set_id
from dad.basics import Sum
from dad.process_sets import ProcessSet, global_process_set
from dad.torch import graph_ops  # noqa: F401  registers shapes and gradients
from dad.torch._load import _torch
from dad.torch.handles import all_tensors, some, submit, synchronize

Tensors = Sequence[torch.Tensor]

_ALLGATHER = _torch.KINDS["allgather"]
_BROADCAST = _torch.KINDS["broadcast"]
_ALLTOALL = _torch.KINDS["alltoall"]


# allgather


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts allgather() and returns at once.

    Arguments and errors are those of allgather().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.allgather_async(tensor)
        result = hvd.synchronize(handle)
    """
    return submit(_ALLGATHER, [tensor], False, False, name, Sum, -1, 1.0, 1.0, set_id(process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins the ranks' tensors along their first dimension, in the order of ranks.

    Args:
        tensor: the first dimension may differ between ranks, and may be 0.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        process_set: the ranks that take part.

    Returns:
        all rows, on every rank.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        predictions = hvd.allgather(predictions)
    """
    return torch.ops.dad.allgather(all_tensors([tensor]), name or "", set_id(process_set))[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts grouped_allgather() and returns at once.

    Arguments and errors are those of grouped_allgather().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.grouped_allgather_async(tensors)
        result = hvd.synchronize(handle)
    """
    return submit(_ALLGATHER, some(tensors), True, False, name, Sum, -1, 1.0, 1.0, set_id(process_set))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gathers several tensors, which travel together.

    Args:
        tensors: at least one; first dimensions may differ between ranks.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        process_set: the ranks that take part.

    Returns:
        the list of results.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        inputs, labels = hvd.grouped_allgather([inputs, labels])
    """
    return torch.ops.dad.allgather(all_tensors(some(tensors)), name or "", set_id(process_set))


# broadcast


def _broadcast_async(
    tensor: torch.Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    number = set_id(process_set)
    return submit(_BROADCAST, [tensor], False, in_place, name, Sum, root_rank, 1.0, 1.0, number)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts broadcast() and returns at once.

    Arguments and errors are those of broadcast().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.broadcast_async(tensor, root_rank=0)
        result = hvd.synchronize(handle)
    """
    return _broadcast_async(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts broadcast_(), which writes into `tensor`, and returns at once.

    Arguments and errors are those of broadcast().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.broadcast_async_(tensor, root_rank=0)
        hvd.synchronize(handle)
    """
    return _broadcast_async(tensor, True, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gives every rank the tensor of one of them.

    Args:
        tensor: has the same shape and dtype on all ranks; it is not modified.
        root_rank: whose tensor it is, as a rank of the job.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        process_set: the ranks that take part.

    Returns:
        the root's tensor.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        seed = hvd.broadcast(torch.tensor(seed), root_rank=0)
    """
    (tensor,) = all_tensors([tensor])
    return torch.ops.dad.broadcast(tensor, root_rank, name or "", set_id(process_set))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gives every rank the tensor of one of them, written into `tensor`.

    Arguments, result and errors are those of broadcast().
    """
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# alltoall


def _checked_splits(tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> torch.Tensor:
    """How many rows go to each rank: as given, else evenly."""
    if not (size := process_set.size()):
        raise ValueError("dad has not been initialized; call init() first")
    all_tensors([tensor])
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least one dimension")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits: {rows} rows cannot be divided evenly by {size} ranks")
        return torch.full((size,), rows // size, dtype=torch.int32)
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor(splits, dtype=torch.int32)
    if splits.dim() != 1 or len(splits) != size:
        raise ValueError(f"alltoall: splits has shape {list(splits.shape)}, expected one per rank: [{size}]")
    # While torch.compile traces, their values are not known; the core checks them.
    if not torch.compiler.is_compiling() and (bool((splits < 0).any()) or int(splits.sum()) != rows):
        raise ValueError(f"alltoall: splits {splits.tolist()} do not add up to the tensor's {rows} rows")
    return splits


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts alltoall() and returns at once.

    Arguments and errors are those of alltoall(). synchronize() returns the rows received and how many came
    from each rank.

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.alltoall_async(tensor, splits=[1, 3])
        rows, counts = hvd.synchronize(handle)
    """
    number = set_id(process_set)
    rows = _checked_splits(tensor, splits, process_set).tolist()
    return submit(_ALLTOALL, [tensor], False, False, name, Sum, -1, 1.0, 1.0, number, rows)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends some rows of a tensor to each rank.

    Args:
        tensor: has at least one dimension.
        splits: how many rows go to each rank. None: the same number to all.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        process_set: the ranks that take part.

    Returns:
        the rows received, in the order of ranks; with `splits` also how many came from each rank.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        rows, counts = hvd.alltoall(tensor, splits=[1, 3])  # on two ranks
    """
    number = set_id(process_set)
    rows = _checked_splits(tensor, splits, process_set)
    output, received = torch.ops.dad.alltoall(tensor, rows, name or "", number)
    return output if splits is None else (output, received)
