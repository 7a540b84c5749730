"""The callbacks, for the Keras that tf.keras is."""
# ruff: noqa: F401  this file only collects names

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dad.tensorflow.graph import HAS_KERAS_3

if HAS_KERAS_3:
    from dad.keras.callbacks import (
        BatchNormAverageCallback,
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        CompressionReport,
        EarlyStopping,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
        TensorBoardScalars,
    )
else:
    from dad._keras import callback_parts as parts

    def _framework() -> Any:
        from dad._keras import on_tensorflow

        return on_tensorflow

    class _Callback(tf.keras.callbacks.Callback):
        _dad_framework = staticmethod(_framework)
        _dad_read = staticmethod(lambda value: float(tf.keras.backend.get_value(value)))

    class BroadcastGlobalVariablesCallback(parts.BroadcastVariables, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.BroadcastVariables.__doc__

    class MetricAverageCallback(parts.MetricAverage, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.MetricAverage.__doc__

    class BatchNormAverageCallback(parts.BatchNormAverage, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.BatchNormAverage.__doc__

    class LearningRateScheduleCallback(parts.LearningRateSchedule, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.LearningRateSchedule.__doc__

    class LearningRateWarmupCallback(parts.LearningRateWarmup, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.LearningRateWarmup.__doc__

    class EarlyStopping(parts.AgreedEarlyStopping, tf.keras.callbacks.EarlyStopping):  # type: ignore[no-redef]
        __doc__ = parts.AgreedEarlyStopping.__doc__
        _dad_framework = staticmethod(_framework)

    class BestModelCheckpoint(  # type: ignore[no-redef]
        parts.RankZeroCheckpoint, tf.keras.callbacks.ModelCheckpoint
    ):
        __doc__ = parts.RankZeroCheckpoint.__doc__

    class CompressionReport(parts.ReportCompression, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.ReportCompression.__doc__

    class TensorBoardScalars(parts.WriteScalars, _Callback):  # type: ignore[no-redef]
        __doc__ = parts.WriteScalars.__doc__
