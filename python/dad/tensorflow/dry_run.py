"""dad.plan() for a model of Keras: what would be sent for it, without any other rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from dad.methods import compression as _methods
from dad.methods.planned import planned_method
from dad.planning import planner
from dad.planning.link import bytes_per_second, product_rate
from dad.planning.session import layers_of
from dad.planning.table import plan_rows
from dad.tensorflow.board import observe
from dad.tensorflow.exchange import counts_of, pairs_of, tensor_of
from dad.tensorflow.factors.find import find
from dad.tensorflow.factors.forms import choose_forms
from dad.tensorflow.gradients import Row, variable_names
from dad.tensorflow.ops import resource


def plan(
    model: Any,
    example_batch: Any,
    size: int = 8,
    link: str = "100mbit",
    compression: Any = None,
    loss: Callable[[Any], tf.Tensor] | None = None,
) -> list[dict[str, Any]]:
    """See dad.plan()."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size={size!r} is not possible; a number of ranks, 1 or more")
    rate = bytes_per_second(link)
    compression = _methods.resolve(compression or os.environ.get("DAD_COMPRESSION") or "auto")
    batch = tf.nest.map_structure(tf.convert_to_tensor, example_batch)
    _forward(model, batch)  # a model may make its variables in its first call
    names = variable_names(model.trainable_variables)
    variables = [resource(variable) for variable in model.trainable_variables]
    methods = [planned_method(compression, name) for name in names]
    seen: dict[str, Any] = {}

    def trace() -> None:
        with tf.GradientTape() as tape:
            number = (loss or _sum)(_forward(model, batch, training=True))
        gradients = tape.gradient(number, variables)
        found = find(gradients, variables)
        choose_forms(found, gradients, methods)
        work = pairs_of(names, found)
        seen["tensors"] = [
            tensor_of(*of) for of in zip(names, variables, found, methods, strict=True) if of[-1] is not None
        ]
        seen["observed"] = observe(seen["tensors"], [one.pair for one in work], counts_of(work))

    # Nothing is computed: a graph tells the shapes.
    tf.function(trace, autograph=False).get_concrete_function()
    costs = planner.Costs(
        size=size,
        bytes_per_second=rate,
        flops_per_second=product_rate(),
        seed=_methods.seed_from_environment(),
    )
    choices = planner.make_plan(layers_of(seen["tensors"], [seen["observed"]] * size), costs).choices
    rows = [
        Row.of(name, variable, compression, planned=method is not None)
        for name, variable, method in zip(names, variables, methods, strict=True)
    ]
    return plan_rows(rows, choices, size, "asked for", measured={})


def _forward(model: Any, batch: Any, **options: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(dict(batch), **options)
    return model(*batch, **options) if isinstance(batch, tuple) else model(batch, **options)


def _sum(output: Any) -> tf.Tensor:
    """A loss for outputs of unknown meaning: all that are real numbers, added up."""
    tensors = [tensor for tensor in tf.nest.flatten(output) if tensor.dtype.is_floating]
    return tf.add_n([tf.cast(tf.reduce_sum(tensor), tf.float32) for tensor in tensors])
