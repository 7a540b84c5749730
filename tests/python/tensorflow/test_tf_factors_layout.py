"""How factors lie on the wire, and what is computed for them."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from tensorflow.python.eager import context

from dad.tensorflow.factors.find import find
from tf_factors_util import (
    L,
    Plain,
    begins,
    check_model,
    normal,
    plain_graphs,
    square_loss,
)

__all__ = ["plain_graphs"]  # a fixture


def executed_ops(function, *inputs):
    """The types of the ops that a tf.function runs. It is when graphs are optimized that ops are dropped."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    function = function.get_concrete_function(*inputs)
    context.enable_run_metadata()
    try:
        function(*inputs)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    # What the ops of oneDNN, which TensorFlow takes on some CPUs, stand for.
    plain = (re.sub("^_(Mkl)?(Native)?(Fused)?", "", node.op) for graph in graphs for node in graph.node)
    counts = collections.Counter(plain)
    for op, count in list(counts.items()):
        if op.endswith("WithBias"):
            counts[op.removesuffix("WithBias")] += count
            counts["BiasAddGrad"] += count
    return counts


def test_a_product_that_nobody_reads_is_not_computed():
    model = keras.Sequential([L.Conv2D(4, 3, activation="relu"), L.Flatten(), L.Dense(3)])
    x = normal(2, 6, 5, 3)
    model(x)
    variables = [v.value for v in model.trainable_variables]

    def step(x, formed):
        with tf.GradientTape() as tape:
            loss = square_loss(model)(x)
        gradients = tape.gradient(loss, variables)
        found = find(gradients, variables)
        assert [one.bias for one in found] == [1, None, 3, None]
        if formed:
            return gradients
        rows = [use.num_rows() for one in found for use in one.uses]
        return [use.factors() for one in found for use in one.uses], rows

    formed, factors = (executed_ops(tf.function(lambda x, f=f: step(x, f)), x) for f in (True, False))
    # The forward product and that for dx remain.
    assert formed["MatMul"] == 3 and factors["MatMul"] == 2
    assert formed["Conv2DBackpropFilter"] == 1 and factors["Conv2DBackpropFilter"] == 0
    assert formed["BiasAddGrad"] == 2 and factors["BiasAddGrad"] == 0


@pytest.mark.parametrize("case", ["conv", "conv1d", "strided", "dilated", "groups", "dense"])
def test_layout_is_that_of_torch(case):
    groups = 2 if case == "groups" else 1
    settings = {"strided": {"strides": 2}, "dilated": {"dilation_rate": 2}}.get(case, {})
    if case == "dense":
        layer, x = L.Dense(3), normal(4, 6, 5)
    elif case == "conv1d":
        layer, x = L.Conv1D(4, 3), normal(2, 8, 6)
    else:
        layer, x = L.Conv2D(4, (3, 2), groups=groups, **settings), normal(2, 8, 7, 6)
    checked = check_model(keras.Sequential([layer]), x)
    layout = checked.found[0].layout
    wire = layout.to_wire(checked.gradients[0])
    assert np.array_equal(layout.from_wire(wire), checked.gradients[0])

    weight, bias = (v.numpy() for v in checked.variables)
    channels_first = (0, x.shape.rank - 1, *range(1, x.shape.rank - 1))
    channels_last = (0, *range(2, x.shape.rank), 1)
    if case == "dense":
        weight = torch.tensor(weight.T.copy(), requires_grad=True)
        out = torch.nn.functional.linear(torch.tensor(x.numpy()), weight, torch.tensor(bias))
    else:
        weight = torch.tensor(np.moveaxis(weight, (-1, -2), (0, 1)).copy(), requires_grad=True)
        function = torch.nn.functional.conv1d if case == "conv1d" else torch.nn.functional.conv2d
        out = function(
            torch.tensor(np.transpose(x.numpy(), channels_first).copy()),
            weight,
            torch.tensor(bias),
            stride=settings.get("strides", 1),
            dilation=settings.get("dilation_rate", 1),
            groups=groups,
        ).permute(channels_last)
    places = torch.arange(1, out.numel() + 1).reshape(out.shape) / out.numel()
    (out**2 * places).sum().backward()
    expected = weight.grad.reshape(weight.shape[0], -1).numpy()
    assert tuple(wire.shape) == expected.shape == (layout.out, layout.columns)
    np.testing.assert_allclose(wire.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    for (a, d), begin in zip(checked.factors[0], begins(checked.found[0]), strict=True):
        part = d.numpy().T @ a.numpy()
        wanted = expected[begin : begin + part.shape[0]]
        np.testing.assert_allclose(part, wanted, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_layouts_of_what_has_no_factors():
    model = Plain(lambda x, scalar, vector: x * vector * scalar, scalar=(), vector=(3,))
    checked = check_model(model, normal(4, 3))
    assert [(one.layout.out, one.layout.columns) for one in checked.found] == [(1, 1), (3, 1)]
    for one, gradient in zip(checked.found, checked.gradients, strict=True):
        assert np.array_equal(one.layout.from_wire(one.layout.to_wire(gradient)), gradient)
