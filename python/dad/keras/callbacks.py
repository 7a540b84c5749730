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
    """Gives all ranks the root's weights and optimizer state after the first batch.

    Args:
        root_rank: whose values they are.
        device: accepted for Horovod's sake.
        local_variables: variables that are not broadcast.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """


class MetricAverageCallback(parts.MetricAverage, _Callback):
    """Averages the metrics of an epoch over the ranks, for all other callbacks.

    Args:
        device: accepted for Horovod's sake.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback()])
    """


class BatchNormAverageCallback(parts.BatchNormAverage, _Callback):
    """Pools the moving statistics of batch normalization of all ranks after every epoch.

    See average_batch_norm(). Put it before callbacks that save the model.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.BatchNormAverageCallback()])
    """


class LearningRateScheduleCallback(parts.LearningRateSchedule, _Callback):
    """Sets the learning rate to initial_lr * multiplier(epoch).

    Args:
        initial_lr: the rate for all ranks together.
        multiplier: a function of the epoch, or a number for exponential decay.
        start_epoch: the first epoch in which it acts.
        end_epoch: the epoch in which it acts no more. None: it acts to the end.
        staircase: whether the rate changes once per epoch; else with every batch, by fractions of an
            epoch.
        momentum_correction: whether the velocity of SGD and RMSprop, which holds the old rate, is
            scaled when the rate changes.
        steps_per_epoch: batches of an epoch. None: found in the first epoch.

    Raises:
        ValueError: `initial_lr` is None.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)])
    """


class LearningRateWarmupCallback(parts.LearningRateWarmup, _Callback):
    """Raises the learning rate from initial_lr / size to initial_lr.

    As in "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677.

    Args:
        initial_lr: the rate for all ranks together.
        warmup_epochs: how long that takes.
        momentum_correction: whether the velocity of SGD and RMSprop, which holds the old rate, is
            scaled when the rate changes.
        steps_per_epoch: batches of an epoch. None: found in the first epoch.
        verbose: 1: prints the rate when the warm-up is over.

    Example::

        rate = 0.1 * hvd.size()
        model.fit(x, y, callbacks=[hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3)])
    """


class EarlyStopping(parts.AgreedEarlyStopping, keras.callbacks.EarlyStopping):
    """keras.callbacks.EarlyStopping by the mean over the ranks: all stop after the same epoch.

    It takes the arguments of keras.callbacks.EarlyStopping.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.EarlyStopping(patience=3)])
    """

    _dad_framework = staticmethod(framework)


class BestModelCheckpoint(parts.RankZeroCheckpoint, keras.callbacks.ModelCheckpoint):
    """keras.callbacks.ModelCheckpoint of the best model, on rank 0 only.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as of keras.callbacks.ModelCheckpoint.
        filepath: the file. It may also be set later, but before training.

    Raises:
        ValueError: `filepath` was not set when training begins.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.BestModelCheckpoint(filepath="best.keras")])
    """


class CompressionReport(parts.ReportCompression, _Callback):
    """Prints at the end of training how many bytes rank 0 has sent.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.CompressionReport()])
    """


class TensorBoardScalars(parts.WriteScalars, _Callback):
    """Writes what dad sends for TensorBoard, on rank 0, beside what else is in the folder.

    Bytes per step, the ratio to dense, and the effective rank or part of each tensor.

    Args:
        log_dir: the folder of the run.
        every: batches between two points.

    Raises:
        ValueError: `every` is less than 1.

    Example::

        model.fit(x, y, callbacks=[hvd.callbacks.TensorBoardScalars("runs/1")])
    """
