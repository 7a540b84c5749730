"""Are the replicas of a model of Keras the same, bit by bit?"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from dad._keras.callback_parts import is_seed
from dad._lib import _core
from dad.state.replicas import raise_unless_equal


def _digest(values: np.ndarray) -> str:
    memory = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return f"{values.dtype} {list(values.shape)} {_core.digest(memory):x}"


def _framework(model: Any) -> Any:
    if any(cls.__module__.startswith("tf_keras") for cls in type(model).__mro__):
        return importlib.import_module("dad._keras.on_tensorflow")
    return importlib.import_module("dad.keras.framework").framework()


def check_replicas(model: Any) -> None:
    """Raises ReplicaError, naming variables and ranks, unless all ranks have the same bits in the model's
    weights. States of random numbers may differ."""
    digests = {}
    for number, variable in enumerate(model.weights):
        if not is_seed(variable):
            digests[f"{number} {getattr(variable, 'path', variable.name)}"] = _digest(variable.numpy())
    raise_unless_equal(_framework(model).collectives.allgather_object(digests, name="check_replicas"))
