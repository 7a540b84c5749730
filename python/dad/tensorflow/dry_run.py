"""dad.plan() for a model of Keras: what would be sent for it, without any other rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from dad.methods import compression as _methods
from dad.methods.planned import planned_method
from dad.planning import planner
from dad.planning.compare import Comparison, Rows, asked_for, compare
from dad.planning.link import described_costs, line_of
from dad.planning.session import layers_of
from dad.planning.table import plan_rows
from dad.planning.types import Observation
from dad.tensorflow.board import Tensor, observe
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
) -> Rows:
    """See dad.plan()."""
    line = line_of(link)
    costs = described_costs(line, size)
    compression = _methods.resolve(compression or os.environ.get("DAD_COMPRESSION") or "auto")
    batch = tf.nest.map_structure(tf.convert_to_tensor, example_batch)
    _forward(model, batch)  # a model may make its variables in its first call
    names = variable_names(model.trainable_variables)
    variables = [resource(variable) for variable in model.trainable_variables]
    methods = [planned_method(compression, name) for name in names]
    number = loss or _sum
    tensors, seen = _seen(model, batch, number, variables, names, methods)
    made = planner.make_plan(layers_of(tensors, [seen] * size), costs)
    rows = [
        Row.of(name, variable, compression, planned=method is not None)
        for name, variable, method in zip(names, variables, methods, strict=True)
    ]

    def compared() -> Comparison:
        watched, seen = _seen(model, batch, number, variables, names, [_methods.Vgc()] * len(names))
        seconds = _pass_seconds(model, batch, number, variables)
        rate = costs.flops_per_second
        return compare(watched, seen, size, line, rate, seconds, asked=asked_for(compression))

    return Rows(plan_rows(rows, made.choices, size, "asked for", measured={}), compared, made.exposed_seconds)


def _seen(
    model: Any,
    batch: Any,
    number: Callable[[Any], tf.Tensor],
    variables: list[Any],
    names: list[str],
    methods: list[Any],
) -> tuple[list[Tensor], dict[str, Observation]]:
    """The tensors that go by a method, and what one rank sees of them. Nothing is computed: a graph tells the
    shapes."""
    seen: dict[str, Any] = {}

    def trace() -> None:
        gradients = _gradients(model, batch, number, variables)
        found = find(gradients, variables)
        choose_forms(found, gradients, methods)
        work = pairs_of(names, found)
        seen["tensors"] = [
            tensor_of(*of) for of in zip(names, variables, found, methods, strict=True) if of[-1] is not None
        ]
        seen["observed"] = observe(seen["tensors"], [one.pair for one in work], counts_of(work))

    tf.function(trace, autograph=False).get_concrete_function()
    return seen["tensors"], seen["observed"]


def _gradients(model: Any, batch: Any, number: Callable[[Any], tf.Tensor], variables: list[Any]) -> list[Any]:
    with tf.GradientTape() as tape:
        value = number(_forward(model, batch, training=True))
    return tape.gradient(value, variables)


def _pass_seconds(model: Any, batch: Any, number: Callable[[Any], tf.Tensor], variables: list[Any]) -> float:
    """Of a forward and backward pass. Moving statistics get back what they were."""
    before = [(variable, tf.identity(variable)) for variable in model.non_trainable_variables]
    step = tf.function(lambda: _gradients(model, batch, number, variables), autograph=False)
    step()  # makes the graph
    began = time.perf_counter()
    for gradient in step():
        if isinstance(gradient, tf.Tensor):
            gradient.numpy()
    seconds = time.perf_counter() - began
    for variable, value in before:
        variable.assign(value)
    return seconds


def _forward(model: Any, batch: Any, **options: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(dict(batch), **options)
    return model(*batch, **options) if isinstance(batch, tuple) else model(batch, **options)


def _sum(output: Any) -> tf.Tensor:
    """A loss for outputs of unknown meaning: all that are real numbers, added up."""
    tensors = [tensor for tensor in tf.nest.flatten(output) if tensor.dtype.is_floating]
    return tf.add_n([tf.cast(tf.reduce_sum(tensor), tf.float32) for tensor in tensors])
