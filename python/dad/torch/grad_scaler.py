"""GradScaler without the dance.

GradScaler.step() looks for infinities in .grad before it calls optimizer.step(). With Horovod the
user has to synchronize() by hand before that, or each rank judges its own gradients, some skip the
step, and the job hangs. torch offers an optimizer no hook at that point, so dad wraps the one method
that every road of GradScaler (unscale_, step, optimizers that unscale by themselves) goes through:
dad's optimizers synchronize there, all ranks look at the same bits, and all skip or none.
Other optimizers are not affected.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dad._lib import _core

_loss_scale = 1.0


def loss_scale() -> float:
    """What the loss was last multiplied by: the gradients of the backward() that follows are, too."""
    return _loss_scale


def install(before: Any, after: Any) -> None:
    """Calls before(optimizer) and after(optimizer, found_inf by device) around the search."""
    scale_outputs = torch.amp.GradScaler.scale

    @functools.wraps(scale_outputs)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _loss_scale
        outputs = scale_outputs(self, *args, **kwargs)
        _loss_scale = float(self.get_scale())
        if self.is_enabled():
            _core.expect_overflows()
        return outputs

    torch.amp.GradScaler.scale = scale
    update_scale = torch.amp.GradScaler.update

    @functools.wraps(update_scale)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        # The step is over, and the next loss may be one that is not scaled.
        global _loss_scale
        _loss_scale = 1.0
        update_scale(self, *args, **kwargs)

    torch.amp.GradScaler.update = update
    original = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before(optimizer)
        found_inf = original(self, optimizer, *args, **kwargs)
        after(optimizer, found_inf)
        return found_inf

    torch.amp.GradScaler._unscale_grads_ = unscale
