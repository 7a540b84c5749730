"""The callbacks of elastic training, for Keras 3."""

from __future__ import annotations

import keras

from dad._keras import callback_parts as parts


class CommitStateCallback(parts.CommitState, keras.callbacks.Callback):
    __doc__ = parts.CommitState.__doc__


class UpdateBatchStateCallback(parts.UpdateBatchState, keras.callbacks.Callback):
    __doc__ = parts.UpdateBatchState.__doc__


class UpdateEpochStateCallback(parts.UpdateEpochState, keras.callbacks.Callback):
    __doc__ = parts.UpdateEpochState.__doc__
