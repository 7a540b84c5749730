"""Factors of eager gradients, by whatever tape they are computed."""

from __future__ import annotations

import threading
from typing import Any

from dad.tensorflow.factors.nodes import Recorder


class _Thread(threading.local):
    recorder: Recorder | None = None


_this_thread = _Thread()


class capture:  # noqa: N801  it is called like a function
    """Shows the forward pass of eager mode to methods that send factors.

    A DistributedGradientTape sees the backward pass by itself; within capture() it sees the forward pass,
    too, which `edad` needs. Graphs need neither. Tensors are held until it is left, so it is for one step.

    Args:
        model: what is trained; it is returned. Layers are found by their ops, so any callable will do.

    Example::

        with hvd.capture(model):
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(inputs))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    """

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self._outer: Recorder | None = None

    def __enter__(self) -> Any:
        self._outer = _this_thread.recorder
        _this_thread.recorder = Recorder().__enter__()
        return self.model

    def __exit__(self, *exception: Any) -> None:
        recorder, _this_thread.recorder = _this_thread.recorder, self._outer
        recorder.__exit__(*exception)


def captured() -> Recorder | None:
    """What the innermost capture() of this thread has recorded."""
    return _this_thread.recorder
