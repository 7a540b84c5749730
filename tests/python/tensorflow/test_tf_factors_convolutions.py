"""The factors of convolutions: groups, strides, dilations, sizes that are not known."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dad.methods.compression import Vgc
from dad.tensorflow.factors.find import find
from dad.tensorflow.factors.forms import choose_forms
from tf_factors_util import (
    GRAPH_AND_EAGER,
    L,
    Plain,
    begins,
    check_model,
    normal,
    options,
    plain_graphs,
)

__all__ = ["plain_graphs"]  # a fixture


CONVOLUTIONS = {
    "same": {"padding": "same"},
    "strided": {"strides": 2, "padding": "same"},
    "valid": {"strides": 2},
    "dilated": {"dilation_rate": 2},
    "dilated same": {"dilation_rate": 2, "padding": "same"},
    "one": {"kernel_size": 1},
}


@pytest.mark.parametrize(
    ("mode", "rank"), [("graph", 1), ("graph", 2), ("graph", 3), ("eager", 1), ("eager", 2)]
)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution(kind, mode, rank):
    settings = {"kernel_size": 3, **CONVOLUTIONS[kind]}
    layer = {1: L.Conv1D, 2: L.Conv2D, 3: L.Conv3D}[rank](4, **settings)
    checked = check_model(keras.Sequential([layer]), normal(2, *[8, 7, 6][:rank], 3), **options(mode))
    kernel, bias = checked.found
    assert len(kernel.uses) == 1 and not kernel.rest and kernel.bias == 1 and bias.rides_with == 0
    assert int(checked.samples[0][0]) == 2
    assert int(checked.rows[0][0]) == checked.factors[0][0][0].shape[0]


@pytest.mark.parametrize("rank", [2, 3, 4], ids=["Dense", "Conv1D", "Conv2D"])
def test_sizes_that_are_not_known_beforehand(rank):
    """Only the number of channels is."""
    x = normal(2, *[8, 7][: rank - 2], 3)
    layer = {2: L.Dense(4), 3: L.Conv1D(4, 3, 2, "same"), 4: L.Conv2D(4, (3, 2), 2, "same")}[rank]
    layers = [layer, L.Dense(3)]
    checked = check_model(keras.Sequential(layers), x, dynamic=rank - 1)
    assert [one.bias for one in checked.found] == [1, None, 3, None]
    for kernel in (0, 2):
        assert int(checked.rows[kernel][0]) == checked.factors[kernel][0][0].shape[0]
        assert int(checked.samples[kernel][0]) == 2


def test_dilated_convolution_of_unknown_size_comes_formed():
    layer = L.Conv1D(4, 3, dilation_rate=2)
    checked = check_model(keras.Sequential([layer]), normal(2, 8, 3), dynamic=2)
    assert "dilated" in checked.found[0].reason and not checked.found[0].uses


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_groups_have_a_segment_each(rank):
    layer = {1: L.Conv1D, 2: L.Conv2D, 3: L.Conv3D}[rank](6, 3, groups=2, padding="same", strides=2)
    checked = check_model(keras.Sequential([layer]), normal(2, *[8, 7, 6][:rank], 4))
    kernel = checked.found[0]
    assert begins(kernel) == [0, 3] and len(checked.factors[0]) == 2 and not kernel.rest
    assert int(checked.rows[0][0]) == sum(a.shape[0] for a, _ in checked.factors[0])
    assert kernel.layout.columns == 2 * 3**rank and kernel.bias == 1


def test_groups_come_formed_where_the_function_is_not_visible():
    checked = check_model(keras.Sequential([L.Conv2D(6, 3, groups=2)]), normal(2, 8, 7, 4), eager=True)
    assert "tf.function" in checked.found[0].reason and len(checked.found[0].rest) == 1
    assert checked.found[1].reason == "a bias on its own"


@GRAPH_AND_EAGER
def test_transposed_and_depthwise_convolutions(mode):
    model = keras.Sequential([L.Conv2DTranspose(5, 3, strides=2), L.DepthwiseConv2D(3)])
    checked = check_model(model, normal(2, 5, 4, 3), **options(mode))
    transposed, bias, depthwise, _ = checked.found
    assert (transposed.layout.out, transposed.layout.columns) == (3, 45) and len(transposed.uses) == 1
    assert transposed.bias is None and bias.reason == "a bias on its own"
    assert depthwise.reason == "a depthwise convolution" and len(depthwise.rest) == 1


BY_SAMPLES = {
    "depthwise": lambda: L.DepthwiseConv2D(3, strides=2, padding="same", depth_multiplier=2),
    "depthwise in one dimension": lambda: L.DepthwiseConv1D(3, padding="same"),
    "a group per channel": lambda: L.Conv2D(12, 3, groups=6, strides=2, padding="same"),
    "a group per channel in one dimension": lambda: L.Conv1D(6, 3, groups=6),
    "a group per channel in three dimensions": lambda: L.Conv3D(6, 2, groups=6, padding="same"),
    "groups": lambda: L.Conv2D(4, (3, 2), groups=2, strides=2),
}


@pytest.mark.parametrize("case", BY_SAMPLES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_convolutions_with_groups_come_by_samples_where_methods_look_at_these(case, dynamic):
    layer = BY_SAMPLES[case]()
    rank = 3 if "one dimension" in case else 5 if "three" in case else 4
    x = normal(3, *[6, 7, 5][: rank - 2], 6)
    layer(x)
    variables = [variable.value for variable in layer.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        gradients = tape.gradient(loss, variables)
        found = find(gradients, variables)
        choose_forms(found, gradients, [Vgc()] * len(variables))
        assert found[1].uses and found[1].rides_with is None and found[0].bias is None
        (use,) = found[0].uses
        index, rows = use.factors()
        matrices = tf.reshape(rows, [-1, found[0].layout.out, found[0].layout.columns])
        samples = tf.map_fn(found[0].layout.from_wire, matrices)
        return gradients[0], use.gradient(), samples, index, use.num_rows(), use.num_samples()

    spec = tf.TensorSpec([None, *x.shape[1:]] if dynamic else x.shape, x.dtype)
    function = tf.function(step, autograph=False).get_concrete_function(spec)
    gradient, formed, samples, index, num_rows, num_samples = function(x)
    np.testing.assert_allclose(formed, gradient, rtol=1e-4, atol=1e-4)
    assert len(samples) == 3 == int(num_samples) and int(num_rows) == index.shape[0]
    assert index.numpy().tolist() == 3 * list(range(index.shape[0] // 3))
    for sample in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x[sample : sample + 1]) ** 2)
        alone = tape.gradient(loss, variables[0])
        np.testing.assert_allclose(samples[sample], alone, rtol=1e-4, atol=1e-4)


def test_dilated_depthwise_convolutions_come_formed():
    """One of its samples is spread over several images."""
    checked = check_model(keras.Sequential([L.DepthwiseConv2D(3, dilation_rate=2)]), normal(2, 8, 7, 3))
    assert checked.found[0].reason == "a depthwise convolution" and not checked.found[0].sums


def test_explicit_padding_and_strides():
    def function(x, w):
        return tf.nn.conv2d(x, w, [1, 2, 3, 1], [[0, 0], [2, 1], [0, 3], [0, 0]])

    checked = check_model(Plain(function, w=(3, 2, 3, 4)), normal(2, 8, 7, 3))
    assert len(checked.found[0].uses) == 1
