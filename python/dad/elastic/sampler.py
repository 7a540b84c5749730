"""Which samples of an epoch each rank takes, when the number of ranks may change in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from dad import basics


class Share:
    """Divides the rest of an epoch among the ranks. The base of the ElasticSampler of each framework.

    dataset: something with a length. shuffle: whether the order is another one in each epoch. seed: of that
    order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with no sample processed. Call it at the end of the previous epoch: an epoch that
        is continued after a reset must not begin anew."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed this many more samples, in the order in which it got them."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has processed these samples, in any order: for ranks with unequal numbers of samples. Use
        either this or record_batch()."""
        self.processed_indices.update(int(index) for index in indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        begin = batch_idx * batch_size
        return self._own()[begin : begin + batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Divides the rest of the epoch after the given samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Divides the rest of the epoch among the present ranks."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        done = self.processed_indices
        self.remaining_indices = [index for index in order[self.processed_num :] if index not in done]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _own(self) -> list[int]:
        """This rank's share. All ranks have equally many; the first samples repeat if need be."""
        left = self.remaining_indices
        if not left:
            return []
        padded = left * -(-self.total_size // len(left))
        return padded[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._own()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
