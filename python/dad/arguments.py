"""What callers of any framework may pass, checked in one place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from dad._lib import _core
from dad.basics import Adasum, Average, Max, Min, Product, Sum
from dad.process_sets import ProcessSet

_OPS = (Sum, Average, Min, Max, Product, Adasum)


def reduce_op(op: int | None, average: bool | None = None) -> int:
    """The operation that is meant. Called by what the user calls: a warning names the user's line."""
    if average is not None:
        if op is not None:
            raise ValueError(f"op={op} and average={average} are both given: give op only")
        warnings.warn("average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in _OPS:
        raise ValueError(f"op={op!r} is not one of Average, Sum, Adasum, Min, Max, Product")
    return op


def scatter_op(op: int) -> int:
    """The operation of a reducescatter; RuntimeError for Adasum, as in Horovod."""
    if op == Adasum:
        raise RuntimeError("reducescatter does not work with op=Adasum: use allreduce, or op=Sum or Average")
    return reduce_op(op)


def set_id(process_set: ProcessSet) -> int:
    """The id of a set that exists; ValueError for any other."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is not a ProcessSet")
    number = process_set.process_set_id
    if number is None and process_set.why_gone:
        raise ValueError(f"{process_set}: {process_set.why_gone}")
    if number is None:
        raise ValueError(f"{process_set} was not given to init() or add_process_set()")
    if number != 0 and not _core.process_set_ranks(number):
        raise ValueError(f"{process_set}: there is no process set with this id; it may have been removed")
    return number


def gradient_groups(
    op: int,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    variables: str = "tf.Variable",
    stacklevel: int = 3,
) -> Any:
    """The groups that are meant; ValueError for what Horovod refuses too."""
    if not (isinstance(gradient_predivide_factor, Real) and 0 < gradient_predivide_factor < math.inf):
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r} is not a positive number")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=stacklevel)
        groups = num_groups if groups is None else groups
    if isinstance(groups, list | tuple):
        possible = all(isinstance(group, list | tuple) for group in groups)
    else:
        possible = groups is None or (isinstance(groups, Integral) and groups > 0)
    if not possible:
        raise ValueError(f"groups should be a non-negative integer or a list of list of {variables}.")
    return groups


def weights_of(local_layers: Any) -> list[Any]:
    """What can be trained of a layer of Keras, or of several."""
    layers = [] if local_layers is None else local_layers
    if not isinstance(layers, Iterable) or hasattr(layers, "trainable_weights"):
        layers = [layers]
    layers = list(layers)
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    for layer in layers:
        if not layer.built:
            raise ValueError(f"the local layer {layer.name} has no weights yet: build the model first")
    return [weight for layer in layers for weight in layer.trainable_weights]


def require_model(model: Any) -> Any:
    """What model= may be: anything that has variables to train."""
    if model is not None and not hasattr(model, "trainable_variables"):
        raise ValueError(f"model={model!r} has no trainable_variables: give a model or a layer of Keras")
    return model


def require_variables_of(model: Any, variables: Iterable[Any]) -> None:
    """ValueError if one of these is not of the model that was given as model=."""
    if model is None:
        return
    own = {id(variable) for variable in model.trainable_variables}
    for variable in variables:
        if id(variable) not in own:
            name = getattr(variable, "path", None) or getattr(variable, "name", None) or "a variable"
            raise ValueError(f'"{name}" is not one of the trainable_variables of model={model!r}')
