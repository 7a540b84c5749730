"""Gradients put together again of what `find` sees: for the tests of factors and of links between them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

if not getattr(tf.keras, "__version__", "2").startswith("3."):
    pytest.skip("needs Keras 3", allow_module_level=True)

import keras

from dad.tensorflow.factors.find import Recorder, find

L = keras.layers


def rebuilt(found, index, factors):
    """The gradient of one variable, of factors and rest only. `factors` holds those of each group of each
    use."""
    one = found[index]
    layout = one.layout
    wide = tf.float64
    if one.rides_with is not None:
        weight = found[one.rides_with]
        total = tf.zeros([weight.layout.out], wide)
        for (_, d), begin in zip(factors[one.rides_with], begins(weight), strict=True):
            rows = tf.reduce_sum(tf.cast(d, wide), 0)
            total += tf.pad(rows, [(begin, weight.layout.out - begin - tf.shape(rows)[0])])
        return tf.reshape(total, layout.shape)
    total = tf.zeros(layout.shape, wide)
    for (a, d), begin in zip(factors[index], begins(one), strict=True):
        d = tf.cast(d, wide)
        if a.shape.rank == 1:  # indexed rows
            assert a.dtype == tf.int64
            matrix = tf.math.unsorted_segment_sum(d, a, layout.out)
        else:
            part = tf.matmul(d, tf.cast(a, wide), transpose_a=True)
            end = layout.out - begin - tf.shape(part)[0]
            matrix = tf.pad(part, [(begin, end), (0, 0)])
        total += layout.from_wire(matrix)
    return total + added(one, [tf.convert_to_tensor(rest) for rest in one.rest])


def begins(one):
    """The first output row of each group of each use."""
    return [begin for use in one.uses for begin in use.begins]


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
            specs = [tf.TensorSpec([None] * dynamic + x.shape[int(dynamic) :], x.dtype) for x in inputs]
            # AutoGraph would read the source of every function here, which takes longer than all the rest.
            function = tf.function(lambda *x: self._step(False, *x), autograph=False)
            outcome = function.get_concrete_function(*specs)(*inputs)
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
        factors = [[pair for use in one.uses for pair in use.segments(*use.inputs)] for one in found]
        again = [rebuilt(found, index, factors) for index in range(len(found))]
        formed = []
        for one, variable, other in zip(found, self.variables, again, strict=True):
            parts = [use.gradient(*use.inputs) for use in one.uses]
            assert all(part.shape == variable.shape and part.dtype == variable.dtype for part in parts)
            whole = added(one, parts + [tf.convert_to_tensor(rest) for rest in one.rest])
            formed.append(whole if one.rides_with is None else other)
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
        # Gradients that are zero but for rounding, such as those of the keys' bias, compare with the others.
        largest = max(np.abs(np.asarray(gradient)).max(initial=0) for gradient in self.gradients)
        scale = max(np.abs(want).max(initial=0), 1e-2 * float(largest))
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


@pytest.fixture(autouse=True, scope="module")
def plain_graphs():
    """Optimizing graphs takes longer than running them here."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


MODES = pytest.mark.parametrize("mode", ["graph", "static", "eager"])
GRAPH_AND_EAGER = pytest.mark.parametrize("mode", ["graph", "eager"])


def options(mode):
    return {"dynamic": mode == "graph", "eager": mode == "eager"}


class Plain(tf.Module):
    """Variables and a function of them."""

    def __init__(self, function, **shapes):
        super().__init__()
        self._function = function
        self.all = [tf.Variable(normal(*shape), name=name) for name, shape in sorted(shapes.items())]

    @property
    def trainable_variables(self):
        return self.all

    def __call__(self, *inputs):
        return self._function(*inputs, *self.all)
