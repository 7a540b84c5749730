"""tf.train.Checkpoint with what all ranks keep between steps."""

from __future__ import annotations

from typing import Any

from tensorflow.python.checkpoint.graph_view import ObjectGraphView

from dad._keras.saving import writing
from dad.tensorflow.compressor_state import CheckpointedState


def save_checkpoint(checkpoint: Any, path: str) -> str:
    """Writes a tf.train.Checkpoint with what all ranks keep for lossy methods.

    All ranks call it; the first one writes. checkpoint.read(path) on all ranks loses nothing then, whatever
    their number.

    Args:
        checkpoint: a tf.train.Checkpoint.
        path: as of checkpoint.write().

    Returns:
        the path, for checkpoint.read().

    Raises:
        CheckpointError: a rank has failed; raised on all ranks.

    Example::

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        hvd.save_checkpoint(checkpoint, "run/checkpoint")
        checkpoint.read("run/checkpoint")
    """
    trackables, _ = ObjectGraphView(checkpoint).breadth_first_traversal()
    reducers = [one.reducer() for one in trackables if isinstance(one, CheckpointedState)]
    with writing(reducers, path) as is_first:
        if is_first:
            checkpoint.write(path)
    return path
