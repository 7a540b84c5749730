"""Shapes for tracing, and gradients, of the ops in torch_ops/ops/register.cc.

With these torch.compile keeps a collective in its graph. The gradients are Horovod's: that of
allgather and broadcast is the mean over ranks, that of reducescatter with Average is the gathered
gradient and with Sum is `size` times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._library.effects import EffectType

from dad import basics
from dad.torch._load import _torch  # noqa: F401  registers the ops

Tensors = Sequence[torch.Tensor]


# Shapes. A number of rows that depends on rank, size or the other ranks is left open: compiled graphs
# are cached on disk and shared by ranks and jobs.


def _with_open_rows(tensors: Tensors) -> list[torch.Tensor]:
    context = torch.library.get_ctx()
    return [t.new_empty((context.new_dynamic_size(), *t.shape[1:])) for t in tensors]


def _with_rows(tensors: Tensors, rows: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.new_empty((count, *tensor.shape[1:])) for tensor, count in zip(tensors, rows, strict=True)]


@torch.library.register_fake("dad::allreduce")
def _(
    tensors: Tensors,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    uncompressed_bytes: Sequence[int],
) -> Any:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


@torch.library.register_fake("dad::reducescatter")
def _(tensors: Tensors, name: str, op: int, prescale: float, postscale: float, process_set: int) -> Any:
    return _with_open_rows(tensors)


@torch.library.register_fake("dad::allgather")
def _(tensors: Tensors, name: str, process_set: int) -> Any:
    return _with_open_rows(tensors)


@torch.library.register_fake("dad::allgather_backward")
def _(grads: Tensors, rows: Sequence[int], process_set: int) -> Any:
    return _with_rows(grads, rows)


@torch.library.register_fake("dad::reducescatter_backward")
def _(
    grads: Tensors, rows: Sequence[int], op: int, prescale: float, postscale: float, process_set: int
) -> Any:
    return _with_rows(grads, rows)


@torch.library.register_fake("dad::broadcast")
def _(tensor: torch.Tensor, root_rank: int, name: str, process_set: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@torch.library.register_fake("dad::broadcast_backward")
def _(grad: torch.Tensor, root_rank: int, process_set: int) -> torch.Tensor:
    return grad.new_empty(grad.shape)


@torch.library.register_fake("dad::alltoall")
def _(tensor: torch.Tensor, splits: torch.Tensor, name: str, process_set: int) -> Any:
    (output,) = _with_open_rows([tensor])
    return [output, splits.new_empty(splits.shape)]


@torch.library.register_fake("dad::alltoall_backward")
def _(grad: torch.Tensor, received_splits: torch.Tensor, rows: int, process_set: int) -> torch.Tensor:
    return grad.new_empty((rows, *grad.shape[1:]))


# Gradients.


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, ctx.op, ctx.prescale, ctx.postscale, ctx.process_set = inputs[:6]
    ctx.rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]


def _require_linear(op: int, what: str) -> None:
    if op not in (basics.Sum, basics.Average):
        raise ValueError(f"{what} has a gradient for op=Sum and op=Average only")


def _allreduce_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    _require_linear(ctx.op, "allreduce")
    scales = (ctx.prescale, ctx.postscale)
    reduced = torch.ops.dad.allreduce(list(grads), "", ctx.op, *scales, ctx.process_set, [])
    return reduced, None, None, None, None, None, None


def _reducescatter_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    _require_linear(ctx.op, "reducescatter")
    gathered = torch.ops.dad.reducescatter_backward(
        list(grads), ctx.rows, ctx.op, ctx.prescale, ctx.postscale, ctx.process_set
    )
    return gathered, None, None, None, None, None


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, ctx.process_set = inputs
    ctx.rows = [tensor.shape[0] for tensor in tensors]


def _allgather_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    return torch.ops.dad.allgather_backward(list(grads), ctx.rows, ctx.process_set), None, None


def _keep_root(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.root_rank, _, ctx.process_set = inputs


def _broadcast_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.dad.broadcast_backward(grad, ctx.root_rank, ctx.process_set), None, None, None


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    tensor, _, _, ctx.process_set = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _alltoall_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    (received,) = ctx.saved_tensors
    back = torch.ops.dad.alltoall_backward(grads[0], received, ctx.rows, ctx.process_set)
    return back, None, None, None


for _name, _backward, _setup in (
    ("allreduce", _allreduce_backward, _keep_reduction),
    ("reducescatter", _reducescatter_backward, _keep_reduction),
    ("allgather", _allgather_backward, _keep_rows),
    ("broadcast", _broadcast_backward, _keep_root),
    ("alltoall", _alltoall_backward, _keep_splits),
):
    torch.library.register_autograd(f"dad::{_name}", _backward, setup_context=_setup)

# A collective is more than its result: ranks would wait for ever for one that a compiler has dropped
# because this rank does not use the result, or has moved behind another.
for _name in (
    "allreduce",
    "reducescatter",
    "reducescatter_backward",
    "allgather",
    "allgather_backward",
    "broadcast",
    "broadcast_backward",
    "alltoall",
    "alltoall_backward",
):
    torch.library._register_effectful_op(f"dad::{_name}", EffectType.ORDERED)
