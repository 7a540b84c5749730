"""Moving statistics of batch normalization, pooled over the ranks: what all frameworks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dad._lib import _core
from dad.errors import MismatchError
from dad.process_sets import ProcessSet
from dad.state.state_bytes import from_bytes, to_bytes

Statistics = tuple[np.ndarray, np.ndarray]  # mean and variance of each channel


def pool_statistics(
    layers: Mapping[str, Statistics], process_set: ProcessSet
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The statistics of the data of all ranks, in float64; the same bits on every rank.

    The mean is the average of the ranks' means. The variance is the average of their variances plus the
    variance of their means, as for one process that saw all the data.

    Raises:
        MismatchError: the ranks have different layers; on all of them.
    """
    mine = {name: [np.asarray(part, np.float64) for part in parts] for name, parts in layers.items()}
    data = to_bytes({"rank": process_set.rank(), "layers": mine})
    gathered = _core.gather_bytes("average_batch_norm", data, process_set.id)
    ranks = [from_bytes(one) for one in gathered]
    _require_same_layers(ranks)
    pooled = {}
    for name in mine:
        means, variances = (np.stack([rank["layers"][name][part] for rank in ranks]) for part in (0, 1))
        pooled[name] = (means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0))
    return pooled


def _require_same_layers(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    for other in others:
        for name in {**first["layers"], **other["layers"]}:
            here, there = (
                f"{rank['layers'][name][0].size} channels" if name in rank["layers"] else "no such layer"
                for rank in (first, other)
            )
            if here != there:
                raise MismatchError(
                    f'average_batch_norm: "{name}" has {here} on rank {first["rank"]}, {there} on rank '
                    f"{other['rank']}; call it with the same model on all ranks"
                )
