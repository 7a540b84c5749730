"""Shapes for tracing, and gradients, of the ops in torch_ops/register.cc.

With these torch.compile keeps a collective in its graph. The gradients are Horovod's: that of
allgather and broadcast is the mean over ranks, that of reducescatter with Average is the gathered
gradient and with Sum is `size` times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dad import basics
from dad._lib import _core
from dad.torch._load import _torch  # noqa: F401  registers the ops

Tensors = Sequence[torch.Tensor]


def _rank_in(process_set: int) -> tuple[int, int]:
    """This process's place in a set, and the size of the set."""
    members = list(_core.process_set_ranks(process_set))
    if basics.rank() not in members:
        raise ValueError(f"rank {basics.rank()} is not in process set {process_set}")
    return members.index(basics.rank()), len(members)


# Shapes. Rows that only the other ranks know become a size that the tracer leaves open.


@torch.library.register_fake("dad::allreduce")
def _(tensors: Tensors, name: str, op: int, prescale: float, postscale: float, process_set: int) -> Any:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


@torch.library.register_fake("dad::reducescatter")
def _(tensors: Tensors, name: str, op: int, prescale: float, postscale: float, process_set: int) -> Any:
    rank, size = _rank_in(process_set)
    # The remainder goes to the lowest ranks.
    return [t.new_empty(((t.shape[0] + size - 1 - rank) // size, *t.shape[1:])) for t in tensors]


@torch.library.register_fake("dad::allgather")
def _(tensors: Tensors, name: str, process_set: int) -> Any:
    context = torch.library.get_ctx()
    return [t.new_empty((context.new_dynamic_size(), *t.shape[1:])) for t in tensors]


@torch.library.register_fake("dad::allgather_backward")
def _(grads: Tensors, rows: Sequence[int], process_set: int) -> Any:
    return [grad.new_empty((count, *grad.shape[1:])) for grad, count in zip(grads, rows, strict=True)]


@torch.library.register_fake("dad::broadcast")
def _(tensor: torch.Tensor, root_rank: int, name: str, process_set: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@torch.library.register_fake("dad::alltoall")
def _(tensor: torch.Tensor, splits: torch.Tensor | None, name: str, process_set: int) -> Any:
    rows = torch.library.get_ctx().new_dynamic_size()
    _, size = _rank_in(process_set)
    received = splits.new_empty(size) if splits is not None else tensor.new_empty(size, dtype=torch.int32)
    return tensor.new_empty((rows, *tensor.shape[1:])), received


@torch.library.register_fake("dad::alltoall_backward")
def _(grad: torch.Tensor, received_splits: torch.Tensor, rows: int, process_set: int) -> torch.Tensor:
    return grad.new_empty((rows, *grad.shape[1:]))


# Gradients.


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.op, ctx.prescale, ctx.postscale, ctx.process_set = inputs


def _require_linear(op: int, what: str) -> None:
    if op not in (basics.Sum, basics.Average):
        raise ValueError(f"{what} has a gradient for op=Sum and op=Average only")


def _allreduce_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    _require_linear(ctx.op, "allreduce")
    reduced = torch.ops.dad.allreduce(list(grads), "", ctx.op, ctx.prescale, ctx.postscale, ctx.process_set)
    return reduced, None, None, None, None, None


def _reducescatter_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    _require_linear(ctx.op, "reducescatter")
    factor = ctx.prescale * ctx.postscale
    if ctx.op == basics.Sum:
        factor *= _rank_in(ctx.process_set)[1]
    grads = [grad * factor for grad in grads] if factor != 1 else list(grads)
    return torch.ops.dad.allgather(grads, "", ctx.process_set), None, None, None, None, None


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, ctx.process_set = inputs
    ctx.rows = [tensor.shape[0] for tensor in tensors]


def _allgather_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    return torch.ops.dad.allgather_backward(list(grads), ctx.rows, ctx.process_set), None, None


def _keep_root(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.root_rank, _, ctx.process_set = inputs


def _broadcast_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (mean,) = torch.ops.dad.allreduce([grad], "", basics.Average, 1.0, 1.0, ctx.process_set)
    if basics.rank() != ctx.root_rank:
        mean = torch.zeros_like(mean)
    return mean, None, None, None


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensor, _, _, ctx.process_set = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _alltoall_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (received,) = ctx.saved_tensors
    back = torch.ops.dad.alltoall_backward(grad, received, ctx.rows, ctx.process_set)
    return back, None, None, None


for _name, _backward, _setup in (
    ("allreduce", _allreduce_backward, _keep_reduction),
    ("reducescatter", _reducescatter_backward, _keep_reduction),
    ("allgather", _allgather_backward, _keep_rows),
    ("broadcast", _broadcast_backward, _keep_root),
    ("alltoall", _alltoall_backward, _keep_splits),
):
    torch.library.register_autograd(f"dad::{_name}", _backward, setup_context=_setup)
