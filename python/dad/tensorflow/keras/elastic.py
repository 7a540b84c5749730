"""Elastic training with the Keras that tf.keras is."""

from __future__ import annotations

import tensorflow as tf

from dad._keras import callback_parts as parts
from dad.elastic.run import run, run_fn
from dad.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class KerasState(TensorFlowKerasState):
    """TensorFlowKerasState under the name that Horovod has for it with tf.keras."""


class CommitStateCallback(parts.CommitState, tf.keras.callbacks.Callback):
    __doc__ = parts.CommitState.__doc__


class UpdateBatchStateCallback(parts.UpdateBatchState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateBatchState.__doc__


class UpdateEpochStateCallback(parts.UpdateEpochState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateEpochState.__doc__
