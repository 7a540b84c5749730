"""What an optimizer keeps for lossy methods, as a part of tf.train.Checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import Trackable


class CheckpointedState(Trackable):
    """A string in the checkpoint: empty where nothing is kept."""

    def __init__(self, reducer: Callable[[], Any]) -> None:
        self.reducer = reducer  # of the optimizer, which has it when it needs it

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"state": tf.constant(self.reducer().save_state(), tf.string)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        data = restored["state"]
        if hasattr(data, "numpy") and data.numpy():
            self.reducer().load_state(data.numpy())
        return tf.no_op()
