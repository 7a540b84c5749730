"""DistributedOptimizer for the optimizers of tf.compat.v1.train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad.tensorflow.gradients import GradientReducer
from dad.tensorflow.graph import is_eager, plain
from dad.tensorflow.replicas import settings_of_v1

v1 = tf.compat.v1


class DistributedV1Optimizer(v1.train.Optimizer):
    """compute_gradients() returns gradients that are reduced over the ranks; the rest is the optimizer's."""

    def __init__(
        self,
        optimizer: v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        reducer: GradientReducer,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        if backward_passes_per_step > 1 and is_eager():
            raise ValueError(
                "backward_passes_per_step > 1 is not yet supported for tf.compat.v1 optimizers with eager "
                "execution."
            )
        self._optimizer = optimizer
        self._reducer = reducer
        reducer.settings_of_optimizer = settings_of_v1(optimizer)
        self._passes = backward_passes_per_step
        self._average_passes = average_aggregated_gradients
        self._accumulators: list[Any] = []
        self._is_last_pass: Any = None

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._reducer.register_local(var)

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it, and why."""
        return self._reducer.plan()

    @plain
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._passes > 1:
            reduced = self._accumulate(gradients, variables)
        else:
            reduced = self._reducer(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def _accumulate(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds the gradients up; every backward_passes_per_step-th time the sum is reduced."""
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[i]) for i in there]
        used = [variables[i] for i in there]
        with v1.variable_scope(None, default_name="dad_aggregation"):
            count = self._local_variable("count", (), tf.int64)
            self._accumulators = [
                self._local_variable(f"sum_{n}", gradient.shape, gradient.dtype)
                for n, gradient in enumerate(dense)
            ]
        added = [a.assign_add(g) for a, g in zip(self._accumulators, dense, strict=True)]
        with tf.control_dependencies(added):
            self._is_last_pass = tf.equal(count.assign_add(1) % self._passes, 0)

        def reduce() -> list[Any]:
            sums = [accumulator.read_value() for accumulator in self._accumulators]
            if self._average_passes:
                sums = [s / self._passes for s in sums]
            return self._reducer(sums, used)

        with tf.control_dependencies([self._is_last_pass]):
            reduced = tf.cond(self._is_last_pass, reduce, lambda: dense)
        reduced = reduced if isinstance(reduced, list | tuple) else [reduced]
        results: list[Any] = [None] * len(gradients)
        for i, gradient in zip(there, reduced, strict=True):
            results[i] = gradient
        return results

    def _local_variable(self, name: str, shape: Any, dtype: tf.DType) -> Any:
        return v1.get_variable(
            name,
            shape=shape,
            dtype=dtype,
            trainable=False,
            initializer=v1.zeros_initializer(),
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )

    @plain
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        if self._passes == 1:
            return self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)
        pairs = list(grads_and_vars)
        # Variables cannot be made within a condition.
        self._optimizer._create_slots([v for gradient, v in pairs if gradient is not None])
        self._optimizer._prepare()

        def apply() -> Any:
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
            with tf.control_dependencies([applied]):
                return tf.group(*[a.assign(tf.zeros_like(a)) for a in self._accumulators])

        def wait() -> Any:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        return tf.group(tf.cond(self._is_last_pass, apply, wait))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)
