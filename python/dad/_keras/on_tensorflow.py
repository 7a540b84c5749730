"""What dad.keras needs of a framework, from TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import dad.tensorflow as collectives
from dad._keras.settings import Settings
from dad._lib import _core
from dad.tensorflow import replicas
from dad.tensorflow.compression import Compression, resolve
from dad.tensorflow.gradients import GradientReducer, is_active, new_stream, variable_name
from dad.tensorflow.local_part import BatchCounter, TensorFlowPart, around
from dad.tensorflow.ops import resource

__all__ = [
    "BatchCounter",
    "Compression",
    "around",
    "broadcast_variables",
    "collectives",
    "expect",
    "is_active",
    "joins",
    "loaded",
    "make_part",
    "make_reducer",
    "resolve",
    "track_state",
    "watch",
]


def make_reducer(settings: Settings, name: str, accumulates: bool = False) -> GradientReducer:
    """accumulates: gradients come added up over several steps, which is the same to methods here."""
    reducer = GradientReducer(
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
        settings.model,
    )
    reducer.options = settings.common_options()
    return reducer


def expect(variables: Iterable[Any]) -> None:
    """These belong to what is trained: ranks should have them in common."""
    replicas.expect((variable_name(variable, i), variable) for i, variable in enumerate(variables))


def joins() -> int:
    """How many joins all ranks have come to."""
    return _core.joins()


def make_part(variables: Sequence[Any], compression: Any, reducer: Any) -> TensorFlowPart:
    """A fragment of local steps."""
    replicas.left_out.trains(resource(variable) for variable in variables)
    process_set = reducer.process_set
    return TensorFlowPart(
        variables,
        compression,
        reducer.name,
        new_stream(process_set),
        process_set,
        lambda: reducer.settings_of_optimizer(),
    )


def loaded(optimizer: Any) -> None:
    """A graph is made with the first step, and finds what was loaded."""


def watch(model: Any, optimizer: Any) -> None:
    """Where Keras runs eagerly, steps of the model are captured: its own tape shows no factors."""
    import tensorflow as tf

    from dad.tensorflow.factors.eager_capture import capture

    if not hasattr(model, "train_step"):  # a layer
        return
    train_step = type(model).train_step

    @functools.wraps(train_step)
    def captured_step(*args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return train_step(model, *args, **kwargs)
        with capture(model):
            return train_step(model, *args, **kwargs)

    object.__setattr__(model, "train_step", captured_step)  # Keras tracks what its models are given


def track_state(optimizer: Any) -> None:
    """What the optimizer keeps for lossy methods becomes a part of tf.train.Checkpoint."""
    from dad.tensorflow.compressor_state import CheckpointedState

    state = CheckpointedState(lambda: optimizer._dad)
    optimizer._track_trackable(state, "dad_state", overwrite=True)


def tensor(value: Any) -> Any:
    import tensorflow as tf

    return tf.convert_to_tensor(value)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    collectives.broadcast_variables(variables, root_rank)
