"""Elastic training with TensorFlow: `hvd.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dad._keras.elastic import ModelState, VariablesHandler
from dad.elastic.handlers import Handler
from dad.elastic.residuals import Saved
from dad.elastic.run import run, run_fn
from dad.elastic.state import HandledState, ObjectState, State
from dad.tensorflow.gradients import carry_for_tapes, kept_by_tapes

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run", "run_fn"]


class _SessionHandler(VariablesHandler):
    """Handles variables in a graph of TF1."""

    def __init__(self, variables: list[Any], session: Any) -> None:
        self._session = session
        super().__init__(variables, lambda: variables)

    def capture(self) -> list[np.ndarray]:
        values: list[np.ndarray] = self._session.run(list(self._variables()))
        return [np.array(value) for value in values]

    def apply(self, snapshot: list[np.ndarray]) -> None:
        for variable, saved in zip(self._variables(), snapshot, strict=True):
            variable.load(saved, self._session)


class _TapesHandler(Handler):
    """What a DistributedGradientTape by a lossy method keeps: tapes are made anew in each step, and continue
    one another's state."""

    can_carry = True

    def __init__(self) -> None:
        super().__init__(None)

    def capture(self) -> None:
        """Nothing is the same on all ranks."""

    def apply(self, snapshot: None) -> None:
        pass

    def kept(self) -> Saved | None:
        return kept_by_tapes()

    def carry(self, saved: Saved) -> None:
        carry_for_tapes(saved)


class TensorFlowState(HandledState):
    """The state of a training with TensorFlow, as a list of variables.

    Args:
        variables: those to save, restore and synchronize. None: the global variables of the graph.
        session: of a graph of TF1. None: the default session, or eager variables.
        **kwargs: further attributes, which are copied and travel pickled.

    Example::

        state = hvd.elastic.TensorFlowState(model.variables + optimizer.variables, batch=0)
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        own = list(variables or tf.compat.v1.global_variables())
        if session is None and not tf.executing_eagerly():
            session = tf.compat.v1.get_default_session()
        self.session = session
        handler = _SessionHandler(own, session) if session else VariablesHandler(own, lambda: own)
        super().__init__({"variables": handler, "_tapes": _TapesHandler()}, **kwargs)


class TensorFlowKerasState(ModelState):
    """The state of a model of Keras and its optimizer.

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
