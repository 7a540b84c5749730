"""Batch normalization of Keras, of either version: the moving statistics of all ranks as one."""

from __future__ import annotations

from typing import Any

import numpy as np

from dad.batch_norm import pool_statistics
from dad.process_sets import ProcessSet, global_process_set

_STATISTICS = ("moving_mean", "moving_variance")


def average_batch_norm(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Gives all ranks the same moving statistics: those of the data of all ranks.

    Every rank updates `moving_mean` and `moving_variance` of its BatchNormalization layers from its own
    batches, so they differ at the end of training although the weights that are trained are equal. Call
    this on all ranks before rank 0 evaluates or saves the model, or give `fit()` a
    BatchNormAverageCallback. Layers that are equal already, such as SyncBatchNormalization, do not change.

    Args:
        model: a model of Keras, or a tf.Module with such layers; it may have none.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the model has other layers on another rank.

    Example:
        hvd.average_batch_norm(model)
        if hvd.rank() == 0:
            model.save("model.keras")
    """
    layers = {}
    for layer in _layers_of(model):
        variables = [getattr(layer, name, None) for name in _STATISTICS]
        if all(hasattr(variable, "assign") for variable in variables):
            # Names of layers need not be unique.
            layers[f"{len(layers)} {layer.name}"] = variables
    mine = {name: tuple(map(_as_array, variables)) for name, variables in layers.items()}
    for name, parts in pool_statistics(mine, process_set).items():
        for variable, value in zip(layers[name], parts, strict=True):
            variable.assign(value.astype(np.float32))


def _layers_of(model: Any) -> list[Any]:
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())
    return [model, *model.submodules]


def _as_array(variable: Any) -> np.ndarray:
    """Also of a type that NumPy does not have."""
    return np.asarray(variable.numpy()).astype(np.float64)
