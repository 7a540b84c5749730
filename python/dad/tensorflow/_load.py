"""Loads libdad_tensorflow, after a look at what it was built for."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import tensorflow as tf

_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall . (in dad's source directory)"
_LIB_DIR = Path(__file__).parents[1] / "_lib"


def check_versions(built_for: str | None, installed: str) -> None:
    """ImportError in one line where TensorFlow is not the one that the library was built for: loading it
    would end in an undefined symbol."""
    if built_for is None:
        raise ImportError(
            f"dad was built without tensorflow; to build it for tensorflow {installed}: {_REBUILD}"
        )
    if built_for != installed:
        raise ImportError(
            f"dad was built for tensorflow {built_for}, but tensorflow {installed} is loaded: {_REBUILD}"
        )


def _load() -> Any:
    info = _LIB_DIR / "build_info.json"
    if info.exists():
        check_versions(json.loads(info.read_text()).get("tensorflow"), tf.__version__)
    from dad._lib import _core  # noqa: F401  the core comes with its own module

    ops = tf.load_op_library(str(_LIB_DIR / "libdad_tensorflow.so"))
    gpu = _LIB_DIR / "libdad_tensorflow_gpu.so"  # built where TensorFlow has CUDA
    if gpu.exists():
        tf.load_library(str(gpu))
    return ops


def _functions() -> ctypes.CDLL:
    """What is not an op."""
    library = ctypes.CDLL(str(_LIB_DIR / "libdad_tensorflow.so"))
    int64, text = ctypes.c_int64, ctypes.c_char_p
    library.dad_tf_new_board.restype = int64
    library.dad_tf_drop_board.argtypes = [int64]
    library.dad_tf_set_board.argtypes = [int64, text, int64]
    library.dad_tf_fail_board.argtypes = [int64, text]
    library.dad_tf_ask_again.argtypes = [int64]
    library.dad_tf_compare.argtypes = [int64]
    library.dad_tf_take_parted.argtypes = [int64]
    library.dad_tf_take_notes.argtypes = [int64, ctypes.POINTER(int64), int64]
    library.dad_tf_take_notes.restype = int64
    library.dad_tf_return.argtypes = [int64, text, ctypes.POINTER(ctypes.c_double), int64]
    library.dad_tf_num_joins.restype = int64
    library.dad_tf_exposed_seconds.argtypes = [int64]
    library.dad_tf_exposed_seconds.restype = ctypes.c_double
    return library


lib = _load()
library = _functions()
