"""BatchNorm with the statistics of the batch of all ranks together."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dad.basics import Sum, size
from dad.torch.handles import synchronize
from dad.torch.move_ops import allgather_async
from dad.torch.ops import allreduce_async

_layer_numbers = itertools.count()


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d on the joined batch of all ranks.

    Batches may be of unequal size. As with Horovod the gradients of weight and bias are those of this
    rank's rows; the optimizer reduces them like any other. Between the exchanges of local steps ranks use
    their own batches (docs/local_steps.md).

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: of the running statistics. None: their plain average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.

    Example::

        model = nn.Sequential(nn.Conv2d(3, 16, 3), hvd.SyncBatchNorm(16), nn.ReLU())
    """

    uses_own_batches = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # A name that stays the same from step to step lets the core skip its negotiation.
        self._name = f"sync_batch_norm.{next(_layer_numbers)}"

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input with at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        if size() == 1 or self.uses_own_batches:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self._name)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        # momentum=None asks for the plain average of all batches.
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _per_channel(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *([1] * (like.dim() - 2)))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
    ) -> tuple[torch.Tensor, ...]:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        channels = input.shape[1]
        rows = input.numel() // channels
        # Centred sums, not sums of squares: those would cancel.
        local_mean = wide.mean(dims) if rows else wide.new_zeros(channels)
        squares = (wide - _per_channel(local_mean, wide)).square().sum(dims)
        # float64 holds the count exactly.
        mine = torch.cat([local_mean, squares, local_mean.new_tensor([rows])]).double()
        everyone = synchronize(allgather_async(mine.unsqueeze(0), name=name))
        means, sums, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
        count = counts.sum().clamp(min=1)
        mean = (means * counts).sum(0) / count
        variance = (sums + counts * (means - mean).square()).sum(0) / count

        mean, variance = mean.to(wide.dtype), variance.to(wide.dtype)
        scale = (variance + eps).rsqrt()
        output = (wide - _per_channel(mean, wide)) * _per_channel(scale, wide)
        if weight is not None and bias is not None:
            output = output * _per_channel(weight.to(wide.dtype), wide)
            output = output + _per_channel(bias.to(wide.dtype), wide)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.name = name
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        dims = [0, *range(2, input.dim())]
        wide = grad.to(mean.dtype)
        normal = (input.to(mean.dtype) - _per_channel(mean, input)) * _per_channel(scale, input)
        grad_bias = wide.sum(dims)
        grad_weight = (wide * normal).sum(dims)

        grad_input = None
        if ctx.needs_input_grad[0]:
            # Through mean and variance every row of the joined batch depends on every other.
            sums = torch.stack([grad_bias, grad_weight])
            sums = synchronize(allreduce_async(sums, name=f"{ctx.name}.backward", op=Sum)) / count
            sums = sums.to(mean.dtype)
            grad_input = wide - _per_channel(sums[0], input) - normal * _per_channel(sums[1], input)
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            grad_input = (grad_input * _per_channel(factor, input)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None, None
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None
