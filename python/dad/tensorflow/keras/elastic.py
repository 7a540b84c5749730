"""The callbacks of elastic training, for the Keras that tf.keras is."""

from __future__ import annotations

from typing import NoReturn

import tensorflow as tf

from dad._keras import callback_parts as parts
from dad.errors import not_elastic


class CommitStateCallback(parts.CommitState, tf.keras.callbacks.Callback):
    __doc__ = parts.CommitState.__doc__


class UpdateBatchStateCallback(parts.UpdateBatchState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateBatchState.__doc__


class UpdateEpochStateCallback(parts.UpdateEpochState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateEpochState.__doc__


def __getattr__(name: str) -> NoReturn:
    if name in ("KerasState", "TensorFlowState", "TensorFlowKerasState", "run"):
        raise not_elastic(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
