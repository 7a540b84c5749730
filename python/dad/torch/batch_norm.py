"""Batch normalization: the running statistics of all ranks as one."""

from __future__ import annotations

import torch

from dad.batch_norm import pool_statistics
from dad.process_sets import ProcessSet, global_process_set


@torch.no_grad()
def average_batch_norm(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Gives all ranks the same running statistics: those of the data of all ranks.

    Every rank updates `running_mean` and `running_var` of its batch norm layers from its own batches, so
    they differ at the end of training although the parameters are equal. Call this on all ranks before
    rank 0 evaluates or saves the model. Layers that are equal already, such as SyncBatchNorm, do not
    change; `num_batches_tracked` is left as it is.

    Args:
        model: any module; it may have no batch norm.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the model has other layers on another rank.

    Example:
        hvd.average_batch_norm(model)
        if hvd.rank() == 0:
            torch.save(model.state_dict(), "model.pt")
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        and isinstance(getattr(module, "running_var", None), torch.Tensor)
    }
    mine = {
        name: tuple(
            part.detach().double().cpu().numpy() for part in (module.running_mean, module.running_var)
        )
        for name, module in layers.items()
    }
    for name, parts in pool_statistics(mine, process_set).items():
        module = layers[name]
        for buffer, value in zip((module.running_mean, module.running_var), parts, strict=True):
            buffer.copy_(torch.from_numpy(value))
