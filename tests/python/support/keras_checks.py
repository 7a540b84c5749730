"""Training with dad.keras on Keras 3, on either backend and any number of ranks: the checks that
test_keras_*.py launch. Where there is a plain Keras to compare with, it trains on the joined batches."""

import contextlib
import io
import os
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tf_util import Lazy, raises

keras = Lazy("keras")
hvd = Lazy("dad.keras")

ROWS, COLUMNS, STEPS = 4, 6, 4


def before_check():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


def on_tensorflow():
    return keras.backend.backend() == "tensorflow"


def shard(rank, steps=STEPS, columns=COLUMNS):
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(steps * ROWS, columns)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) * 0.5).astype(np.float32)


def joined(steps=STEPS, columns=COLUMNS):
    """The batches of all ranks one after the other, step by step."""
    shards = [shard(rank, steps, columns) for rank in range(hvd.size())]
    parts = [[a.reshape(steps, ROWS, -1) for a in s] for s in shards]
    return tuple(
        np.concatenate(p, axis=1).reshape(steps * ROWS * hvd.size(), -1) for p in zip(*parts, strict=True)
    )


def make_model(seed=1, **options):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((COLUMNS,)),
            keras.layers.Dense(5, activation="tanh", **options),
            keras.layers.Dense(1, **options),
        ]
    )


def fit(model, optimizer, data, epochs=2, batch_size=ROWS, compile_options=(), **options):
    model.compile(optimizer, loss="mse", **dict(compile_options))
    return model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **options)


def assert_equals_plain_keras(make_optimizer, model=make_model, rtol=1e-4, **options):
    """A distributed fit against a plain one on the joined batches."""
    ours, theirs = model(), model()
    distributed_options = options.pop("distributed", {})
    fit(ours, hvd.DistributedOptimizer(make_optimizer(), **distributed_options), shard(hvd.rank()), **options)
    fit(theirs, make_optimizer(), joined(), batch_size=ROWS * hvd.size(), **options)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)
    assert_replicas_are_equal(ours)
    return ours


def assert_replicas_are_equal(model):
    everyone = hvd.allgather_object([*model.get_weights(), *map(value, model.optimizer.variables)])
    for theirs in everyone[1:]:
        for a, b in zip(everyone[0], theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_replicas_are_equal_weights(model):
    everyone = hvd.allgather_object(model.get_weights())
    for theirs in everyone[1:]:
        for a, b in zip(everyone[0], theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def value(variable):
    return keras.ops.convert_to_numpy(variable)


def check_fit_equals_plain_keras_on_the_joined_batch():
    assert_equals_plain_keras(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))
    assert_equals_plain_keras(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))


def check_clipping_averages_and_schedules_see_reduced_gradients():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ema = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    assert_equals_plain_keras(lambda: keras.optimizers.SGD(0.1, clipnorm=0.1, loss_scale_factor=8.0))
    assert_equals_plain_keras(lambda: keras.optimizers.SGD(decay, global_clipnorm=0.1, **ema))


def check_options_of_the_optimizer():
    make = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    assert_equals_plain_keras(make, distributed={"groups": 2, "gradient_predivide_factor": 2.0})
    assert_equals_plain_keras(make, distributed={"compression": hvd.Compression.fp16}, rtol=5e-2)
    for options, words in (
        ({"op": 5}, "Average and Sum"),
        ({"groups": -1}, "groups"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"compression": "rank_dad:rank=0"}, "rank=0"),
        ({"compression": 5}, "compression=5"),
    ):
        raises(ValueError, lambda options=options: hvd.DistributedOptimizer(make(), **options), words)
    raises(ValueError, lambda: hvd.DistributedOptimizer("sgd"), "not an optimizer of Keras")
    raises(ValueError, lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(make())), "already")


