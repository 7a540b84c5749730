"""ElasticSampler, for DataLoader."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from dad.elastic.sampler import Share


class ElasticSampler(Share, torch.utils.data.Sampler[int]):
    """Gives each rank its share of a dataset, and divides the rest anew when ranks come or go.

    Put it into the TorchState, call record_batch() after each batch and set_epoch() at the end of each
    epoch.

    Args:
        dataset: of constant length.
        shuffle: whether the order is another one in each epoch.
        seed: of that order, the same on all ranks.

    Example::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        Share.__init__(self, dataset, shuffle, seed)
