"""Elastic training with Keras 3, on its TensorFlow and torch backends."""

from __future__ import annotations

from typing import Any

import keras

from dad._keras import callback_parts as parts
from dad._keras.elastic import ModelState
from dad.elastic.run import run, run_fn
from dad.elastic.state import ObjectState, State
from dad.keras.framework import framework
from dad.keras.optimizer import is_distributed

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class KerasState(ModelState):
    """The state of a training with Keras.

    Args:
        model: a model that has been built.
        optimizer: None takes the one that the model was compiled with.
        **kwargs: further attributes, which are copied and travel pickled.

    Example::

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
        if is_distributed(self.optimizer):
            # On the torch backend a method begins with the second step otherwise, and a newcomer's first step
            # is not the first one of the others.
            framework().loaded(self.optimizer)


class TensorFlowKerasState(KerasState):
    """KerasState under the name that Horovod has for it in horovod.tensorflow.

    Args:
        model: a model that has been built.
        optimizer: None takes the one that the model was compiled with.
        backend: not used.
        **kwargs: further attributes, which are copied and travel pickled.

    Example::

        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(parts.CommitState, keras.callbacks.Callback):
    """Commits the state every few batches, and at the end of an epoch.

    It comes last in the list of callbacks, so that it commits what the others have counted.

    Args:
        state: a KerasState.
        batches_per_commit: how many batches.

    Example::

        model.fit(dataset, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=10)])
    """


class UpdateBatchStateCallback(parts.UpdateBatchState, keras.callbacks.Callback):
    """Sets state.batch to the number of the current batch.

    An epoch that is taken up again has only the batches that are left.

    Args:
        state: a KerasState.

    Example::

        model.fit(dataset, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])
    """


class UpdateEpochStateCallback(parts.UpdateEpochState, keras.callbacks.Callback):
    """Sets state.epoch to the number of epochs done, over all times that training was taken up.

    Args:
        state: a KerasState.

    Example::

        model.fit(dataset, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])
    """