def check_gradients_that_add_up():
    def sgd(**options):
        return lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options)

    ours = assert_equals_plain_keras(sgd(gradient_accumulation_steps=2))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd()(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    fit(model, optimizer, shard(hvd.rank()))
    for a, b in zip(model.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # Horovod adds up without dividing.
    summed, doubled = make_model(), make_model()
    summing = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    fit(summed, summing, shard(hvd.rank()))
    assert summing._agg_helper.counter.numpy() == 0
    fit(
        doubled,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
        shard(hvd.rank()),
    )
    for a, b in zip(summed.get_weights(), doubled.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def check_gradients_that_add_up_go_by_a_method_or_dense():
    def sgd():
        return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)

    # Exact where Keras runs on TensorFlow; on torch gradients go dense.
    assert_equals_plain_keras(sgd, distributed={"compression": "dad"})


def check_mixed_precision_skips_a_step_on_all_ranks_or_none():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    x, y = (0.1 * a for a in shard(hvd.rank()))  # float16 holds the scaled loss
    for step in range(4):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        before = model.get_weights()
        bad = x[rows] * (np.inf if step == 2 and hvd.rank() == hvd.size() - 1 else 1)
        with np.errstate(all="ignore"):
            model.train_on_batch(bad, y[rows])
        same = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        assert same == (step == 2), step
        assert_replicas_are_equal(model)
    assert value(model.optimizer.dynamic_scale) == 2.0**14


def check_an_optimizer_that_scales_the_loss_may_be_given():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))

    assert_equals_plain_keras(scaled)
    model = make_model()
    fit(model, hvd.DistributedOptimizer(scaled(), compression="int8"), shard(hvd.rank()))
    assert len(model.optimizer.plan()) == (4 if hvd.size() > 1 else 0)


def check_functional_and_subclassed_models_and_train_steps():
    def functional():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((COLUMNS,))
        hidden = keras.layers.Dense(4, activation="relu")
        both = keras.layers.concatenate([hidden(inputs), hidden(-inputs)])  # a layer used twice
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LayerNormalization()(both)))

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

    def subclassed():
        keras.utils.set_random_seed(3)
        return Subclassed()

    for model in (functional, subclassed):
        assert_equals_plain_keras(lambda: keras.optimizers.Adam(0.01), model)


def check_custom_train_step():
    if not on_tensorflow():
        pytest.skip("written for TensorFlow")
    import tensorflow as tf

    class Custom(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def model():
        keras.utils.set_random_seed(4)
        return Custom([keras.Input((COLUMNS,)), keras.layers.Dense(3), keras.layers.Dense(1)])

    assert_equals_plain_keras(lambda: keras.optimizers.SGD(0.05), model)


def check_gradients_that_a_train_step_of_torch_changes():
    """With a method, .grad is the reduced gradient after backward(), and what a script makes of it is used."""
    if on_tensorflow():
        pytest.skip("written for torch")
    if hvd.size() == 1:
        pytest.skip("with one rank there is no exchange")
    import torch

    class Custom(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            with torch.no_grad():
                self.optimizer.apply([g * 0.01 / norm for g in gradients], self.trainable_weights)
            return {"loss": loss.detach()}

    def model():
        keras.utils.set_random_seed(4)
        return Custom([keras.Input((COLUMNS,)), keras.layers.Dense(3), keras.layers.Dense(1)])

    for method in ("dad", "edad"):
        ours, theirs = model(), model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=method, model=ours)
        fit(ours, optimizer, shard(hvd.rank()))
        fit(theirs, keras.optimizers.SGD(0.05), joined(), batch_size=ROWS * hvd.size())
        for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert_replicas_are_equal(ours)


def check_modes_of_running():
    make = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    assert_equals_plain_keras(make, compile_options={"run_eagerly": True}, epochs=1)
    if on_tensorflow():
        assert_equals_plain_keras(make, compile_options={"steps_per_execution": 2})
    model, other = make_model(), make_model()
    model.compile(hvd.DistributedOptimizer(make()), loss="mse")
    other.compile(make(), loss="mse")
    x, y = shard(hvd.rank())
    a, b = joined()
    for step in range(3):
        model.train_on_batch(x[step * ROWS : (step + 1) * ROWS], y[step * ROWS : (step + 1) * ROWS])
        rows = slice(step * ROWS * hvd.size(), (step + 1) * ROWS * hvd.size())
        other.train_on_batch(a[rows], b[rows])
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def check_embeddings():
    def model():
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(9, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )

    def data(rank):
        generator = np.random.default_rng(rank)
        return generator.integers(0, 9, (STEPS * ROWS, 3)), generator.normal(size=(STEPS * ROWS, 1))

    class Dense(keras.optimizers.Adam):
        """Keras itself takes rows that come twice in a batch for two gradients."""

        def apply(self, grads, trainable_variables=None):
            if on_tensorflow():
                import tensorflow as tf

                grads = [tf.convert_to_tensor(gradient) for gradient in grads]
            return super().apply(grads, trainable_variables)

    for sparse_as_dense in (False, True) if hvd.size() > 1 else ():
        ours, theirs = model(), model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), sparse_as_dense=sparse_as_dense)
        fit(ours, optimizer, data(hvd.rank()))
        parts = [[a.reshape(STEPS, ROWS, -1) for a in data(rank)] for rank in range(hvd.size())]
        whole = [
            np.concatenate(p, axis=1).reshape(STEPS * ROWS * hvd.size(), -1) for p in zip(*parts, strict=True)
        ]
        fit(theirs, Dense(0.01), whole, batch_size=ROWS * hvd.size())
        for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        assert_replicas_are_equal(ours)


