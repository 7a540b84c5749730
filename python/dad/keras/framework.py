"""The framework under Keras 3 in this process."""

from __future__ import annotations

import importlib
from typing import Any

import keras

_MODULES = {"tensorflow": "dad._keras.on_tensorflow", "torch": "dad._keras.on_torch"}


def framework() -> Any:
    """dad._keras.on_tensorflow or dad._keras.on_torch."""
    backend = keras.backend.backend()
    if backend not in _MODULES:
        raise ImportError(
            f"dad.keras works on the backends {' and '.join(_MODULES)} of Keras; this process has {backend}"
        )
    return importlib.import_module(_MODULES[backend])
