"""The callbacks, for Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from dad._keras import callback_parts as parts
from dad.keras.framework import framework


def _read(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))


class _Callback(keras.callbacks.Callback):
    _dad_framework = staticmethod(framework)
    _dad_read = staticmethod(_read)


class BroadcastGlobalVariablesCallback(parts.BroadcastVariables, _Callback):
    __doc__ = parts.BroadcastVariables.__doc__


class MetricAverageCallback(parts.MetricAverage, _Callback):
    __doc__ = parts.MetricAverage.__doc__


class BatchNormAverageCallback(parts.BatchNormAverage, _Callback):
    __doc__ = parts.BatchNormAverage.__doc__


class LearningRateScheduleCallback(parts.LearningRateSchedule, _Callback):
    __doc__ = parts.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(parts.LearningRateWarmup, _Callback):
    __doc__ = parts.LearningRateWarmup.__doc__


class EarlyStopping(parts.AgreedEarlyStopping, keras.callbacks.EarlyStopping):
    __doc__ = parts.AgreedEarlyStopping.__doc__
    _dad_framework = staticmethod(framework)


class BestModelCheckpoint(parts.RankZeroCheckpoint, keras.callbacks.ModelCheckpoint):
    __doc__ = parts.RankZeroCheckpoint.__doc__


class CompressionReport(parts.ReportCompression, _Callback):
    __doc__ = parts.ReportCompression.__doc__
