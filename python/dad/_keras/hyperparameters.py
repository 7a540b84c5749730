"""The settings of an optimizer of Keras, for comparisons with other ranks."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from typing import Any


def keras_settings(optimizer: Any) -> Callable[[], dict[str, str]]:
    """The settings as text, whenever it is called; the optimizer is not kept alive."""
    reference = weakref.ref(optimizer)

    def settings() -> dict[str, str]:
        optimizer = reference()
        config = optimizer.get_config() if optimizer is not None else {}
        found = {"optimizer": type(optimizer).__name__}
        for key, value in config.items():
            with contextlib.suppress(TypeError):  # an object that has no text
                found[key] = json.dumps(value)
        found.pop("name", None)
        return found

    return settings
