"""Where Keras 3 has to know about a DistributedOptimizer. Models with other optimizers are not touched.

- XLA cannot compile collectives: jit_compile="auto" never picks it, and jit_compile=True is refused by
  Keras' own warning.
- LossScaleOptimizer skips a step when this rank's gradients are not finite. Gradients are reduced first, so
  that all ranks decide alike. It is what a user has in hand where Keras has put it around ours: plan() works
  on it, too.
- All that a model was made to train should be the same on all ranks, also what its optimizer does not get.
- A model tells an optimizer with local steps how many samples a batch has.
- Callbacks: MetricAverageCallback comes first, so that others see averages; only rank 0 shows progress.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from dad._lib import _core

_installed = False


def install() -> None:
    """Once per process, with the first DistributedOptimizer."""
    global _installed
    if not _installed:
        _installed = True
        _patch_jit()
        _patch_loss_scale()
        _patch_trainer()
        _patch_callback_list()


def _patch_jit() -> None:
    from keras.src.trainers import trainer

    from dad.keras.optimizer import is_distributed

    original = trainer.model_supports_jit

    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        if keras.backend.backend() == "tensorflow" and is_distributed(getattr(model, "optimizer", None)):
            return False
        return original(model)

    trainer.model_supports_jit = model_supports_jit


def _patch_loss_scale() -> None:
    from dad.keras.optimizer import DistributedMixin

    cls = keras.optimizers.LossScaleOptimizer
    original = cls.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, DistributedMixin) or inner._dad_is_reduced:
            return original(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if inner._dad_settings.local.is_on:
            # A step that this rank leaves out counts as one.
            given = None if trainable_variables is None else variables
            return inner._dad.around_scaled(variables, lambda: original(self, grads, given))
        scale = self.dynamic_scale if self.built else self.initial_scale
        _core.expect_overflows()
        grads = inner._dad(list(grads), variables, loss_scale=scale)
        inner._dad.reduced_scaled(grads)
        object.__setattr__(inner, "_dad_is_reduced", True)
        try:
            return original(self, grads, None if trainable_variables is None else variables)
        finally:
            object.__setattr__(inner, "_dad_is_reduced", False)

    def plan(self: Any) -> list[dict[str, Any]]:
        """That of the DistributedOptimizer inside."""
        return self.inner_optimizer.plan()

    cls.apply = apply
    cls.plan = plan


def _patch_trainer() -> None:
    """Local steps: rounds go on between two calls of what trains, and count the batches in it."""
    from keras.src.trainers.trainer import Trainer

    compute = Trainer.compute_loss

    @functools.wraps(compute)
    def compute_loss(
        self: Any,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        reducer = _local_reducer(self) if training else None
        if reducer is not None:
            reducer.sees(self, y_pred)
        return compute(self, x, y, y_pred, sample_weight, training)

    Trainer.compute_loss = compute_loss
    if keras.backend.backend() != "tensorflow":
        return
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    make = TensorFlowTrainer.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        made = make(self, force)
        function = self.train_function
        if function is None or hasattr(function, "_dad_local") or _local_reducer(self) is None:
            return made

        @functools.wraps(function)
        def train(*args: Any) -> Any:
            reducer = _local_reducer(self)
            if reducer is None:
                return function(*args)
            return reducer.run(self, lambda: function(*args))

        train._dad_local = True  # type: ignore[attr-defined]
        self.train_function = train
        return train

    TensorFlowTrainer.make_train_function = make_train_function


def _local_reducer(model: Any) -> Any:
    """The reducer of a model whose optimizer has local steps."""
    from dad.keras.optimizer import is_distributed

    optimizer = getattr(model, "optimizer", None)
    if not is_distributed(optimizer):
        return None
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._dad if inner._dad_settings.local.is_on else None


def _patch_callback_list() -> None:
    from dad.basics import is_initialized, rank
    from dad.keras.callbacks import MetricAverageCallback
    from dad.keras.framework import framework
    from dad.keras.optimizer import is_distributed

    cls = keras.callbacks.CallbackList
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if is_initialized() and is_distributed(getattr(model, "optimizer", None)):
            framework().expect(_made_to_be_trained(model))
            if isinstance(callbacks, list | tuple):
                callbacks = sorted(callbacks, key=lambda c: not isinstance(c, MetricAverageCallback))
            if rank() != 0 and "add_progbar" in kwargs:
                kwargs["add_progbar"] = False
        original(self, callbacks, *args, **kwargs)

    cls.__init__ = init


def _made_to_be_trained(model: Any) -> list[Any]:
    """Its variables that were trainable when they were made, also those that are frozen by now."""
    return [variable for layer in model._flatten_layers() for variable in layer._trainable_variables]


def leave_jit(model: Any) -> None:
    """For a model that was compiled before its optimizer became a DistributedOptimizer."""
    if keras.backend.backend() == "tensorflow" and model.compiled and model.jit_compile:
        model.jit_compile = False
