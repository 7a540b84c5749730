"""What dad.keras needs of a framework, from TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dad.tensorflow as collectives
from dad._keras.settings import Settings
from dad.tensorflow.compression import Compression, resolve
from dad.tensorflow.gradients import GradientReducer, is_active, new_stream

__all__ = [
    "Compression",
    "broadcast_variables",
    "collectives",
    "is_active",
    "make_reducer",
    "resolve",
    "track_state",
]


def make_reducer(settings: Settings, name: str, accumulates: bool = False) -> GradientReducer:
    """accumulates: gradients come added up over several steps, which is the same to methods here."""
    return GradientReducer(
        name,
        settings.compression,
        settings.sparse_as_dense,
        settings.op,
        settings.gradient_predivide_factor,
        settings.groups,
        settings.process_set,
        settings.scale_local_gradients,
        settings.device_dense,
        settings.device_sparse,
        new_stream(settings.process_set),
    )


def track_state(optimizer: Any) -> None:
    """What the optimizer keeps for lossy methods becomes a part of tf.train.Checkpoint."""
    from dad.tensorflow.compressor_state import CheckpointedState

    state = CheckpointedState(
        lambda: optimizer._dad.save_state(), lambda data: optimizer._dad.load_state(data)
    )
    optimizer._track_trackable(state, "dad_state", overwrite=True)


def tensor(value: Any) -> Any:
    import tensorflow as tf

    return tf.convert_to_tensor(value)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    collectives.broadcast_variables(variables, root_rank)
