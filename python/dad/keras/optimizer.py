"""DistributedOptimizer for Keras 3, on the TensorFlow and on the torch backend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras

from dad._keras.hyperparameters import keras_settings
from dad._keras.local_rounds import LocalReducer
from dad._keras.settings import Settings
from dad.arguments import gradient_groups, require_model, weights_of
from dad.basics import Average, Sum
from dad.keras import patches
from dad.keras.compressor_state import SavedState
from dad.keras.framework import framework
from dad.local_steps.methods import require_average
from dad.local_steps.outer import Outer
from dad.local_steps.settings import DEFAULTS
from dad.local_steps.settings import resolve as resolve_local_steps
from dad.methods.momentum import require_plain_optimizer
from dad.process_sets import ProcessSet, global_process_set


class _Variables(list):
    """For scripts that say optimizer.variables(), which was a method before Keras 3."""

    def __call__(self) -> list[Any]:
        return self


class DistributedMixin:
    """What is put in front of the user's optimizer class: gradients are reduced before they are applied.

    Keras adds up gradients by itself (gradient_accumulation_steps), and so does
    backward_passes_per_step here: then the sum is reduced, right before it is clipped and applied.
    """

    _dad_settings: Settings  # of the class, so that from_config() gives a distributed optimizer as well
    _dad_is_reduced = False  # the caller has reduced the gradients: LossScaleOptimizer
    _dad_variables: Any = None  # those of the gradients that _clip_gradients() will see

    @property
    def _dad(self) -> Any:
        reducer = self.__dict__.get("_dad_reducer")
        if reducer is None:
            name = self._dad_settings.name or f"Distributed{type(self).__name__}"
            accumulates = bool(self.gradient_accumulation_steps)  # type: ignore[attr-defined]
            if self._dad_settings.local.is_on:
                reducer = LocalReducer(self._dad_settings, name, self)
            else:
                reducer = framework().make_reducer(self._dad_settings, name, accumulates)
            reducer.settings_of_optimizer = keras_settings(self)
            # Past Keras' own __setattr__, which would track it.
            object.__setattr__(self, "_dad_reducer", reducer)
        return reducer

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._dad.register_local(var)

    @property
    def _agg_helper(self) -> Any:
        """Horovod's name for what adds up gradients, as far as scripts use it: its `counter`, the number of
        passes since gradients were last reduced."""
        passes = self._dad_settings.backward_passes_per_step
        return SimpleNamespace(counter=self._iterations.value % passes) if passes > 1 else None  # type: ignore[attr-defined]

    @property
    def variables(self) -> Any:
        return _Variables(super().variables)  # type: ignore[misc]

    @property
    def _dad_state(self) -> Any:
        """What Keras saves with the optimizer: see compressor_state.py."""
        return SavedState(self)

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it, and why; what CompressionReport() prints."""
        return self._dad.plan()

    def end_round(self) -> None:
        """With local steps: exchanges what ranks have not exchanged yet, so that all have the same weights.
        Call it on all ranks before the model is evaluated or saved."""
        if self._dad_settings.local.is_on:
            self._dad.end_round()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self._dad_settings.local.is_on:
            variables = self._trainable_variables if trainable_variables is None else trainable_variables
            apply = super().apply  # type: ignore[misc]
            return self._dad.step(list(variables), lambda: apply(grads, trainable_variables))
        if not self._dad_is_reduced and not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            variables = self._trainable_variables if trainable_variables is None else trainable_variables
            if trainable_variables is not None:
                trainable_variables = variables = list(variables)
            grads = self._dad(list(grads), variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            object.__setattr__(self, "_dad_variables", list(trainable_variables))
        try:
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        finally:
            object.__setattr__(self, "_dad_variables", None)

    def _clip_gradients(self, grads: Any) -> Any:
        local = self._dad_settings.local.is_on
        if self._dad_variables is not None:
            if not self._dad_is_reduced and not local:
                grads = self._dad(grads, self._dad_variables)
            settings = self._dad_settings
            if settings.backward_passes_per_step > 1 and not settings.average_aggregated_gradients:
                # Keras has divided the sum.
                grads = [g * settings.backward_passes_per_step for g in grads]
        return super()._clip_gradients(grads)  # type: ignore[misc]


def is_distributed(optimizer: Any) -> bool:
    """Also one inside of a LossScaleOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, DistributedMixin) or isinstance(inner, DistributedMixin)


def _or_legacy(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Passes optimizers of tf_keras on to the function of the same name in dad.tensorflow.keras."""

    @functools.wraps(wrap)
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        legacy_keras = sys.modules.get("tf_keras")
        if legacy_keras is None or not isinstance(optimizer, _legacy_classes(legacy_keras)):
            return wrap(optimizer, *args, **kwargs)
        local = {option: kwargs.pop(option) for option in DEFAULTS if option in kwargs}
        if resolve_local_steps(**local).is_on:
            raise ValueError("local steps need an optimizer of Keras 3; this one is of tf_keras")
        from dad.tensorflow.keras import legacy

        return getattr(legacy, wrap.__name__)(optimizer, *args, **kwargs)

    return call


def _legacy_classes(legacy_keras: Any) -> tuple[type, ...]:
    optimizers = legacy_keras.optimizers
    return (optimizers.Optimizer, optimizers.legacy.Optimizer)


@_or_legacy
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
    local_steps: int | str = 1,
    outer: Outer | None = None,
    fragments: int = 1,
    delay: int = 0,
) -> Any:
    """Makes an optimizer of Keras use gradients that are reduced over the ranks.

    The result is an instance of a subclass of the optimizer's own class. It is saved as what it was: a
    model can be loaded without dad, or by load_model().

    Args:
        optimizer: of Keras 3.
        name: of the new optimizer.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        sparse_as_dense: sends tf.IndexedSlices as dense tensors.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        op: Average or Sum.
        backward_passes_per_step: gradients of so many calls add up locally before they are reduced and
            applied.
        average_aggregated_gradients: divides by that number.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the ranks that take part.
        scale_local_gradients: divides the gradients of local variables by the number of ranks.
        model: what is trained; gradients of other variables are an error then. None: whatever comes. It
            is needed only for what is otherwise found too late: factors where Keras runs eagerly, and
            on the torch backend the first step, which else goes dense (the model has to be built).
        local_steps: ranks take that many steps by themselves before they average the changes of their
            weights; or a time such as "5s" (docs/local_steps.md). The defaults of this and the next
            three can be changed from outside: dadrun --local-steps, --outer, --fragments, --delay.
        outer: what is done with the mean change: Outer(lr, momentum, nesterov). None: it is applied as
            it is.
        fragments: the model is exchanged in so many parts in turn, while training goes on.
        delay: 1: the result of an exchange is applied when the next one begins.

    Returns:
        the optimizer.

    Raises:
        ValueError: an argument is not possible, or the optimizer is distributed already.

    Example::

        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001), compression="auto")
        model.compile(optimizer, loss="mse")
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"a {type(optimizer).__name__} is not an optimizer of Keras 3")
    if is_distributed(optimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    groups = gradient_groups(op, gradient_predivide_factor, num_groups, groups, "variables", stacklevel=4)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    local = resolve_local_steps(local_steps, outer, fragments, delay)
    if local.is_on:
        require_average(op)
    settings = Settings(
        name,
        device_dense,
        device_sparse,
        framework().resolve(compression),
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
        require_model(model),
        local,
    )
    require_plain_optimizer(settings.compression, optimizer, local.is_on)
    patches.install()
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # LossScaleOptimizer
        optimizer.inner_optimizer = _with_mixin(inner, settings)
        distributed = optimizer
    else:
        distributed = _with_mixin(optimizer, settings)
    if model is not None:
        framework().watch(model, distributed)
    return distributed


@_or_legacy
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
    """A DistributedOptimizer that leaves the gradients of some layers on this rank.

    Errors are those of DistributedOptimizer().

    Args:
        optimizer: of Keras 3.
        name: of the new optimizer.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        sparse_as_dense: sends tf.IndexedSlices as dense tensors.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        op: Average or Sum.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the ranks that take part.
        local_layers: a layer, or several.
        scale_local_gradients: divides the gradients of local variables by the number of ranks.

    Returns:
        the optimizer.

    Example::

        optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[0])
    """
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
    inner = getattr(distributed, "inner_optimizer", distributed)
    for weight in local_weights:
        inner.register_local_var(weight)
    return distributed


def _with_mixin(optimizer: Any, settings: Settings) -> Any:
    """An instance of a new class (mixin, class of the optimizer) with the optimizer's state. Nothing is
    constructed anew, so optimizers with any constructor work, and ones that have been used already."""
    passes = settings.backward_passes_per_step
    if passes > 1:
        if optimizer.gradient_accumulation_steps:
            raise ValueError("give backward_passes_per_step or the optimizer's gradient_accumulation_steps")
        if optimizer.built:
            raise ValueError("backward_passes_per_step > 1 needs an optimizer that has not been used yet")
        optimizer.gradient_accumulation_steps = passes
    cls = type(optimizer)
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_dad_settings": settings}
    distributed = type(cls.__name__, (DistributedMixin, cls), namespace)
    _save_as(distributed, cls)
    wrapped = object.__new__(distributed)
    wrapped.__dict__.update(vars(optimizer))
    framework().track_state(wrapped)
    return wrapped


def _save_as(distributed: type, cls: type) -> None:
    """Keras writes the name of the user's class to files."""
    try:
        from keras.src import api_export
        from keras.src.saving import object_registration
    except ImportError:  # Keras has moved them: files then have the class by module and name
        return
    public = next((n for c in cls.__mro__ if (n := api_export.get_name_from_symbol(c))), None)
    own = cls.__module__.partition(".")[0] == "keras"
    if public is not None and own:
        api_export.REGISTERED_OBJS_TO_NAMES[distributed] = public
    elif cls in object_registration.GLOBAL_CUSTOM_NAMES:
        object_registration.GLOBAL_CUSTOM_NAMES[distributed] = object_registration.GLOBAL_CUSTOM_NAMES[cls]
