"""The collectives that reduce tensors, join() and barrier(): Horovod's names and argument order.

The blocking forms without underscore are torch ops: differentiable, and kept in the graph by
torch.compile. The `_async` forms return a handle for poll() and synchronize(). The forms that end
with an underscore write the result into the tensor they are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dad._lib import _core
from dad.arguments import reduce_op, scatter_op, set_id
from dad.basics import Average, Sum
from dad.local_steps.joining import prepare_join
from dad.process_sets import ProcessSet, global_process_set
from dad.torch import graph_ops  # noqa: F401  registers shapes and gradients
from dad.torch._load import _torch
from dad.torch.compression import Compression, compressor
from dad.torch.handles import all_tensors, ended, some, submit, synchronize
from dad.torch.move_ops import allgather_async

Tensors = Sequence[torch.Tensor]
_ALLREDUCE = _torch.KINDS["allreduce"]
_REDUCESCATTER = _torch.KINDS["reducescatter"]
_BARRIER = _torch.KINDS["barrier"]
_JOIN = _torch.KINDS["join"]


def _reduce_async(
    kind: int,
    tensors: list[torch.Tensor],
    grouped: bool,
    in_place: bool,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> int:
    number = set_id(process_set)
    return submit(kind, tensors, grouped, in_place, name, op, -1, prescale, postscale, number)


# allreduce


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts allreduce() and returns at once.

    Arguments and errors are those of allreduce().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.allreduce_async(tensor, name="x")
        result = hvd.synchronize(handle)
    """
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE, [tensor], False, False, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts allreduce_(), which writes the result into `tensor`, and returns at once.

    Arguments and errors are those of allreduce().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.allreduce_async_(tensor, name="x")
        hvd.synchronize(handle)
    """
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE, [tensor], False, True, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over the ranks, by default to their mean.

    It is differentiable, and stays in the graph of torch.compile.

    Args:
        tensor: is not modified.
        average: deprecated: use `op`.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Adasum, Min, Max or Product. None: Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        a tensor of the same shape and dtype, with the same bits on all ranks.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        mean = hvd.allreduce(loss.detach(), name="loss")
        total = hvd.allreduce(torch.tensor(count), op=hvd.Sum)
    """
    (reduced,) = _reduce(
        torch.ops.dad.allreduce,
        [tensor],
        name,
        compression,
        reduce_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return reduced


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over the ranks in place: the result is written into `tensor`.

    Arguments, result and errors are those of allreduce().
    """
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts grouped_allreduce() and returns at once.

    Arguments and errors are those of grouped_allreduce().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.grouped_allreduce_async(tensors, name="x")
        result = hvd.synchronize(handle)
    """
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE,
        some(tensors),
        True,
        False,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts grouped_allreduce_(), which writes into the tensors, and returns at once.

    Arguments and errors are those of grouped_allreduce().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.grouped_allreduce_async_(tensors, name="x")
        hvd.synchronize(handle)
    """
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE,
        some(tensors),
        True,
        True,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors, which travel together, over the ranks.

    They are reduced together or not at all.

    Args:
        tensors: at least one; they are not modified.
        average: deprecated: use `op`.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Adasum, Min, Max or Product. None: Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        the list of results.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        losses, counts = hvd.grouped_allreduce([losses, counts], name="metrics")
    """
    return _reduce(
        torch.ops.dad.allreduce,
        some(tensors),
        name,
        compression,
        reduce_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors over the ranks in place.

    Arguments, result and errors are those of grouped_allreduce().
    """
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _reduce(
    graph_op: Any,
    tensors: list[torch.Tensor],
    name: str | None,
    compression: Any,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    chosen = compressor(compression, name or "")
    all_tensors(tensors)
    compressed = [chosen.compress(tensor) for tensor in tensors]
    # What stats() compares an allreduce with.
    sizes = [[tensor.numel() * tensor.element_size() for tensor in tensors]]
    reduced = graph_op(
        [tensor for tensor, _ in compressed],
        name or "",
        op,
        float(prescale),
        float(postscale),
        set_id(process_set),
        *(sizes if graph_op is torch.ops.dad.allreduce else []),
    )
    return [chosen.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[..., torch.Tensor]:
    """Starts the sum or mean of sparse COO tensors.

    Args:
        tensor: a sparse COO tensor.
        name: of the tensor, the same on all ranks.
        op: Sum or Average.
        process_set: the ranks that take part.

    Returns:
        a function: call it, or give it to synchronize(), for the coalesced result.

    Raises:
        ValueError: `op` is neither Sum nor Average.

    Example::

        finish = hvd.sparse_allreduce_async(gradient, name="embedding", op=hvd.Average)
        gradient = hvd.synchronize(finish)
    """
    if op not in (Sum, Average):
        raise ValueError("sparse tensors can be reduced with op=Sum and op=Average")
    # Rows of the gathered tensors are entries, so indices travel with one entry per row.
    handles = [
        allgather_async(tensor._indices().t(), name=f"{name}.indices", process_set=process_set),
        allgather_async(tensor._values(), name=f"{name}.values", process_set=process_set),
    ]
    parts: list[torch.Tensor] = []

    def finish(timeout: float | None = None) -> torch.Tensor:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while len(parts) < len(handles):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                parts.append(synchronize(handles[len(parts)], timeout=left))
        except TimeoutError:
            raise
        except BaseException:
            # Both handles end, whichever of them fails.
            for handle in handles[len(parts) :]:
                _torch.forget(handle)
                ended(handle)
            raise
        indices, values = parts
        parts.clear()  # the handles have ended: a second call is an error
        if op == Average:
            values /= process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()

    return finish


# reducescatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts reducescatter() and returns at once.

    Arguments and errors are those of reducescatter().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.reducescatter_async(tensor)
        result = hvd.synchronize(handle)
    """
    op = scatter_op(op)
    return _reduce_async(
        _REDUCESCATTER, [tensor], False, False, name, op, prescale_factor, postscale_factor, process_set
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over the ranks and gives every rank some of its rows.

    Args:
        tensor: has at least one dimension.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        this rank's rows. Where they do not divide evenly, the lowest ranks get one more.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        mine = hvd.reducescatter(tensor, op=hvd.Sum)
    """
    scales = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *scales)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts grouped_reducescatter() and returns at once.

    Arguments and errors are those of grouped_reducescatter().

    Returns:
        a handle for poll() and synchronize().

    Example::

        handle = hvd.grouped_reducescatter_async(tensors)
        result = hvd.synchronize(handle)
    """
    op = scatter_op(op)
    return _reduce_async(
        _REDUCESCATTER,
        some(tensors),
        True,
        False,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters several tensors, which travel together.

    Args:
        tensors: at least one.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: it is
            numbered in the order of the calls.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        the list of this rank's rows.

    Raises:
        ValueError: an argument is not possible. The other ranks know nothing of it.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        mine = hvd.grouped_reducescatter([first, second])
    """
    return _reduce(
        torch.ops.dad.reducescatter,
        some(tensors),
        name,
        compression,
        scatter_op(op),
        prescale_factor,
        postscale_factor,
        process_set,
    )


# join, barrier


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so.

    Until then it takes part in the collectives of the other ranks with zeros or without rows. Call it after
    the last step where ranks have different numbers of batches.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        the last rank to join.

    Raises:
        HorovodInternalError: a rank was lost.

    Example::

        for batch in loader:
            train_step(batch)
        hvd.join()
    """
    prepare_join()
    return _torch.wait(_torch.submit(_torch.Collective(_JOIN))).value


def joins() -> int:
    """How many joins all ranks have come to: before each, some may have gone on without others."""
    return _core.joins()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have come here.

    Args:
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: a rank was lost.

    Example::

        hvd.barrier()
    """
    request = _torch.Collective(_BARRIER)
    request.name = "barrier"
    request.process_set = set_id(process_set)
    _torch.wait(_torch.submit(request))
