"""BatchNormalization with the statistics of the batch of all ranks together."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from dad.basics import Sum, is_initialized, size
from dad.tensorflow.gradients import TAPE_STREAM
from dad.tensorflow.graph import HAS_KERAS_3, wire_name
from dad.tensorflow.raw_ops import raw_allreduce

# One stream per layer: the statistics of one depend on those of the layer before.
_STREAMS = TAPE_STREAM << 1
_num_layers = 0


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """tf.keras.layers.BatchNormalization on the joined batch of all ranks.

    Batches may be of unequal size. As with Horovod the gradients of gamma and beta are those of this rank's
    rows; the optimizer reduces them like any other.

    Args:
        fused: False; True is an error, as with Horovod.
        **kwargs: the arguments of BatchNormalization.

    Raises:
        ValueError: `fused` or `synchronized` is set.

    Example::

        model = tf.keras.Sequential([tf.keras.layers.Dense(64), hvd.SyncBatchNormalization()])
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        global _num_layers
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.pop("synchronized", False):
            raise ValueError("SyncBatchNormalization synchronizes by dad, not by tf.distribute")
        if not kwargs.get("name"):
            kwargs["name"] = _unique_name()
        if HAS_KERAS_3:
            kwargs = _without_dropped(kwargs)
        else:
            kwargs["fused"] = False
        super().__init__(**kwargs)
        self._dad_stream = _STREAMS + _num_layers
        _num_layers += 1

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        mask = [*args, *kwargs.values()][0] if HAS_KERAS_3 else kwargs.get("mask")
        if not is_initialized() or size() == 1:
            return mean, variance
        # E[x²] - E[x]² would cancel in float32.
        wide_mean, wide_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        count = self._count(inputs, mask)
        channels = tf.shape(tf.reshape(wide_mean, [-1]))[0]
        mine = tf.concat(
            [
                tf.reshape(wide_mean, [-1]) * count,
                tf.reshape(wide_variance + tf.square(wide_mean), [-1]) * count,
                tf.reshape(count, [1]),
            ],
            axis=0,
        )
        name = f"sync_batch_norm.{self._dad_stream - _STREAMS}"
        wire = wire_name("sync_batch_norm", name, ignore_name_scope=True)
        (total,) = raw_allreduce([mine], [wire], Sum, stream=self._dad_stream)
        all_rows = tf.maximum(total[-1], 1.0)
        joint_mean = total[:channels] / all_rows
        joint_variance = total[channels:-1] / all_rows - tf.square(joint_mean)
        joint_variance = tf.maximum(joint_variance, 0.0)
        return (
            tf.cast(tf.reshape(joint_mean, tf.shape(mean)), mean.dtype),
            tf.cast(tf.reshape(joint_variance, tf.shape(variance)), variance.dtype),
        )

    def _count(self, inputs: Any, mask: Any) -> Any:
        """How many values of this rank a channel's statistics are made of."""
        if mask is not None:
            # One less dimension than the inputs: without the channels.
            return tf.reduce_sum(tf.cast(mask, tf.float64))
        axis = self.axis[0] if isinstance(self.axis, list | tuple) else self.axis
        return tf.cast(tf.size(inputs) // tf.shape(inputs)[axis], tf.float64)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.pop("synchronized", None)
        return config


# Arguments of tf_keras that releases of Keras 3 lack. The first three change the result.
_LEGACY = ("renorm", "virtual_batch_size", "adjustment", "renorm_clipping", "renorm_momentum")


def _without_dropped(kwargs: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(tf.keras.layers.BatchNormalization.__init__).parameters
    dropped = [name for name in _LEGACY if name in kwargs and name not in known]
    for name in dropped:
        if kwargs[name] and name in _LEGACY[:3]:
            raise ValueError(f"SyncBatchNormalization: this version of Keras has no {name}={kwargs[name]!r}")
    return {name: value for name, value in kwargs.items() if name not in dropped}


def _unique_name() -> str:
    return f"sync_batch_normalization_{_num_layers}" if _num_layers else "sync_batch_normalization"