def check_convolutions_batch_norm_and_dropout():
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1),
        ]
    )
    x = np.random.default_rng(hvd.rank()).normal(size=(12, 8, 8, 1)).astype(np.float32)
    y = x.mean(axis=(1, 2))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), (x, y), callbacks=callbacks)
    trainable = hvd.allgather_object([value(v) for v in model.trainable_variables])
    for theirs in trainable[1:]:
        for a, b in zip(trainable[0], theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert_batch_norm_is_pooled(model, lambda: hvd.average_batch_norm(model))


def assert_batch_norm_is_pooled(model, average):
    """Moving statistics are those of each rank's own batches, until they are averaged."""

    def statistics():
        layers = [one for one in model.layers if hasattr(one, "moving_mean")]
        mine = [(value(one.moving_mean), value(one.moving_variance)) for one in layers]
        return [np.array(of_layer) for of_layer in zip(*hvd.allgather_object(mine), strict=True)]

    before = statistics()
    average()
    after = statistics()
    assert before
    for (means, variances), (pooled_means, pooled_variances) in zip(
        (np.swapaxes(one, 0, 1) for one in before), (np.swapaxes(one, 0, 1) for one in after), strict=True
    ):
        assert hvd.size() == 1 or not np.array_equal(means[0], means[1])
        assert all(np.array_equal(one, pooled_means[0]) for one in pooled_means)
        assert all(np.array_equal(one, pooled_variances[0]) for one in pooled_variances)
        np.testing.assert_allclose(pooled_means[0], means.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            pooled_variances[0], variances.mean(0) + means.var(0), rtol=1e-5, atol=1e-6
        )


def check_layers_whose_gradients_stay_here():
    for scale in (True, False):
        ours, theirs = make_model(), make_model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.05), local_layers=ours.layers[-1], scale_local_gradients=scale
        )
        fit(ours, optimizer, shard(hvd.rank(), steps=1), epochs=1)
        fit(theirs, keras.optimizers.SGD(0.05), joined(steps=1), epochs=1, batch_size=ROWS * hvd.size())
        alone = make_model()
        rate = 0.05 / (hvd.size() if scale else 1)
        fit(alone, keras.optimizers.SGD(rate), shard(hvd.rank(), steps=1), epochs=1)
        expected = [*theirs.get_weights()[:2], *alone.get_weights()[2:]]
        for a, b in zip(ours.get_weights(), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    unbuilt = keras.layers.Dense(2)
    for layers, words in (([unbuilt], f"{unbuilt.name} has no weights yet"), ([1], "must be of")):
        raises(
            ValueError,
            lambda layers=layers: hvd.PartialDistributedOptimizer(
                keras.optimizers.SGD(0.05), local_layers=layers
            ),
            words,
        )


def check_model_says_what_is_trained():
    raises(ValueError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), model=3), "model=3")
    raises(TypeError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), *[None] * 14), "positional")
    model, other = make_model(), make_model()

    def of_model():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), model=model)

    raises(ValueError, lambda: fit(other, of_model(), shard(hvd.rank())), "is not one of", "kernel")
    plain = make_model()
    fit(model, of_model(), shard(hvd.rank()))
    fit(plain, keras.optimizers.SGD(0.05), joined(), batch_size=ROWS * hvd.size())
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # Where Keras runs eagerly its tape shows no factors, and on torch the first step would go dense.
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression="rank_dad:rank=1", model=model
    )
    model.compile(optimizer, loss="mse", run_eagerly=True)
    x, y = shard(hvd.rank())
    model.train_on_batch(x[:ROWS], y[:ROWS])
    assert_replicas_are_equal(model)
    if hvd.size() > 1:
        assert "eagerly" not in str(optimizer.plan()), optimizer.plan()
        assert optimizer.plan()[0]["method"] != "dense", optimizer.plan()


