"""What gradients are made of: every layer's gradient, put together again of what `find` sees."""

import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from dad.tensorflow.factors.find import Recorder, find
from tf_factors_util import (
    GRAPH_AND_EAGER,
    MODES,
    Checked,
    L,
    Plain,
    check_model,
    normal,
    options,
    plain_graphs,
    square_loss,
)

__all__ = ["plain_graphs"]  # a fixture


@MODES
def test_dense_has_one_use_and_its_bias_rides(mode):
    checked = check_model(keras.Sequential([L.Dense(3)]), normal(4, 5), **options(mode))
    kernel, bias = checked.found
    assert (kernel.layout.out, kernel.layout.columns, kernel.layout.is_transposed) == (3, 5, True)
    assert [use.kind for use in kernel.uses] == ["rows"] and kernel.uses[0].has_bias
    assert (kernel.bias, bias.rides_with, kernel.rest, bias.rest) == (1, 0, [], [])
    assert (kernel.reason, bias.reason) == ("", "")
    assert int(checked.rows[0][0]) == 4 and int(checked.samples[0][0]) == 4


@MODES
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_dense_on_sequences(mode, policy):
    layers = [L.Dense(3, dtype=policy, activation="relu"), L.Dense(2, dtype=policy)]
    tolerance = {"float32": 1e-5, "mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}[policy]
    checked = check_model(keras.Sequential(layers), normal(4, 6, 5), tolerance=tolerance, **options(mode))
    for kernel in (0, 2):
        assert checked.found[kernel].bias == kernel + 1 and not checked.found[kernel].rest
        assert int(checked.rows[kernel][0]) == 24 and int(checked.samples[kernel][0]) == 4
    if policy != "float32":
        assert checked.factors[0][0][0].dtype == policy.removeprefix("mixed_")


@GRAPH_AND_EAGER
@pytest.mark.parametrize("mask_zero", [False, True])
def test_embedding_is_indexed(mode, mask_zero):
    model = keras.Sequential([L.Embedding(7, 3, mask_zero=mask_zero), L.Dense(2)])
    checked = check_model(model, tf.constant([[1, 2, 1], [3, 1, 6]]), **options(mode))
    (use,) = checked.found[0].uses
    assert use.kind == "indexed" and checked.found[0].rest == []
    assert (checked.found[0].layout.out, checked.found[0].layout.columns) == (7, 3)
    assert int(checked.rows[0][0]) == 6 and int(checked.samples[0][0]) == 2


EQUATIONS = {
    # equation: (input shape, output shape of the layer, bias axes, rows, samples; None: no uses)
    "abc,cd->abd": ((4, 6, 5), (None, 3), "d", 24, 4),
    "abc,cde->abde": ((4, 6, 5), (None, 3, 2), "de", 24, 4),
    "abcd,cde->abe": ((4, 6, 5, 2), (None, 3), "e", 24, 4),
    "abc,bcd->ad": ((4, 6, 5), (3,), "d", 4, 4),
    "abc,bd->adc": ((4, 6, 5), (3, None), "d", 20, 4),
    "...x,xy->...y": ((4, 6, 5), (3,), "y", 24, 4),
    "abc,dc->abd": ((4, 6, 5), (None, 3), "d", 24, 4),
    "abc,bcd->abd": ((4, 6, 5), (6, 3), "d", None, None),
    "abc,dce->abde": ((4, 6, 5), (None, 3, 2), "de", None, None),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@GRAPH_AND_EAGER
def test_einsum(mode, equation):
    shape, out, bias_axes, rows, samples = EQUATIONS[equation]
    layer = L.EinsumDense(equation, out, bias_axes=bias_axes)
    checked = check_model(keras.Sequential([layer]), normal(*shape), **options(mode))
    kernel = checked.found[0]
    if rows is None:
        assert not kernel.uses and len(kernel.rest) == 1 and kernel.reason
        return
    assert len(kernel.uses) == 1 and not kernel.rest, kernel
    assert int(checked.rows[0][0]) == rows and int(checked.samples[0][0]) == samples
    # Where the output's axes are not the last ones the bias is no sum of rows that lie side by side.
    assert kernel.bias == (None if equation == "abc,bd->adc" else 1)
    assert kernel.layout.is_transposed == (equation != "abc,dc->abd")


class Attention(keras.Model):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3)

    def call(self, x):
        return self.attention(x, x)


@GRAPH_AND_EAGER
def test_attention_is_four_products(mode):
    checked = check_model(Attention(), normal(4, 6, 5), **options(mode))
    kernels = [one for one in checked.found if one.uses]
    assert len(kernels) == 4 and all(not one.rest and one.bias is not None for one in kernels)
    assert [one.layout.columns for one in kernels] == [5, 5, 5, 6]
    assert all(int(rows[0]) == 24 for rows in checked.rows if rows)


PRODUCTS = {
    # function of x and w: (x, w, is_transposed)
    "x w": (lambda x, w: x @ w, (4, 5), (5, 3), True),
    "x wT": (lambda x, w: tf.matmul(x, w, transpose_b=True), (4, 5), (3, 5), False),
    "x transposed": (lambda x, w: x @ tf.transpose(w), (4, 5), (3, 5), False),
    "xT w": (lambda x, w: tf.matmul(x, w, transpose_a=True), (5, 4), (5, 3), True),
    "w x": (lambda x, w: w @ x, (5, 4), (3, 5), False),
    "w xT": (lambda x, w: tf.matmul(w, x, transpose_b=True), (4, 5), (3, 5), False),
    "wT x": (lambda x, w: tf.matmul(w, x, transpose_a=True), (5, 4), (5, 3), True),
    "batches": (lambda x, w: x @ w, (4, 6, 5), (5, 3), True),
    "batches of batches": (lambda x, w: x @ w, (2, 4, 6, 5), (5, 3), True),
    "batches wT": (lambda x, w: tf.matmul(x, w, transpose_b=True), (4, 6, 5), (3, 5), False),
    "w batches": (lambda x, w: w @ x, (4, 5, 6), (3, 5), False),
    "tensordot": (lambda x, w: tf.tensordot(x, w, 1), (4, 6, 5), (5, 3), True),
    "tensordot of two axes": (lambda x, w: tf.tensordot(x, w, 2), (4, 6, 5), (6, 5, 3), True),
    "keras.ops": (lambda x, w: keras.ops.matmul(x, keras.ops.transpose(w)), (4, 6, 5), (3, 5), False),
}


@pytest.mark.parametrize(
    ("mode", "product"),
    [(mode, product) for mode in ("graph", "eager") for product in PRODUCTS]
    + [("static", "batches"), ("static", "w batches"), ("static", "tensordot")],
)
def test_products_in_every_position(mode, product):
    function, x, w, is_transposed = PRODUCTS[product]
    checked = check_model(Plain(function, w=w), normal(*x), **options(mode))
    (found,) = checked.found
    assert len(found.uses) == 1 and found.rest == [] and found.reason == ""
    assert found.layout.is_transposed == is_transposed


@GRAPH_AND_EAGER
def test_a_product_per_matrix_comes_formed(mode):
    checked = check_model(Plain(lambda x, w: x @ w, w=(4, 5, 3)), normal(4, 6, 5), **options(mode))
    assert checked.found[0].rest and not checked.found[0].uses


@GRAPH_AND_EAGER
def test_weight_used_both_ways(mode):
    """A tied autoencoder: one use is transposed against the other."""
    tied = Plain(lambda x, w: tf.matmul(tf.nn.relu(x @ w), w, transpose_b=True), w=(5, 3))
    (found,) = check_model(tied, normal(4, 5), **options(mode)).found
    assert len(found.uses) == 2 and not found.rest and found.layout.out == 3


@GRAPH_AND_EAGER
def test_tied_embedding_and_head(mode):
    def tied(indices, w):
        return tf.matmul(tf.reduce_sum(tf.gather(w, indices), 1), w, transpose_b=True)

    checked = check_model(Plain(tied, w=(7, 3)), tf.constant([[1, 2], [3, 1], [6, 6]]), **options(mode))
    (found,) = checked.found
    assert sorted(use.kind for use in found.uses) == ["indexed", "rows"] and not found.rest
    assert (found.layout.out, found.layout.columns, found.layout.is_transposed) == (7, 3, False)


@GRAPH_AND_EAGER
def test_reversible_embedding(mode):
    layer = L.ReversibleEmbedding(7, 3)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layer

        def call(self, indices):
            return self.embedding(self.embedding(indices) * 2, reverse=True)

    checked = check_model(Model(), tf.constant([[1, 2], [3, 1], [6, 6]]), **options(mode))
    (found,) = checked.found
    assert sorted(use.kind for use in found.uses) == ["indexed", "rows"] and not found.rest


@GRAPH_AND_EAGER
def test_several_lookups_are_several_uses(mode):
    def lookups(indices, w):
        return tf.nn.embedding_lookup(w, indices) + tf.gather(w, indices + 1)[:, ::-1]

    checked = check_model(Plain(lookups, w=(8, 3)), tf.constant([[1, 2, 3], [3, 1, 0]]), **options(mode))
    (found,) = checked.found
    assert [use.kind for use in found.uses] == ["indexed"] * 2 and not found.rest
    assert [int(rows) for rows in checked.rows[0]] == [6, 6]
    assert [int(samples) for samples in checked.samples[0]] == [2, 2]


@GRAPH_AND_EAGER
def test_layer_used_twice(mode):
    def twice(x, b, w):
        return (tf.nn.relu(x @ w + b) + 2 * x) @ w + b

    checked = check_model(Plain(twice, w=(5, 5), b=(5,)), normal(4, 5), **options(mode))
    bias, weight = checked.found
    assert len(weight.uses) == 2 and weight.bias == 0 and bias.rides_with == 1


@GRAPH_AND_EAGER
def test_bias_with_other_uses_stays_by_itself(mode):
    def once_more(x, b, w):
        return tf.nn.relu(x @ w + b) @ w + b + b * x

    checked = check_model(Plain(once_more, w=(5, 5), b=(5,)), normal(4, 5), **options(mode))
    bias, weight = checked.found
    assert len(weight.uses) == 2 and weight.bias is None and not weight.uses[0].has_bias
    assert bias.rides_with is None and bias.reason == "a bias on its own" and len(bias.rest) == 1


@MODES
def test_bias_of_two_weights_rides_with_one(mode):
    def two(x, b, v, w):
        return x @ w + tf.sin(x) @ v + b

    checked = check_model(Plain(two, w=(5, 3), v=(5, 3), b=(3,)), normal(4, 5), **options(mode))
    # Without the batch's size the graph allows for a broadcast of one sum to the other, so nothing is certain.
    rides = 0 if mode == "graph" else 1
    assert (checked.found[0].rides_with in (1, 2)) == bool(rides)
    assert [one.bias for one in checked.found[1:]].count(0) == rides


@GRAPH_AND_EAGER
def test_two_biases_of_one_weight(mode):
    def two(x, b, c, w):
        return x @ w + b + c

    checked = check_model(Plain(two, w=(5, 3), b=(3,), c=(3,)), normal(4, 5), **options(mode))
    assert sorted([one.rides_with is None for one in checked.found[:2]]) == [False, True]


@GRAPH_AND_EAGER
def test_bias_of_another_shape_does_not_ride(mode):
    """The same dy, but summed over other axes."""

    def per_head(x, b, w):
        return tf.reshape(x @ w, [-1, 2, 3]) + b

    checked = check_model(Plain(per_head, w=(5, 6), b=(3,)), normal(4, 5), **options(mode))
    assert checked.found[0].rides_with is None and checked.found[1].bias is None
    checked = check_model(Plain(per_head, w=(5, 6), b=(2, 1)), normal(4, 5), **options(mode))
    assert checked.found[0].rides_with is None and checked.found[1].bias is None
    checked = check_model(Plain(per_head, w=(5, 6), b=(2, 3)), normal(4, 5), **options(mode))
    assert checked.found[0].rides_with == 1


class Custom(keras.Model):
    """Layers of many kinds in a subclass, one of them frozen, one never used."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(9, 4)
        self.norm = L.LayerNormalization()
        self.frozen = L.Dense(4, trainable=False)
        self.unused = L.Dense(2)
        self.unused.build((None, 4))
        self.batch_norm = L.BatchNormalization()
        self.recurrent = L.GRU(3)
        self.regular = L.Dense(3, kernel_regularizer="l2")

    def call(self, indices):
        x = self.frozen(self.norm(self.embedding(indices)))
        x = self.recurrent(self.batch_norm(x, training=True))
        return self.regular(x)


@GRAPH_AND_EAGER
def test_what_is_not_recognised_comes_formed_with_a_reason(mode):
    model = Custom()
    inputs = tf.constant([[1, 2, 8], [3, 1, 0]])
    model(inputs)
    loss = square_loss(model)
    checked = Checked(
        model.trainable_variables,
        lambda x: loss(x) + tf.add_n(model.losses),
        inputs,
        **options(mode),
    )
    found = {
        v.path.split("/", 1)[1]: one for v, one in zip(model.trainable_variables, checked.found, strict=True)
    }
    assert not any("frozen" in name for name in found)
    recurrent = [one for name, one in found.items() if "gru" in name]
    assert len(recurrent) == 3
    if mode == "graph":
        assert all(one.reason == "comes out of a tf.while_loop (a recurrent layer)" for one in recurrent)
    unused = [one for one in checked.found if one.reason == "no gradient"]
    assert len(unused) == 2 and all(not one.uses and not one.rest for one in unused)
    regular = next(
        one
        for v, one in zip(model.trainable_variables, checked.found, strict=True)
        if v is model.regular.kernel
    )
    assert len(regular.uses) == 1 and len(regular.rest) == 1 and regular.reason and regular.bias is None
    embedding = checked.found[0]
    assert [use.kind for use in embedding.uses] == ["indexed"]
    norms = [one for name, one in found.items() if "norm" in name]
    assert len(norms) == 4 and all(one.rest and one.reason for one in norms)


def test_cond_and_nested_functions_come_formed():
    @tf.function
    def inner(x, w):
        return tf.nn.relu(x @ w)

    def outer(x, v, w):
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ v, lambda: x @ v * 2)
        return y + inner(x, w)

    checked = check_model(Plain(outer, v=(5, 3), w=(5, 3)), normal(4, 5))
    assert checked.found[0].reason == "comes out of a tf.cond"
    assert checked.found[1].reason == "comes out of a tf.function that was called inside of the tape"
    assert all(len(one.rest) == 1 and not one.uses for one in checked.found)


@GRAPH_AND_EAGER
def test_gradients_of_recomputed_and_custom_functions_are_right(mode):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda dy: tf.clip_by_value(dy, -1, 1)

    def function(x, b, v, w):
        part = tf.recompute_grad(lambda x: tf.nn.relu(x @ w + b))
        return clipped(part(x) @ v)

    check_model(Plain(function, b=(3,), w=(5, 3), v=(3, 2)), normal(4, 5), **options(mode))


@GRAPH_AND_EAGER
def test_scalars_multiply_d(mode):
    scale = tf.Variable(1024.0)

    def unscale(gradients):
        factor = 1 / scale
        return [tf.cast(g, tf.float32) * factor / 3.0 for g in gradients]

    model = keras.Sequential(
        [L.Dense(3, dtype="mixed_float16", activation="relu"), L.Dense(2, dtype="mixed_float16")]
    )
    x = normal(4, 5)
    model(x)
    loss = square_loss(model)
    checked = Checked(
        model.trainable_variables,
        lambda x: loss(x) * scale,
        x,
        tolerance=5e-3,
        change=unscale,
        **options(mode),
    )
    for kernel in (0, 2):
        # Each gradient divides by a constant of its own, but the factor is shared: no bias.
        assert len(checked.found[kernel].uses[0].inputs) == 4 and not checked.found[kernel].rest
        assert checked.factors[kernel][0][1].dtype == tf.float32


@GRAPH_AND_EAGER
def test_a_common_scale_keeps_the_bias(mode):
    scale = tf.Variable(8.0)

    def unscale(gradients):
        factor = 1 / scale
        return [factor * gradient for gradient in gradients]

    model = Plain(lambda x, b, w: x @ w + b, w=(5, 3), b=(3,))
    checked = Checked(model.all, square_loss(model), normal(4, 5), change=unscale, **options(mode))
    assert checked.found[0].rides_with == 1

    def differently(gradients):
        return [gradient * (index + 1.0) for index, gradient in enumerate(gradients)]

    checked = Checked(model.all, square_loss(model), normal(4, 5), change=differently, **options(mode))
    assert checked.found[0].rides_with is None and checked.found[1].uses


def test_scaled_embedding():
    model = Plain(lambda indices, w: tf.gather(w, indices), w=(7, 3))

    def scaled(gradients):
        (g,) = gradients
        return [tf.IndexedSlices(g.values * 0.5, g.indices, g.dense_shape)]

    checked = Checked(model.all, square_loss(model), tf.constant([1, 2, 1]), change=scaled)
    assert checked.found[0].uses[0].kind == "indexed" and not checked.found[0].rest


@GRAPH_AND_EAGER
def test_double_precision_is_exact(mode):
    class Doubles(Plain):
        def __init__(self):
            super().__init__(lambda x, w, b: tf.nn.conv2d(x, w, 1, "SAME") + b)
            self.all = [
                tf.Variable(normal(3, 3, 2, 4, dtype=tf.float64)),
                tf.Variable(normal(4, dtype=tf.float64)),
            ]

    model = Doubles()
    loss = lambda x: tf.reduce_sum(tf.sin(model(x)))  # noqa: E731
    checked = Checked(model.all, loss, normal(2, 5, 6, 2, dtype=tf.float64), tolerance=1e-12, **options(mode))
    assert checked.found[0].bias == 1


def test_nothing_is_held_after_the_recorder_is_gone():
    model = keras.Sequential([L.Dense(3)])
    x = normal(4, 5)
    model(x)
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = square_loss(model)(x)
    with Recorder() as recorder:
        gradients = tape.gradient(loss, variables)
    found = find(gradients, variables, recorder=recorder)
    (use,) = found[0].uses
    delta, recorded = weakref.ref(use.inputs[1]), weakref.ref(recorder)
    del tape, loss, gradients, found, use, recorder
    assert delta() is None and recorded() is None


def test_what_was_not_recorded_comes_formed():
    model = Plain(lambda x, w: x @ w, w=(5, 3))
    with tf.GradientTape() as tape:
        loss = square_loss(model)(normal(4, 5))
    gradients = tape.gradient(loss, model.all)
    for recorder in (None, Recorder()):
        (found,) = find(gradients, model.all, recorder=recorder)
        assert found.rest[0] is gradients[0] and not found.uses
        assert found.reason == "made by an op that was not recorded"


def test_graph_and_session_of_tensorflow_1():
    batch = normal(4, 5).numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None, 5])
        w, b, v = (
            tf.compat.v1.get_variable(name, shape, use_resource=True)
            for name, shape in (("w", [5, 3]), ("b", [3]), ("v", [2, 3]))
        )
        y = tf.matmul(tf.nn.relu(tf.nn.bias_add(x @ w, b)), v, transpose_b=True)
        gradients = tf.gradients(tf.reduce_sum(y**2), [w, b, v])
        found = find(gradients, [w, b, v])
        assert found[0].bias == 1 and found[0].uses[0].link.upper == 2
        (use,) = found[0].uses
        formed = use.gradient()
        a, d = use.factors()
        session.run(tf.compat.v1.global_variables_initializer())
        want, got, a, d, rows = session.run([gradients[0], formed, a, d, use.num_rows()], {x: batch})
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(a.T @ d, want, rtol=1e-4, atol=1e-5)
    assert rows == 4


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_convolution_and_embedding_in_mixed_precision(policy):
    layers = [
        L.Embedding(9, 4, dtype=policy),
        L.Conv1D(3, 2, dtype=policy, activation="relu"),
        L.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de", dtype=policy),
    ]
    tolerance = 5e-3 if policy == "mixed_float16" else 5e-2
    checked = check_model(
        keras.Sequential(layers), tf.constant([[1, 2, 8, 4], [3, 1, 0, 8]]), tolerance=tolerance
    )
    assert [len(one.uses) for one in checked.found] == [1, 1, 0, 1, 0]
    assert [one.bias for one in checked.found] == [None, 2, None, 4, None]
    kinds = {factors[0][1].dtype for factors in checked.factors if factors}
    assert kinds == {tf.as_dtype(policy.removeprefix("mixed_"))}


# How a weight is used, its shape, and whether the gradient has factors in a graph. x has 4 rows of 5.
UNUSUAL = {
    "a part of it": (lambda x, w: x @ w[:, 1:3], (5, 4), False),
    "beside zeros": (lambda x, w: x @ tf.concat([w, tf.zeros([2, 3])], 0), (3, 3), False),
    "normalized": (lambda x, w: x @ tf.math.l2_normalize(w, 0), (5, 3), False),
    "times a scalar": (lambda x, w: x @ (w * 0.5), (5, 3), True),
    "reshaped": (lambda x, w: x @ tf.reshape(w, [5, 3]), (3, 5), True),
    "flattened": (lambda x, w: x @ tf.reshape(w, [5, 3]), (15,), True),
    "reshaped, transposed": (lambda x, w: x @ tf.transpose(tf.reshape(w, [3, 5])), (5, 3), True),
    "transposed, reshaped": (lambda x, w: x @ tf.reshape(tf.transpose(w), [5, 4]), (2, 10), False),
    "axes swapped": (lambda x, w: x @ tf.reshape(tf.transpose(w, [1, 0, 2]), [5, 4]), (2, 5, 2), False),
    "its own product": (lambda x, w: x @ tf.matmul(w, w, transpose_b=True), (5, 3), False),
    "elements": (lambda x, w: tf.sin(x) * w, (4, 5), False),
    "squared": (lambda x, w: x @ tf.square(w), (5, 3), False),
    "columns looked up": (lambda x, w: x @ tf.gather(w, [1, 0, 1], axis=1), (5, 5), False),
    "rows in batches": (lambda x, w: x * tf.gather(w, [[1, 0], [2, 1]], batch_dims=1)[0, 0], (2, 5), False),
    "rows by tuples": (lambda x, w: x * tf.gather_nd(w, [[1], [0], [1], [3]]), (4, 5), True),
    "twice in one einsum": (lambda x, w: tf.einsum("ab,bc,cd->ad", x, w, w), (5, 5), None),
    "a diagonal": (lambda x, w: tf.einsum("ab,bb->ab", x, w), (5, 5), False),
    "a trace": (lambda x, w: x * tf.linalg.trace(w), (5, 5), False),
    "a kernel of a filter bank": (
        lambda x, w: tf.nn.conv1d(x[:, :, None], tf.reshape(w, [3, 1, 4]), 1, "SAME"),
        (3, 4),
        False,
    ),
    "a broadcast batch": (lambda x, w: tf.matmul(x[None], w), (3, 5, 2), False),
    "one matrix of rank three": (lambda x, w: tf.matmul(tf.stack([x, x]), w), (1, 5, 2), False),
    "added to a row": (lambda x, w: tf.matmul(x, tf.reshape(w, [5, 3]) + tf.ones([3])), (5, 3), True),
}


@GRAPH_AND_EAGER
def test_unusual_uses_are_right_even_if_they_come_formed(mode):
    names = {f"w{number:02d}": case for number, case in enumerate(UNUSUAL.values())}

    def function(x, *weights):
        parts = [case[0](x, w) for case, w in zip(names.values(), weights, strict=True)]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    shapes = {name: case[1] for name, case in names.items()}
    checked = check_model(Plain(function, **shapes), normal(4, 5), dynamic=False, eager=mode == "eager")
    if mode == "graph":
        recognised = {name: not one.rest for name, one in zip(UNUSUAL, checked.found, strict=True)}
        wanted = {name: case[2] for name, case in UNUSUAL.items() if case[2] is not None}
        assert {name: recognised[name] for name in wanted} == wanted
    assert all(bool(one.rest) == bool(one.reason) for one in checked.found)


def test_variable_of_unknown_shape_comes_formed():
    w = tf.Variable(normal(5, 3), shape=[None, 3])
    checked_shape = []

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ w))
        gradients = tape.gradient(loss, [w])
        (found,) = find(gradients, [w])
        checked_shape.append((found.reason, found.rest[0] is gradients[0], found.uses))
        return gradients

    step(normal(4, 5))
    assert checked_shape == [("a variable of unknown shape", True, [])]
