"""dad.keras under the name that Horovod has for tf.keras; with TF_USE_LEGACY_KERAS=1 it is for tf_keras."""
# ruff: noqa: F401, F403  this file only collects names

from dad.tensorflow import *
from dad.tensorflow.graph import HAS_KERAS_3 as _HAS_KERAS_3

if _HAS_KERAS_3:
    from dad.keras import *
    from dad.keras import Compression, callbacks, elastic
else:
    from dad.tensorflow.keras import callbacks, elastic
    from dad.tensorflow.keras.legacy import DistributedOptimizer, PartialDistributedOptimizer, load_model
    from dad.tensorflow.keras.legacy_values import allgather, allreduce, broadcast, reducescatter
