"""DistributedOptimizer(op=Adasum) for tf.compat.v1.train: every rank takes its own step, and the changes
that the steps made to the variables are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad.tensorflow.graph import plain
from dad.tensorflow.v1_optimizer import DistributedV1Optimizer, v1


class DistributedDeltaOptimizer(DistributedV1Optimizer):
    """apply_gradients() applies this rank's gradients, then sets variables = start + Adasum of the changes.
    With backward_passes_per_step > 1 ranks take that many steps of their own in between."""

    @plain
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        return self._optimizer.compute_gradients(*args, **kwargs)

    @plain
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]

        def apply(after: Sequence[Any]) -> list[Any]:
            with tf.control_dependencies(after):
                applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
            return [] if applied is None else [applied]  # None in eager mode

        if self._passes > 1:
            return self._apply_pass(variables, apply)
        # A copy: the optimizer may update a variable in place.
        starts = [tf.raw_ops.DeepCopy(x=variable.read_value()) for variable in variables]
        with tf.control_dependencies(apply(starts)):
            values = [variable.read_value() for variable in variables]
            return _assign(variables, self._combined(values, starts, variables))

    def _apply_pass(self, variables: Sequence[Any], apply: Any) -> Any:
        with v1.variable_scope(None, default_name="dad_delta"):
            count = self._local_variable("count", (), tf.int64)
            starts = [
                self._local_variable(f"start_{n}", variable.shape, variable.dtype.base_dtype)
                for n, variable in enumerate(variables)
            ]

        def keep_starts() -> Any:
            return tf.group(*[s.assign(v.read_value()) for s, v in zip(starts, variables, strict=True)])

        kept = tf.cond(tf.equal(count.read_value() % self._passes, 0), keep_starts, tf.no_op)
        with tf.control_dependencies(apply([kept])):
            is_last_pass = tf.equal(count.assign_add(1) % self._passes, 0)
            values = [variable.read_value() for variable in variables]

        def combined() -> list[Any]:
            return self._combined(values, [start.read_value() for start in starts], variables)

        # Outside of the condition, where reference variables cannot be assigned.
        values = tf.cond(is_last_pass, combined, lambda: values)
        return _assign(variables, values if isinstance(values, list | tuple) else [values])

    def _combined(self, values: Sequence[Any], starts: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        changes = [value - start for value, start in zip(values, starts, strict=True)]
        return [s + c for s, c in zip(starts, self._reducer(changes, variables), strict=True)]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    updates = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*updates)
