"""Tracking of parameters whose gradients are kept as segments (torch_ops/capture/capture.h).

Eager code needs nothing more: the dispatcher sees every op. A compiled graph is traced with tensors
that stand for the parameters, so there Dynamo has to name them. A tracked parameter carries a mark;
while Dynamo traces linear, conv1d to conv3d and embedding it asks the functions below, which put an
op with the parameter's id into the graph where they find the mark.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.nn import functional as F

from dad.torch._load import _torch

_MARK = "_dad_capture"


class _Mark:
    """On a tracked parameter. A copy of the parameter is not tracked, nor one that was saved with it:
    theirs is None."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _none, ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _none() -> None:
    return None


def track(param: torch.Tensor, mode: str, owner: int = 0) -> int:
    """Tracks a parameter, in eager code and in graphs that are compiled from now on; its id.
    mode: "off", "rows" (segments instead of the gradient), "rows_and_dense" (both), or "samples": as "rows",
    for those who look at single samples. Then the rows of a sample are adjacent where that can be done
    (Segment.even), and in eager code the parameters of norm layers have segments, too.
    owner: who takes the segments; a parameter that is tracked gets a new one."""
    number = _torch.capture_track(param, mode, owner)
    mark = getattr(param, _MARK, None)
    if mark is None or mark.number != number:
        setattr(param, _MARK, _Mark(number))
    _tell_dynamo()
    return number


def untrack(param: torch.Tensor, owner: int = 0) -> None:
    """Ends the tracking, unless another owner has taken over."""
    if _torch.capture_untrack(param, owner) and hasattr(param, _MARK):
        delattr(param, _MARK)


# What Dynamo traces. Each returns None where there is nothing to capture.


def _id(param: torch.Tensor | None) -> int:
    if param is None or not param.requires_grad:
        return -1
    mark = getattr(param, _MARK, None)
    return -1 if mark is None else mark.number


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    param: torch.Tensor,
    bias_param: torch.Tensor | None,
    begin: int,
) -> Any:
    """`weight` is the block of rows of `param` that starts at `begin`, and `bias` that of its bias."""
    number = _id(param)
    if number < 0 or weight.dim() != 2:
        return None
    rides = bias_param is not None and bias_param.shape == param.shape[:1]
    return torch.ops.dad.captured_linear(input, weight, bias, number, _id(bias_param) if rides else -1, begin)


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    number = _id(weight)
    if number < 0 or input.dim() != weight.dim():
        return None
    kernel = weight.shape[2:]
    dilations = _each(dilation, len(kernel))
    if padding == "same":
        borders = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        if any(border % 2 for border in borders):
            return None
        paddings = [border // 2 for border in borders]
    else:
        paddings = _each(0 if padding == "valid" else padding, len(kernel))
    return torch.ops.dad.captured_convolution(
        input, weight, bias, _each(stride, len(kernel)), paddings, dilations, groups, number, _id(bias)
    )


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    number = _id(weight)
    if number < 0 or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return torch.ops.dad.captured_embedding(weight, input, padding, number)


# Telling Dynamo. Its table of handlers is not public; without it compiled layers have dense gradients.
# A handler gets variables instead of values, and returns None to let Dynamo go on as without it.

_Handler = Callable[..., Any]


@functools.cache
def _tell_dynamo() -> None:
    try:
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()
    except (ImportError, AttributeError):
        return
    for original, handler in (
        (F.linear, _handle_linear),
        (torch.conv1d, functools.partial(_inline, _convolution)),
        (torch.conv2d, functools.partial(_inline, _convolution)),
        (torch.conv3d, functools.partial(_inline, _convolution)),
        (F.embedding, functools.partial(_inline, _embedding)),
        (F.multi_head_attention_forward, _handle_attention),
    ):
        handlers[original] = functools.partial(_handle, handler, handlers.get(original))


def _handle(
    handler: _Handler, otherwise: _Handler | None, variable: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    result = None if tx.output.export else handler(tx, *args, **kwargs)
    if result is None and otherwise is not None:
        return otherwise(variable, tx, *args, **kwargs)
    return result


def _inline(function: Callable[..., Any], tx: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    result = tx.inline_user_function_return(VariableTracker.build(tx, function), list(args), kwargs)
    return None if result.is_constant_none() else result


def _handle_linear(tx: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    from torch._dynamo.variables import ConstantVariable

    bias = ConstantVariable.create(None) if bias is None else bias
    param, begin = _block(tx, weight)
    bias_param, bias_begin = _block(tx, bias)
    if bias_begin != begin:
        bias_param = ConstantVariable.create(None)
    return _inline(_linear, tx, input, weight, bias, param, bias_param, ConstantVariable.create(begin))


def _block(tx: Any, variable: Any) -> tuple[Any, int]:
    """The parameter of which the variable is a block of rows by split() or chunk(), and the first row; else
    the variable itself."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    variable = variable.realize()
    if not isinstance(variable, TensorVariable) or variable.source is not None:
        return variable, 0
    item = variable.as_proxy().node
    if item.target is not operator.getitem or item.args[0].target not in ("split", "chunk"):
        return variable, 0
    pieces, number = item.args
    whole = pieces.args[0].meta.get("grapharg")
    if whole is None or len(pieces.args) != 2 or pieces.kwargs:
        return variable, 0
    begin = sum(piece.shape[0] for piece in pieces.meta["example_value"][:number])
    return VariableTracker.build(tx, whole.example, whole.source), begin


def _handle_attention(tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets Dynamo look into attention, which it takes as a whole otherwise, if a projection is tracked."""
    from torch._dynamo.variables import UserFunctionVariable

    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    names = ("in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    if not any(_inline(_is_tracked, tx, given[name]) is not None for name in names if name in given):
        return None
    return UserFunctionVariable(F.multi_head_attention_forward).call_function(tx, list(args), kwargs)


def _is_tracked(param: torch.Tensor | None) -> bool | None:
    return True if _id(param) >= 0 else None


for _name in ("keep_rows", "keep_patches", "keep_indexed"):
    torch.library._register_effectful_op(f"dad::{_name}", EffectType.ORDERED)
