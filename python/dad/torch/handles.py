"""Collectives that are in flight: starting them, and waiting for what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dad.torch._load import _torch

# What synchronize() takes: a number, or what sparse_allreduce_async() returned.
Handle = int | Callable[..., torch.Tensor]


def some(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tensors = list(tensors)
    if not tensors:
        raise ValueError("a grouped collective needs at least one tensor")
    return tensors


def all_tensors(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            what = type(value).__name__
            raise ValueError(f"expected a torch.Tensor, got {what}; torch.as_tensor() makes one of it")
    return list(values)


# Named collectives that were started and not waited for: by process set, kind and name, and by handle.
_in_flight: dict[tuple[int, int, str], int] = {}
_names: dict[int, tuple[int, int, str]] = {}


def submit(
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
        if not is_done(earlier):
            raise ValueError(
                f'"{name}": a tensor of this name is in flight already; names must be unique until a '
                "collective is done"
            )
        ended(earlier)
    all_tensors(tensors)
    request = _torch.Collective(kind, tensors)
    request.grouped, request.in_place = grouped, in_place
    request.name = name or ""
    request.op, request.root_rank = op, root_rank
    request.prescale, request.postscale = prescale, postscale
    request.process_set = process_set
    request.splits = splits
    handle = _torch.submit(request)
    if name:
        _in_flight[key] = handle
        _names[handle] = key
    return handle


def is_done(handle: int) -> bool:
    try:
        return _torch.poll(handle)
    except ValueError:  # given up by those who started it
        return True


def ended(handle: int) -> None:
    key = _names.pop(handle, None)
    if key is not None:
        _in_flight.pop(key, None)


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once.

    Args:
        handle: of an asynchronous collective. Of CUDA tensors the device must have the result, too.

    Returns:
        True if it would.

    Raises:
        ValueError: the handle was synchronized already.

    Example::

        handle = hvd.allreduce_async(tensor)
        while not hvd.poll(handle):
            do_something_else()
    """
    return _torch.poll(handle)


def synchronize(handle: Handle, *, timeout: float | None = None) -> Any:
    """Waits for an asynchronous collective and returns its result; the handle ends.

    For CUDA tensors it returns when the work is on its way to the device, and makes the current stream of
    that device wait for the result: kernels that come later see it, the host does not wait.

    Args:
        handle: what a function with `_async` in its name has returned.
        timeout: seconds after which to give up. The collective goes on, and the handle can be waited
            for again.

    Returns:
        a tensor, a list for a grouped collective, (rows, received splits) for alltoall.

    Raises:
        TimeoutError: the time is up.
        ValueError: `timeout` or the handle is not possible.
        MismatchError: ranks have passed different shapes, dtypes or options.
        HorovodInternalError: a rank was lost.

    Example::

        handle = hvd.allreduce_async(tensor, name="x")
        mean = hvd.synchronize(handle)
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout={timeout}: expected seconds, at least 0")
    if callable(handle):
        return handle(timeout)
    try:
        finished = _torch.wait(handle, timeout)
    except TimeoutError:
        raise
    except BaseException:
        ended(handle)
        raise
    ended(handle)
    if finished.received_splits:
        return finished.output, torch.tensor(finished.received_splits, dtype=torch.int32)
    return finished.output
