"""Layers above each other with an activation in between: found where they are, and nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dad.tensorflow.factors.find import Recorder, find
from tf_factors_util import L, Plain, check_model, normal, plain_graphs, square_loss

__all__ = ["plain_graphs"]  # a fixture


def check_links(checked, want):
    """`want` has the activation of each linked variable. D of the lower use is made again from the upper one."""
    derivatives = {
        "relu": lambda y, slope: (y > 0).astype(y.dtype),
        "leaky_relu": lambda y, slope: np.where(y > 0, 1, slope),
        "tanh": lambda y, slope: 1 - y * y,
        "sigmoid": lambda y, slope: y * (1 - y),
    }
    seen = {}
    for index, one in enumerate(checked.found):
        for number, use in enumerate(one.uses):
            if use.link is None:
                continue
            seen[index] = use.link.activation
            upper = checked.found[use.link.upper]
            y, d = (factor.numpy() for factor in checked.factors[use.link.upper][use.link.upper_use])
            weight = upper.layout.to_wire(checked.variables[use.link.upper]).numpy()
            made = d @ weight * derivatives[use.link.activation](y, use.link.slope)
            np.testing.assert_allclose(made, checked.factors[index][number][1].numpy(), rtol=1e-4, atol=1e-5)
    assert seen == want


@pytest.mark.parametrize("shape", [(4, 5), (4, 6, 5)], ids=["rows", "sequences"])
def test_links_through_activations(shape):
    slope = lambda x: keras.activations.leaky_relu(x, 0.3)  # noqa: E731
    model = keras.Sequential(
        [L.Dense(4, activation=activation) for activation in ("relu", slope, "tanh", "sigmoid", None)]
    )
    checked = check_model(model, normal(*shape))
    check_links(checked, {0: "relu", 2: "leaky_relu", 4: "tanh", 6: "sigmoid"})
    assert checked.found[0].uses[0].link.upper == 2 and checked.found[0].uses[0].link.upper_use == 0
    assert checked.found[2].uses[0].link.slope == pytest.approx(0.3)


def test_links_of_weights_that_lie_the_other_way():
    def function(x, a, b, c):
        return tf.matmul(tf.tanh(tf.matmul(tf.nn.relu(x @ a + b), c, transpose_b=True)), a)

    shapes = {"a": (5, 4), "b": (4,), "c": (5, 4)}
    checked = check_model(Plain(function, **shapes), normal(3, 5))
    # `a` is used twice, and its bias counts once only: the layers are not of the form A W + b for both uses.
    check_links(checked, {2: "tanh"})


SMOOTH = {
    "gelu": (keras.activations.gelu, "gelu"),
    "gelu of tf.nn": (lambda x: tf.nn.gelu(x, approximate=False), "gelu"),
    "approximate gelu": (lambda x: keras.activations.gelu(x, approximate=True), "gelu_tanh"),
    "silu": (keras.activations.silu, "silu"),
    "silu by hand": (lambda x: x * tf.sigmoid(x), "silu"),
    "another": (lambda x: x * tf.sigmoid(1.702 * x), None),
    "softplus": (keras.activations.softplus, None),
    "gelu of something else": (lambda x: keras.activations.gelu(x * 1.01), None),
    "gelu with noise": (lambda x: keras.activations.gelu(x) + 0.01 * tf.random.normal(tf.shape(x)), None),
}


@pytest.mark.parametrize("activation", SMOOTH)
def test_links_through_smooth_activations(activation):
    function, name = SMOOTH[activation]
    x = normal(4, 5) if activation != "gelu" else normal(4, 3, 5)
    checked = check_model(keras.Sequential([L.Dense(4, activation=function), L.Dense(3)]), x)
    link = checked.found[0].uses[0].link
    assert (link.activation if link else None) == name
    if link is None:
        return
    weight, bias, above, _ = checked.variables
    a, d = checked.factors[0][0]
    h = tf.matmul(a, weight) + bias
    with tf.GradientTape() as tape:
        tape.watch(h)
        y = function(h)
    made = tape.gradient(y, h, tf.matmul(checked.factors[2][0][1], above, transpose_b=True))
    np.testing.assert_allclose(made, d, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, checked.factors[2][0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["recorded forward", "backward only"])
def test_links_in_eager_mode_need_the_forward_pass(mode):
    model = keras.Sequential([L.Dense(4, activation="relu"), L.Dense(3)])
    x = normal(4, 5)
    model(x)
    variables = [v.value for v in model.trainable_variables]
    recorder = Recorder()
    if mode == "recorded forward":
        with recorder, tf.GradientTape() as tape:
            loss = square_loss(model)(x)
            gradients = tape.gradient(loss, variables)
    else:
        with tf.GradientTape() as tape:
            loss = square_loss(model)(x)
        with recorder:
            gradients = tape.gradient(loss, variables)
    found = find(gradients, variables, recorder=recorder)
    assert [one.bias for one in found] == [1, None, 3, None]
    assert (found[0].uses[0].link is not None) == (mode == "recorded forward")


class Block(keras.Model):
    """Two layers, and something between them."""

    def __init__(self, between, activation="relu", **settings):
        super().__init__()
        self.first = L.Dense(4, activation=activation, **settings)
        self.second = L.Dense(4, **settings)
        self.between = between

    def call(self, x):
        return self.between(self, x)


@pytest.mark.parametrize(
    "between",
    {
        "residual": lambda m, x: m.second(m.first(x) + x),
        "second consumer of the output": lambda m, x: (lambda y: m.second(y) + tf.sin(y))(m.first(x)),
        "dropout": lambda m, x: m.second(tf.nn.dropout(m.first(x), 0.5, seed=1)),
        "scale": lambda m, x: m.second(m.first(x) * 2.0),
        "reshape into other rows": lambda m, x: m.second(tf.reshape(m.first(x), [-1, 2, 4])[:, 0]),
        "norm": lambda m, x: m.second(tf.math.l2_normalize(m.first(x), -1)),
    }.items(),
    ids=lambda item: item[0],
)
def test_no_link_if_anything_else_is_between(between):
    check_links(check_model(Block(between[1]), normal(4, 4)), {})


def test_no_link_in_mixed_precision_or_without_activation():
    chain = lambda m, x: m.second(m.first(x))  # noqa: E731
    check_links(check_model(Block(chain, dtype="mixed_bfloat16"), normal(4, 4), tolerance=4e-2), {})
    check_links(check_model(Block(chain, activation=None), normal(4, 4)), {})
    check_links(check_model(Block(chain), normal(4, 4)), {0: "relu"})


def test_second_consumer_of_the_preactivation_breaks_the_link():
    def function(x, a, b, c):
        h = x @ a + b
        return tf.nn.relu(h) @ c + h

    checked = check_model(Plain(function, a=(4, 4), b=(4,), c=(4, 4)), normal(3, 4))
    check_links(checked, {})
