"""The optimizers of the frameworks, as session_checks.py wants them: each rank imports its own framework."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from dad.errors import MismatchError

ROWS = 2


def _failing(*_: Any) -> Any:
    raise RuntimeError("cannot see")


class TorchTraining:
    errors = MismatchError

    def __init__(self, method: str, shapes: dict[str, tuple[int, ...]]) -> None:
        import torch

        import dad.torch as hvd

        self._torch = torch
        torch.manual_seed(0)
        layers = [torch.nn.Linear(columns, rows, bias=False) for rows, columns in shapes.values()]
        self._model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._optimizer = hvd.DistributedOptimizer(
            optimizer, self._model.named_parameters(), compression=method
        )
        self.session = self._optimizer._dad._session

    @property
    def choices(self) -> list[Any]:
        return self.session.choices

    def step(self, fails: bool = False) -> None:
        from dad.torch import units

        with mock.patch.object(units, "observe", _failing if fails else units.observe):
            self._optimizer.zero_grad()
            self._model(self._torch.ones(ROWS, 30)).sum().backward()
            self._optimizer.step()

    def save(self) -> dict[str, Any]:
        return self._optimizer._dad.save()

    def load(self, saved: dict[str, Any]) -> None:
        self._optimizer._dad.load(saved)


class TensorFlowTraining:
    def __init__(self, method: str, shapes: dict[str, tuple[int, ...]]) -> None:
        import tensorflow as tf

        import dad.tensorflow as hvd

        self.errors = tf.errors.FailedPreconditionError
        generator = np.random.default_rng(0)
        variables = [
            tf.Variable(generator.normal(size=shape[::-1]).astype(np.float32), name=name)
            for name, shape in shapes.items()
        ]

        @tf.function
        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                for variable in variables:
                    x = tf.matmul(x, variable)
                loss = tf.reduce_sum(x)
            tape = hvd.DistributedGradientTape(tape, compression=method)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.01 * gradient)

        self._step = step
        self._x = tf.ones((ROWS, 30))
        graph = step.get_concrete_function(self._x).graph
        (exchange,) = set(graph._dad_exchanges)
        self._board = exchange.board
        self.session = self._board._session

    @property
    def choices(self) -> list[Any]:
        return self.session.choices

    def step(self, fails: bool = False) -> None:
        from dad.tensorflow import board

        with mock.patch.object(board, "observe", _failing if fails else board.observe):
            self._step(self._x)

    def save(self) -> dict[str, Any]:
        return self._board.save()

    def load(self, saved: dict[str, Any]) -> None:
        self._board.load(saved)


TRAININGS = {"torch": TorchTraining, "tensorflow": TensorFlowTraining}
