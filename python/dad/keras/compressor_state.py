"""What an optimizer keeps for lossy methods, as a part of a model that is saved."""

from __future__ import annotations

import io
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable

# Of the optimizer, where Keras finds it; and in the file of weights.
ATTRIBUTE = "_dad_state"
_ENTRY = f"{ATTRIBUTE}/vars/0"


class SavedState(KerasSaveable):
    """Keras saves it with the optimizer that has it as an attribute, in a group of its own: without dad a
    model is loaded as if it were not there."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # Keras looks for what else to save in attributes

    def _obj_type(self) -> str:
        return "Optimizer"  # one of those that Keras knows

    def save_own_variables(self, store: Any) -> None:
        data = self._optimizer()._dad.save_state()
        if data:
            store["0"] = np.frombuffer(data, np.uint8)

    def load_own_variables(self, store: Any) -> None:
        if "0" in store.keys():  # noqa: SIM118  it is not a dict
            self._optimizer()._dad.load_state(np.asarray(store["0"]).tobytes())


def read_state(filepath: Any) -> bytes | None:
    """The state in a file that model.save() wrote; None if there is none."""
    path = Path(filepath)
    if not path.is_file() or not zipfile.is_zipfile(path):
        return None
    import h5py

    with zipfile.ZipFile(path) as archive:
        weights = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(weights, "r") as file:
        for optimizer in ("optimizer", "optimizer/inner_optimizer"):
            if f"{optimizer}/{_ENTRY}" in file:
                return np.asarray(file[f"{optimizer}/{_ENTRY}"]).tobytes()
    return None