def check_plans_have_the_names_of_variables():
    """And so have the globs of per_layer; whatever goes dense has a row, too."""
    for ask in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.per_layer):
        model = make_model()
        names = [variable.path for variable in model.trainable_variables]
        wanted = ["dense" if ask is hvd.Compression.none else "fp16"] * 4
        if ask is hvd.Compression.per_layer:
            ask = ask({names[0]: hvd.Compression.int8, "*/bias": hvd.Compression.fp16})
            wanted = ["int8", "fp16", "dense", "fp16"]
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=ask), shard(hvd.rank()))
        plan = model.optimizer.plan()
        expected = list(zip(names, wanted, strict=True)) if hvd.size() > 1 else []
        assert [(row["name"], row["method"]) for row in plan] == expected, plan


def check_plans_are_printed_when_they_have_been_measured():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression="int8")
    with mock.patch.dict(os.environ, DAD_PLAN="1"), contextlib.redirect_stderr(io.StringIO()) as stderr:
        fit(model, optimizer, shard(hvd.rank()))
    lines = stderr.getvalue().splitlines()
    summaries = [line for line in lines if line.startswith("plan: ")]
    assert len(summaries) == (hvd.rank() == 0 and hvd.size() > 1), lines
    if summaries:
        assert " measured (" in summaries[0], summaries
        for row in optimizer.plan():
            assert row["measured_bytes"] > 0 and row["predicted_bytes"] > 0, row
            assert any(line.startswith(row["name"]) for line in lines), row


def check_collectives_of_the_framework_are_there():
    rank, size = hvd.rank(), hvd.size()
    one = keras.ops.convert_to_tensor(np.full(size, float(rank), np.float32))
    assert value(hvd.alltoall(one)).tolist() == [float(r) for r in range(size)]
    assert [value(t)[0] for t in hvd.grouped_allreduce([one, one + 1], op=hvd.Max)] == [size - 1, size]
    hvd.barrier()
    # Uneven data: the others go on with the mean over all ranks.
    for _ in range(1 + rank):
        hvd.allreduce(np.float32(1.0), name="uneven")
    assert int(hvd.join()) == size - 1


