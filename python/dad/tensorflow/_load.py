"""Loads libdad_tensorflow for the TensorFlow that is installed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf

from dad.libraries import op_folder
from dad.tensorflow import board_structs

_FOLDER = op_folder("tensorflow", tf.__version__, Path(tf.__file__).parent)


def _load() -> Any:
    from dad._lib import _core  # noqa: F401  the core comes with its own module

    ops = tf.load_op_library(str(_FOLDER / "libdad_tensorflow.so"))
    gpu = _FOLDER / "libdad_tensorflow_gpu.so"
    if tf.test.is_built_with_cuda() and gpu.exists():
        tf.load_library(str(gpu))
    return ops


def _functions() -> ctypes.CDLL:
    """What is not an op."""
    library = ctypes.CDLL(str(_FOLDER / "libdad_tensorflow.so"))
    int64, text = ctypes.c_int64, ctypes.c_char_p
    library.dad_tf_new_board.restype = int64
    library.dad_tf_drop_board.argtypes = [int64]
    library.dad_tf_fail_board.argtypes = [int64, text]
    library.dad_tf_ask_again.argtypes = [int64]
    library.dad_tf_compare.argtypes = [int64]
    library.dad_tf_take_parted.argtypes = [int64]
    library.dad_tf_return.argtypes = [int64, text, ctypes.POINTER(ctypes.c_double), int64]
    library.dad_tf_num_joins.restype = int64
    library.dad_tf_exposed_seconds.argtypes = [int64]
    library.dad_tf_exposed_seconds.restype = ctypes.c_double
    board_structs.declare(library)
    return library


lib = _load()
library = _functions()
