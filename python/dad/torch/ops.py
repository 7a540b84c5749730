"""The collectives: Horovod's names and argument order.

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

Tensors = Sequence[torch.Tensor]
# What synchronize() takes: a number, or what sparse_allreduce_async() returned.
Handle = int | Callable[..., torch.Tensor]

_ALLREDUCE = _torch.KINDS["allreduce"]
_ALLGATHER = _torch.KINDS["allgather"]
_BROADCAST = _torch.KINDS["broadcast"]
_ALLTOALL = _torch.KINDS["alltoall"]
_REDUCESCATTER = _torch.KINDS["reducescatter"]
_BARRIER = _torch.KINDS["barrier"]
_JOIN = _torch.KINDS["join"]


def _some(tensors: Tensors) -> list[torch.Tensor]:
    tensors = list(tensors)
    if not tensors:
        raise ValueError("a grouped collective needs at least one tensor")
    return tensors


def _all_tensors(values: Tensors) -> list[torch.Tensor]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            what = type(value).__name__
            raise ValueError(f"expected a torch.Tensor, got {what}; torch.as_tensor() makes one of it")
    return list(values)


# Named collectives that were started and not waited for: by process set, kind and name, and by handle.
_in_flight: dict[tuple[int, int, str], int] = {}
_names: dict[int, tuple[int, int, str]] = {}


def _submit(
    kind: int,
    tensors: list[torch.Tensor],
    grouped: bool,
    in_place: bool,
    name: str | None,
    op: int,
    root_rank: int,
    prescale: float,
    postscale: float,
    process_set: int,
    splits: Sequence[int] = (),
) -> int:
    key = (process_set, kind, name or "")
    earlier = _in_flight.get(key)
    if earlier is not None:
        # The core would say so too, but only to those who wait for the second one.
        if not _is_done(earlier):
            raise ValueError(
                f'"{name}": a tensor of this name is in flight already; names must be unique until a '
                "collective is done"
            )
        _ended(earlier)
    _all_tensors(tensors)
    handle = _torch.submit(
        kind,
        tensors,
        grouped=grouped,
        in_place=in_place,
        name=name or "",
        op=op,
        root_rank=root_rank,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
        splits=splits,
    )
    if name:
        _in_flight[key] = handle
        _names[handle] = key
    return handle


def _is_done(handle: int) -> bool:
    try:
        return _torch.poll(handle)
    except ValueError:  # given up by those who started it
        return True


def _ended(handle: int) -> None:
    key = _names.pop(handle, None)
    if key is not None:
        _in_flight.pop(key, None)


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
    return _submit(kind, tensors, grouped, in_place, name, op, -1, prescale, postscale, number)


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
    """Starts the reduction of a tensor over the ranks; `tensor` is not modified."""
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
    """allreduce_async in place."""
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
    """The reduction of a tensor over the ranks: by default their mean."""
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
    """allreduce in place."""
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
    """allreduce_async of several tensors that are reduced together or not at all."""
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE, _some(tensors), True, False, name, op, prescale_factor, postscale_factor, process_set
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
    """grouped_allreduce_async in place."""
    op = reduce_op(op, average)
    return _reduce_async(
        _ALLREDUCE, _some(tensors), True, True, name, op, prescale_factor, postscale_factor, process_set
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
    """allreduce of several tensors that are reduced together or not at all."""
    return _reduce(
        torch.ops.dad.allreduce,
        _some(tensors),
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
    """grouped_allreduce in place."""
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
    _all_tensors(tensors)
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
    """Starts the sum or mean of sparse COO tensors; call what it returns (or give it to
    synchronize) for the coalesced result."""
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
                _ended(handle)
            raise
        indices, values = parts
        parts.clear()  # the handles have ended: a second call is an error
        if op == Average:
            values /= process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()

    return finish


# allgather


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts the concatenation of the ranks' tensors; their first dimensions may differ."""
    return _reduce_async(_ALLGATHER, [tensor], False, False, name, Sum, 1.0, 1.0, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors one after the other; their first dimensions may differ."""
    return torch.ops.dad.allgather(_all_tensors([tensor]), name or "", set_id(process_set))[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    return _reduce_async(_ALLGATHER, _some(tensors), True, False, name, Sum, 1.0, 1.0, process_set)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    return torch.ops.dad.allgather(_all_tensors(_some(tensors)), name or "", set_id(process_set))


# broadcast


def _broadcast_async(
    tensor: torch.Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    number = set_id(process_set)
    return _submit(_BROADCAST, [tensor], False, in_place, name, Sum, root_rank, 1.0, 1.0, number)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts sending the root's tensor to all; `tensor` is not modified. root_rank is a global rank."""
    return _broadcast_async(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """broadcast_async in place."""
    return _broadcast_async(tensor, True, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's tensor, on all ranks."""
    (tensor,) = _all_tensors([tensor])
    return torch.ops.dad.broadcast(tensor, root_rank, name or "", set_id(process_set))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """broadcast in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# alltoall


def _checked_splits(tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> torch.Tensor:
    """How many rows go to each rank: as given, else evenly."""
    if not (size := process_set.size()):
        raise ValueError("dad has not been initialized; call init() first")
    _all_tensors([tensor])
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
    """Starts sending splits[i] rows to rank i; synchronize() gives the rows received and how many
    came from each rank."""
    number = set_id(process_set)
    rows = _checked_splits(tensor, splits, process_set).tolist()
    return _submit(_ALLTOALL, [tensor], False, False, name, Sum, -1, 1.0, 1.0, number, rows)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends splits[i] rows to rank i. Returns the rows received and, where splits are given, how many
    came from each rank."""
    number = set_id(process_set)
    rows = _checked_splits(tensor, splits, process_set)
    output, received = torch.ops.dad.alltoall(tensor, rows, name or "", number)
    return output if splits is None else (output, received)


# reducescatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduction of which every rank gets some rows, the lowest ranks one more where they do
    not divide evenly."""
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
    """This rank's rows of the reduced tensor."""
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
    op = scatter_op(op)
    return _reduce_async(
        _REDUCESCATTER, _some(tensors), True, False, name, op, prescale_factor, postscale_factor, process_set
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
    return _reduce(
        torch.ops.dad.reducescatter,
        _some(tensors),
        name,
        compression,
        scatter_op(op),
        prescale_factor,
        postscale_factor,
        process_set,
    )


# handles, join, barrier


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once; of CUDA tensors: whether the device has the result, too."""
    return _torch.poll(handle)


def synchronize(handle: Handle, *, timeout: float | None = None) -> Any:
    """Waits for an asynchronous collective and returns its result: a tensor, a list for a grouped one,
    (output, received splits) for alltoall. Raises what went wrong. Ends the handle.

    Of CUDA tensors it returns when the work is on its way to the device, and makes the current stream of
    that device wait for the result: kernels that come later see it, the host does not wait.

    timeout: seconds after which it gives up with a TimeoutError. The collective goes on, and the handle
    can be waited for again.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout={timeout}: expected seconds, at least 0")
    if callable(handle):
        return handle(timeout)
    try:
        output, received_splits, _ = _torch.wait(handle, timeout)
    except TimeoutError:
        raise
    except BaseException:
        _ended(handle)
        raise
    _ended(handle)
    if received_splits:
        return output, torch.tensor(received_splits, dtype=torch.int32)
    return output


def join(device: int = -1) -> int:
    """This rank has no more data: until all ranks have joined it takes part in the others' collectives
    with zeros. Returns the last rank to join. `device` is accepted for Horovod's sake."""
    prepare_join()
    _, _, last_rank = _torch.wait(_torch.submit(_JOIN, []))
    return last_rank


def joins() -> int:
    """How many joins all ranks have come to: before each, some may have gone on without others."""
    return _core.joins()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have come here."""
    number = set_id(process_set)
    _torch.wait(_torch.submit(_BARRIER, [], False, False, "barrier", Sum, -1, 1.0, 1.0, number))
