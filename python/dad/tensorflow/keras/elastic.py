"""The callbacks of elastic training, for the Keras that tf.keras is."""

from __future__ import annotations

import tensorflow as tf

from dad._keras import callback_parts as parts


class CommitStateCallback(parts.CommitState, tf.keras.callbacks.Callback):
    __doc__ = parts.CommitState.__doc__


class UpdateBatchStateCallback(parts.UpdateBatchState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateBatchState.__doc__


class UpdateEpochStateCallback(parts.UpdateEpochState, tf.keras.callbacks.Callback):
    __doc__ = parts.UpdateEpochState.__doc__
