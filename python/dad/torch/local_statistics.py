"""Batch normalization under local steps: every rank normalises its own batches, and the running statistics
are averaged with the weights."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dad.basics import Sum
from dad.process_sets import ProcessSet
from dad.torch.handles import synchronize
from dad.torch.ops import allreduce_async
from dad.torch.sync_batch_norm import SyncBatchNorm


class Statistics:
    """The running statistics of the layers of a model, pooled over ranks by their samples: the mean is that
    of the means, the variance that of the variances plus the variance of the means.

    name: the same on all ranks.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name
        self._process_set = process_set
        self._layers: dict[_BatchNorm, None] = {}
        self._handle: int | None = None
        self._sent: list[_BatchNorm] = []

    def find(self, model: torch.nn.Module) -> None:
        """Takes the layers of a module that is about to run."""
        for layer in model.modules():
            if not isinstance(layer, _BatchNorm):
                continue
            if isinstance(layer, SyncBatchNorm):
                layer.uses_own_batches = True
            if layer.running_mean is not None and layer.running_var is not None:
                self._layers.setdefault(layer)

    @torch.no_grad()
    def send(self, samples: float) -> None:
        self._sent = list(self._layers)
        if not self._sent:
            return
        parts = []
        for layer in self._sent:
            mean = layer.running_mean.double()
            parts += [mean, layer.running_var.double() + mean.square()]
        packed = torch.cat([part.cpu() for part in parts]) * samples
        self._handle = allreduce_async(packed, name=self._name, op=Sum, process_set=self._process_set)

    @torch.no_grad()
    def receive(self, total: float) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        packed = synchronize(handle)
        if not total:
            return
        packed = packed / total
        for layer in self._sent:
            count = layer.running_mean.numel()
            mean, second, packed = packed[:count], packed[count : 2 * count], packed[2 * count :]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_((second - mean.square()).clamp_(min=0))