def check_the_class_of_the_optimizer():
    class Mine(keras.optimizers.SGD):
        def __init__(self, flavour="plain", **kwargs):
            super().__init__(**kwargs)
            self.flavour = flavour

        def get_config(self):
            return {**super().get_config(), "flavour": self.flavour}

    optimizer = hvd.DistributedOptimizer(Mine("mint", learning_rate=0.05), name="named")
    assert isinstance(optimizer, Mine) and type(optimizer).__name__ == "Mine" and optimizer.flavour == "mint"
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.flavour == "mint" and again._dad_settings.name == "named"
    config = keras.optimizers.serialize(optimizer)
    assert config["class_name"] == "Mine"
    assert optimizer.variables() == optimizer.variables, "a method in older scripts"
    model = make_model()
    fit(model, optimizer, shard(hvd.rank()))
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "m.keras")
        loaded = hvd.load_model(Path(folder) / "m.keras", custom_optimizers=[Mine])
        assert isinstance(loaded.optimizer, Mine)
    public = keras.optimizers.serialize(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    assert (public["module"], public["class_name"]) == ("keras.optimizers", "Adam")
    assert type(keras.optimizers.deserialize(public)).__name__ == "Adam"


def check_an_optimizer_in_use_keeps_its_state():
    model = make_model()
    fit(model, keras.optimizers.Adam(0.01), joined(), batch_size=ROWS * hvd.size(), epochs=1)
    moments = [value(v) for v in model.optimizer.variables]
    model.compile(hvd.DistributedOptimizer(model.optimizer), loss="mse")
    for a, b in zip(moments, map(value, model.optimizer.variables), strict=True):
        np.testing.assert_array_equal(a, b)
    model.fit(*shard(hvd.rank()), batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    other = make_model()
    fit(other, keras.optimizers.Adam(0.01), joined(), batch_size=ROWS * hvd.size(), epochs=2)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def check_xla_is_never_picked():
    if not on_tensorflow():
        pytest.skip("XLA is TensorFlow's")
    import tensorflow as tf

    class Device:
        device_type = "GPU"

    original = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda *args: [*original(), Device()]
    try:
        model, plain = make_model(), make_model()
        plain.compile(keras.optimizers.SGD(0.1), loss="mse")
        assert plain.jit_compile, "the device does not count"
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        assert not model.jit_compile
        model.fit(*shard(hvd.rank()), batch_size=ROWS, verbose=0)
    finally:
        tf.config.list_physical_devices = original
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=True)
    assert any("jit_compile=True" in str(w.message) for w in caught)
    model.fit(*shard(hvd.rank()), batch_size=ROWS, verbose=0)


def check_only_rank_zero_shows_progress(capsys=None):
    import contextlib
    import io

    text = io.StringIO()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with contextlib.redirect_stdout(text):
        model.fit(*shard(hvd.rank()), batch_size=ROWS)
    assert ("loss" in text.getvalue()) == (hvd.rank() == 0), text.getvalue()


def check_uneven_data_with_join():
    """Every rank has one batch more than the one before."""
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.Sum), loss="mse")
    x, y = shard(hvd.rank())
    for step in range(2 + hvd.rank()):
        rows = slice(step % STEPS * ROWS, (step % STEPS + 1) * ROWS)
        model.train_on_batch(x[rows], y[rows])
    collectives = __import__("dad.keras.framework", fromlist=["framework"]).framework().collectives
    assert int(collectives.join()) == hvd.size() - 1
    hvd.broadcast_variables(model.variables, hvd.size() - 1)
    assert_replicas_are_equal_weights(model)


def check_values():
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == size
    assert [float(v) for v in hvd.allgather([float(rank)])] == [float(r) for r in range(size)]
    assert float(hvd.broadcast(float(rank), size - 1)) == size - 1
    assert hvd.reducescatter(np.ones(size, np.float32), op=hvd.Sum).shape[0] == 1
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    raises(RuntimeError, lambda: hvd.broadcast_global_variables(0), "does not support eager")
