"""What gradients are made of: every layer's gradient, put together again of what `find` sees."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

if not getattr(tf.keras, "__version__", "2").startswith("3."):
    pytest.skip("needs Keras 3", allow_module_level=True)

import keras

from dad.tensorflow.factors import Recorder, find

L = keras.layers


def rebuilt(found, index, factors):
    """The gradient of one variable, of factors and rest only. `factors` holds those of each use."""
    one = found[index]
    layout = one.layout
    wide = tf.float64
    if one.rides_with is not None:
        weight = found[one.rides_with]
        total = tf.zeros([weight.layout.out], wide)
        for use, (_, d) in zip(weight.uses, factors[one.rides_with], strict=True):
            rows = tf.reduce_sum(tf.cast(d, wide), 0)
            total += tf.pad(rows, [(use.out_begin, weight.layout.out - use.out_begin - tf.shape(rows)[0])])
        return tf.reshape(total, layout.shape)
    total = tf.zeros(layout.shape, wide)
    for use, (a, d) in zip(one.uses, factors[index], strict=True):
        d = tf.cast(d, wide)
        if use.kind == "indexed":
            assert a.dtype == tf.int64
            matrix = tf.math.unsorted_segment_sum(d, a, layout.out)
        else:
            part = tf.matmul(d, tf.cast(a, wide), transpose_a=True)
            end = layout.out - use.out_begin - tf.shape(part)[0]
            matrix = tf.pad(part, [(use.out_begin, end), (0, 0)])
        total += layout.from_wire(matrix)
    return total + added(one, [tf.convert_to_tensor(rest) for rest in one.rest])


def added(one, tensors):
    total = tf.zeros(one.layout.shape, tf.float64)
    for tensor in tensors:
        total += tf.cast(tensor, tf.float64)
    return total


class Checked:
    """A step's gradients, and what `find` makes of them; compared when it is made."""

    def __init__(self, variables, loss, *inputs, tolerance=1e-5, dynamic=True, eager=False, change=None):
        self.variables = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        self.tolerance = tolerance
        self._loss, self._change = loss, change
        if eager:
            outcome = self._step(True, *inputs)
        else:
            specs = [
                tf.TensorSpec([None, *x.shape[1:]] if dynamic and x.shape.rank else x.shape, x.dtype)
                for x in inputs
            ]
            self.function = tf.function(lambda *x: self._step(False, *x)).get_concrete_function(*specs)
            outcome = self.function(*inputs)
        self.gradients, self.rebuilt, self.formed, self.factors, self.rows, self.samples = outcome
        for index, (want, *got) in enumerate(zip(self.gradients, self.rebuilt, self.formed, strict=True)):
            for one in got:
                self.compare(want, one, self.found[index])

    def _step(self, eager, *inputs):
        recorder = Recorder() if eager else None
        with tf.GradientTape() as tape:
            loss = self._loss(*inputs)
        if eager:
            with recorder:
                gradients = self._take(tape, loss)
        else:
            gradients = self._take(tape, loss)
        found = self.found = find(gradients, self.variables, **({"recorder": recorder} if eager else {}))
        factors = [[use.factors(*use.inputs) for use in one.uses] for one in found]
        for one, variable in zip(found, self.variables, strict=True):
            for use in one.uses:
                formed = use.gradient(*use.inputs)
                assert formed.shape == variable.shape and formed.dtype == variable.dtype
        again = [rebuilt(found, index, factors) for index in range(len(found))]
        formed = [
            again[index]
            if one.rides_with is not None
            else added(
                one,
                [use.gradient(*use.inputs) for use in one.uses] + [tf.convert_to_tensor(r) for r in one.rest],
            )
            for index, one in enumerate(found)
        ]
        dense = [
            tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, self.variables, strict=True)
        ]
        rows = [[use.num_rows() for use in one.uses] for one in found]
        samples = [[use.num_samples() for use in one.uses] for one in found]
        return dense, again, formed, factors, rows, samples

    def _take(self, tape, loss):
        gradients = tape.gradient(loss, self.variables)
        return self._change(gradients) if self._change else gradients

    def compare(self, want, got, one):
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        assert np.all(np.isfinite(want))
        scale = max(np.abs(want).max(), 1e-30) if want.size else 1.0
        assert np.abs(want - got).max(initial=0) <= self.tolerance * scale, one


def square_loss(model):
    def loss(*inputs):
        out = model(*inputs)
        weight = tf.cast(tf.range(1, tf.size(out) + 1), tf.float32) / tf.cast(tf.size(out), tf.float32)
        return tf.reduce_sum(tf.cast(out, tf.float32) ** 2 * tf.reshape(weight, tf.shape(out)))

    return loss


def check_model(model, *inputs, **options):
    model(*inputs)
    return Checked(model.trainable_variables, square_loss(model), *inputs, **options)


def normal(*shape, dtype=tf.float32):
    return tf.constant(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


MODES = pytest.mark.parametrize("mode", ["graph", "static", "eager"])


def options(mode):
    return {"dynamic": mode == "graph", "eager": mode == "eager"}


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


@MODES
@pytest.mark.parametrize("mask_zero", [False, True])
def test_embedding_is_indexed(mode, mask_zero):
    model = keras.Sequential([L.Embedding(7, 3, mask_zero=mask_zero), L.Dense(2)])
    checked = check_model(model, tf.constant([[1, 2, 1], [3, 1, 6]]), **options(mode))
    (use,) = checked.found[0].uses
    assert use.kind == "indexed" and checked.found[0].rest == []
    assert (checked.found[0].layout.out, checked.found[0].layout.columns) == (7, 3)
    assert int(checked.rows[0][0]) == 6 and int(checked.samples[0][0]) == 2


CONVOLUTIONS = {
    "same": {"padding": "same"},
    "strided": {"strides": 2, "padding": "same"},
    "valid": {"strides": 2},
    "dilated": {"dilation_rate": 2},
    "dilated same": {"dilation_rate": 2, "padding": "same"},
    "one": {"kernel_size": 1},
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_convolution(mode, kind, rank):
    settings = {"kernel_size": 3, **CONVOLUTIONS[kind]}
    layer = {1: L.Conv1D, 2: L.Conv2D, 3: L.Conv3D}[rank](4, **settings)
    checked = check_model(keras.Sequential([layer]), normal(2, *[8, 7, 6][:rank], 3), **options(mode))
    kernel, bias = checked.found
    assert len(kernel.uses) == 1 and not kernel.rest and kernel.bias == 1 and bias.rides_with == 0
    assert int(checked.samples[0][0]) == 2
    assert int(checked.rows[0][0]) == checked.factors[0][0][0].shape[0]
