"""DistributedOptimizer, its partial form and load_model for tf_keras (TF_USE_LEGACY_KERAS=1)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from dad._keras import on_tensorflow
from dad._keras.hyperparameters import keras_settings
from dad._keras.settings import Settings
from dad.arguments import gradient_groups, require_model, weights_of
from dad.basics import Average
from dad.methods.momentum import require_plain_optimizer
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow.gradients import refuse_adasum
from dad.tensorflow.graph import plain


class LegacyMixin:
    """What is put in front of the user's optimizer class: the gradients that minimize() computes are reduced
    over the ranks, as with Horovod. Those given to apply_gradients() are taken as they are."""

    _dad_settings: Settings
    _HAS_AGGREGATE_GRAD = True

    @property
    def _dad(self) -> Any:
        reducer = self.__dict__.get("_dad_reducer")
        if reducer is None:
            name = self._dad_settings.name or f"Distributed{type(self).__name__}"
            reducer = on_tensorflow.make_reducer(self._dad_settings, name)
            reducer.settings_of_optimizer = keras_settings(self)
            object.__setattr__(self, "_dad_reducer", reducer)
        return reducer

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._dad.register_local(var)

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it, and why."""
        return self._dad.plan()

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        if not hasattr(super(), "compute_gradients"):
            return self._compute_gradients(loss, var_list, tape=tape)
        return self._dad_pairs(super().compute_gradients(loss, var_list, tape=tape))  # type: ignore[misc]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The same, of the optimizers in tf_keras.optimizers.legacy. Horovod has both for either kind."""
        if not hasattr(super(), "_compute_gradients"):
            return self.compute_gradients(loss, var_list, tape=tape)
        pairs = super()._compute_gradients(loss, var_list, grad_loss, tape=tape)  # type: ignore[misc]
        return self._dad_pairs(pairs)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        return self._dad_reduce(super().get_gradients(loss, params), params)  # type: ignore[misc]

    def _dad_pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._dad_reduce(gradients, variables), variables, strict=True))

    # backward_passes_per_step: gradients add up, and are reduced and applied every so many calls.

    @property
    def _dad_count(self) -> Any:
        """How many passes have added up since gradients were last reduced."""
        if "_dad_passes" not in self.__dict__:
            with tf.init_scope():
                passes = tf.Variable(0, trainable=False, dtype=tf.int64)
            object.__setattr__(self, "_dad_passes", passes)
        return self.__dict__["_dad_passes"]

    @property
    def _agg_helper(self) -> Any:
        """Horovod's name for what adds up gradients, as far as scripts use it: its `counter`."""
        aggregates = self._dad_settings.backward_passes_per_step > 1
        return SimpleNamespace(counter=self._dad_count) if aggregates else None

    @plain
    def _dad_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        passes = self._dad_settings.backward_passes_per_step
        if passes == 1:
            return self._dad(gradients, variables)
        with tf.init_scope():
            if "_dad_sums" not in self.__dict__:
                sums = [
                    None if g is None else tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                    for g, v in zip(gradients, variables, strict=True)
                ]
                object.__setattr__(self, "_dad_sums", sums)
        sums = self.__dict__["_dad_sums"]
        there = [i for i, total in enumerate(sums) if total is not None]
        for i in there:
            sums[i].assign_add(tf.convert_to_tensor(gradients[i]))
        count = self._dad_count
        count.assign((count + 1) % passes)
        used = [variables[i] for i in there]

        def reduce() -> list[Any]:
            totals = [sums[i].read_value() for i in there]
            if self._dad_settings.average_aggregated_gradients:
                totals = [total / tf.cast(passes, total.dtype) for total in totals]
            reduced = self._dad(totals, used)
            for i in there:
                sums[i].assign(tf.zeros_like(sums[i]))
            return reduced

        reduced = tf.cond(tf.equal(count, 0), reduce, lambda: [sums[i].read_value() for i in there])
        results: list[Any] = [None] * len(sums)
        for i, gradient in zip(there, reduced, strict=True):
            results[i] = gradient
        return results

    @plain
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        passes = self._dad_settings.backward_passes_per_step
        if passes == 1:
            return super().apply_gradients(grads_and_vars, *args, **kwargs)  # type: ignore[misc]
        pairs = list(grads_and_vars)
        with tf.init_scope():
            if hasattr(self, "build"):
                self.build([variable for _, variable in pairs])

        def apply() -> Any:
            super(LegacyMixin, self).apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
            return tf.constant(0)

        def wait() -> Any:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(0)

        tf.cond(tf.equal(self._dad_count, 0), apply, wait)
        return self.iterations  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    model: Any = None,
) -> Any:
    """dad.keras.DistributedOptimizer for the optimizers of tf_keras."""
    refuse_adasum(op)
    groups = gradient_groups(op, gradient_predivide_factor, num_groups, groups)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(optimizer, LegacyMixin):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    settings = Settings(
        name,
        device_dense,
        device_sparse,
        on_tensorflow.resolve(compression),
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
        require_model(model),
    )
    require_plain_optimizer(settings.compression, optimizer)
    if model is not None:
        on_tensorflow.watch(model, optimizer)
    cls = type(optimizer)
    # Under these names Keras saves it as what it was.
    public = {k: v for k, v in vars(cls).items() if k.startswith(("_keras_api_names", "_tf_api_names"))}
    namespace = {**public, "__module__": cls.__module__, "_dad_settings": settings}
    wrapped = object.__new__(type(cls.__name__, (LegacyMixin, cls), namespace))
    wrapped.__dict__.update(vars(optimizer))
    return wrapped


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """dad.keras.PartialDistributedOptimizer for the optimizers of tf_keras."""
    local_weights = weights_of(local_layers)
    distributed = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for weight in local_weights:
        distributed.register_local_var(weight)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """tf.keras.models.load_model() whose optimizer, with its state, becomes a DistributedOptimizer."""
    names = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**names, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
