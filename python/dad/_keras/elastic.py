"""The elastic state of a model of Keras: of Keras 3 on any backend, and of tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dad.elastic.handlers import Handler
from dad.elastic.residuals import Saved
from dad.elastic.state import HandledState
from dad.process_sets import global_process_set
from dad.state.state_bytes import from_bytes, to_bytes


class VariablesHandler(Handler):
    """Handles a list of variables, whose values are read by numpy() and set by assign()."""

    def __init__(self, value: Any, variables: Callable[[], Sequence[Any]]) -> None:
        self._variables = variables
        super().__init__(value)

    def capture(self) -> list[np.ndarray]:
        return [np.array(variable.numpy()) for variable in self._variables()]

    def apply(self, snapshot: list[np.ndarray]) -> None:
        variables = self._variables()
        if len(variables) != len(snapshot):
            raise ValueError(
                f"a {type(self.value).__name__} with {len(variables)} variables cannot take over the state "
                f"of one with {len(snapshot)}: build the same model and optimizer on all ranks"
            )
        for variable, saved in zip(variables, snapshot, strict=True):
            variable.assign(saved)


class OptimizerHandler(VariablesHandler):
    """Handles an optimizer of Keras. What it keeps for lossy methods is each rank's own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda: variables_of(optimizer))

    def _reducer(self) -> Any:
        """What exchanges its gradients by methods; None if nothing does."""
        optimizer = getattr(self.value, "inner_optimizer", self.value)
        if not hasattr(type(optimizer), "_dad_settings"):
            return None
        reducer = optimizer._dad
        whole = optimizer._dad_settings.process_set is global_process_set
        return reducer if whole and hasattr(reducer, "carry_state") else None

    def apply(self, snapshot: list[np.ndarray]) -> None:
        reducer = self._reducer()
        if hasattr(reducer, "abandon_step"):  # of the torch backend, which keeps errors
            reducer.abandon_step()
        super().apply(snapshot)

    @property
    def can_carry(self) -> bool:
        return self._reducer() is not None

    def kept(self) -> Saved | None:
        reducer = self._reducer()
        data = reducer.save_state() if reducer is not None else b""
        return from_bytes(data) if data else None

    def carry(self, saved: Saved) -> None:
        self._reducer().carry_state(to_bytes(saved))


def variables_of(optimizer: Any) -> Sequence[Any]:
    variables = optimizer.variables
    return variables() if callable(variables) else variables


class ModelState(HandledState):
    """The base of KerasState and TensorFlowKerasState."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model must be built first: call model.build(input_shape)")
        optimizer = optimizer or model.optimizer
        if optimizer is None:
            raise ValueError("the model has no optimizer: compile it first, or give optimizer=")
        _build(optimizer, model.trainable_variables)
        handlers = {
            "model": VariablesHandler(model, lambda: model.weights),
            "optimizer": OptimizerHandler(optimizer),
        }
        super().__init__(handlers, **kwargs)


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """So that all ranks have the same variables before the first step."""
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras' legacy optimizers
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False) and hasattr(optimizer, "build"):
        optimizer.build(variables)
