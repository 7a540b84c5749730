"""Training by methods in TensorFlow: fit, feedback, checkpoints, scaled losses, mixtures, joins, errors."""

import copy
import functools
import importlib
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tf_methods_util import EXACT, FEEDBACK, LOSSY, batches, make_step, mlp_in_keras, plain_gradients
from tf_util import Lazy, hvd, launched_once, raises, tf
from util import check_names

keras = Lazy("keras")
NUM_RANKS = 2

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def before_check():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


def shard(rank, rows=16):
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(rows, 12)).astype(np.float32)
    return x, generator.normal(size=(rows, 5)).astype(np.float32)


def trained(method, model=None, epochs=2, optimizer=None, **options):
    model = model or mlp_in_keras()
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    if method is not None:
        optimizer = hvd().DistributedOptimizer(optimizer, compression=method)
        model.compile(optimizer, loss="mse")
    model.fit(*shard(hvd().rank()), batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)
    return model


def assert_replicas_are_equal(model, where):
    everyone = hvd().allgather_object(model.get_weights())
    for theirs in everyone[1:]:
        for a, b in zip(everyone[0], theirs, strict=True):
            np.testing.assert_array_equal(a, b, where)


def check_fit_keeps_replicas_bit_equal_by_every_method():
    dense = trained("none").get_weights()
    for method in [*EXACT, *LOSSY]:
        model = trained(method)
        assert_replicas_are_equal(model, method)
        if method in EXACT:
            for a, b in zip(model.get_weights(), dense, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=method)


def check_what_is_applied_and_what_is_kept_add_up():
    from dad.state.states import saved_shares

    # The last one's shares are larger than dense: after its first step it goes dense.
    for method in [*FEEDBACK, "auto", "vgc:alpha=0.000001,coding=word,error_feedback=1"]:
        model = mlp_in_keras()
        step = make_step(model, method, compiled=True)
        total = applied = 0.0
        for x, y in batches(hvd().rank(), (12,), 5, steps=9):
            mine = plain_gradients(model, x, y)
            total = total + np.concatenate([g.reshape(-1).astype(np.float64) for g in mine])
            reduced = [g.numpy() for g in step(tf.constant(x), tf.constant(y))]
            applied = applied + np.concatenate([g.reshape(-1).astype(np.float64) for g in reduced])
        (board,) = {
            e.board
            for e in step.get_concrete_function(
                tf.TensorSpec((6, 12)), tf.TensorSpec((6, 5))
            ).graph._dad_exchanges
        }
        shares = saved_shares(copy.deepcopy(board.save()))
        names = [v.path for v in model.trainable_variables]
        kept = []
        for name, variable in zip(names, model.trainable_variables, strict=True):
            share = shares.get(name, np.zeros(variable.shape[::-1]))
            kept.append(np.asarray(share, np.float64).T.reshape(-1))
        kept = np.concatenate(kept)
        sums = hvd().allreduce(np.stack([total, kept * hvd().size()]), op=hvd().Average).numpy()
        error = np.abs(applied + sums[1] - sums[0]).max() / np.abs(sums[0]).max()
        assert error < 1e-4, f"{method}: {error}"


def check_state_is_saved_and_restored():
    import dad.keras

    for method in ("rank_dad:rank=2", "vgc:alpha=0.5", "int8"):
        straight = trained(method, epochs=4)
        with tempfile.TemporaryDirectory() as folder:
            half = trained(method, epochs=2)
            path = Path(folder) / f"{hvd().rank()}.keras"
            half.save(path)
            loaded = dad.keras.load_model(path, compression=method)
            trained(None, loaded, epochs=2)
            for a, b in zip(loaded.get_weights(), straight.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b, method)
            plain = keras.models.load_model(path)  # without dad
            assert type(plain.optimizer) is keras.optimizers.SGD
            # One checkpoint for all ranks.
            prefix = hvd().broadcast_object(str(Path(folder) / "checkpoint"))
            written = hvd().save_checkpoint(tf.train.Checkpoint(model=half, optimizer=half.optimizer), prefix)
            again = mlp_in_keras()
            again.compile(
                hvd().DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), compression=method),
                loss="mse",
            )
            again.optimizer.build(again.trainable_variables)
            tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(written)
            hvd().allreduce(np.float32(1))  # all have read it: rank 0 deletes its folder
            trained(None, again, epochs=2)
            for a, b in zip(again.get_weights(), straight.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b, method)


def check_a_scaled_loss_and_a_step_that_is_left_out():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    for method in ("rank_dad:rank=2", "dad"):
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(40, dtype=policy)])
        model.add(keras.layers.Dense(5, dtype=policy))
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**10)
        model.compile(hvd().DistributedOptimizer(scaled, compression=method), loss="mse")
        x, y = shard(hvd().rank())
        if hvd().rank() == 0:
            x[5, 3] = np.inf
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        assert_replicas_are_equal(model, method)
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert float(scaled.dynamic_scale) < 2.0**10


def check_warm_up_mixtures_and_uneven_data():
    compression = hvd().Compression.per_layer(
        {"*/kernel": hvd().Compression.rank_dad(rank=1, warmup_steps=3), "*": "none"}
    )
    model = trained(compression)
    plan = {row["name"]: row["method"] for row in model.optimizer.plan()}
    assert all("rank_dad" in m for n, m in plan.items() if n.endswith("kernel") and "2/" not in n), plan
    assert all(m == "dense" for n, m in plan.items() if n.endswith("bias")), plan
    assert_replicas_are_equal(model, "mixture")
    model = mlp_in_keras()
    step = make_step(model, "rank_dad:rank=2", compiled=True)
    data = batches(hvd().rank(), (12,), 5, steps=3 + 2 * hvd().rank())
    for x, y in data:
        for g, v in zip(step(tf.constant(x), tf.constant(y)), model.trainable_variables, strict=True):
            v.assign_sub(0.1 * g)
    assert hvd().join() == hvd().size() - 1
    hvd().broadcast_variables(model.trainable_variables, hvd().size() - 1)
    for x, y in batches(hvd().rank(), (12,), 5, steps=2):
        reduced = [g.numpy() for g in step(tf.constant(x), tf.constant(y))]
    everyone = hvd().allgather_object(reduced)
    for a, b in zip(everyone[0], everyone[-1], strict=True):
        np.testing.assert_array_equal(a, b)


def check_ranks_that_disagree_all_get_an_error():
    model = mlp_in_keras()
    method = "rank_dad:rank=2" if hvd().rank() == 0 else "rank_dad:rank=3"
    x, y = batches(hvd().rank(), (12,), 5, steps=1)[0]
    step = make_step(model, method, compiled=True)
    raises(
        tf.errors.FailedPreconditionError, lambda: step(tf.constant(x), tf.constant(y)), "rank=2", "rank=3"
    )
    assert float(hvd().allreduce(np.float32(hvd().rank()), op=hvd().Sum)) == sum(range(hvd().size()))
    # They go on together, with a tape that only one of them has had.
    for _ in range(2):
        make_step(model, "rank_dad:rank=2", compiled=True)(tf.constant(x), tf.constant(y))
    # A rank without a method, or in its warm-up, sends while another one plans. What it has sent does not stay
    # behind: the names can be used again.
    mixture = hvd().Compression.per_layer({"*/kernel": "rank_dad:rank=2", "*": "none"})
    for eagerly, methods in (
        (False, ("int8", "none")),
        (True, ("exact", "auto")),
        (False, (mixture, "auto")),
    ):

        def fit(method, eagerly=eagerly):
            optimizer = hvd().DistributedOptimizer(
                keras.optimizers.SGD(0.05), name="mixed", compression=method
            )
            model.compile(optimizer, loss="mse", run_eagerly=eagerly)
            model.fit(*shard(hvd().rank()), batch_size=4, epochs=1, shuffle=False, verbose=0)

        wrong = methods[hvd().rank() % 2]
        with pytest.raises(tf.errors.FailedPreconditionError) as error:
            fit(wrong)
        said = str(error.value)
        specs = [m if isinstance(m, str) else m.spec() for m in methods]
        assert f"compression {specs[0]} on rank 0, {specs[1]} on rank 1" in said, said
        assert "ranks disagree on" in said and "barrier" not in said, said
        assert float(hvd().allreduce(np.float32(hvd().rank()), op=hvd().Sum)) == sum(range(hvd().size()))
        for method in methods:
            fit(method)
            assert_replicas_are_equal(model, methods)
    raises(ValueError, lambda: make_step(model, "dad", False, op=hvd().Max)(x, y), "Average and op=Sum")
    raises(ValueError, lambda: hvd().allreduce(np.ones(3), compression="rank_dad"), "keeps state")


def check_a_rank_that_fails_in_the_step_that_all_observe_is_named():
    board = importlib.import_module("dad.tensorflow.board")
    x, y = map(tf.constant, batches(hvd().rank(), (12,), 5, steps=1)[0])

    def failing(*_):
        raise RuntimeError("cannot see")

    for compiled in (True, False):
        step = make_step(mlp_in_keras(), "rank_dad:rank=2", compiled)
        observe = failing if hvd().rank() == 1 else board.observe
        with mock.patch.object(board, "observe", observe):
            raises(
                tf.errors.FailedPreconditionError,
                lambda step=step: step(x, y),
                "rank 1 failed in the step that all ranks observe: RuntimeError: cannot see",
            )
        # The next step is observed instead.
        results = hvd().allgather_object([gradient.numpy() for gradient in step(x, y)])
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


def check_a_plan_is_made_once_also_for_layers_without_rows():
    """vgc takes rows where there are some: that a recurrent layer has none asks for no other plan."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((3, 6)), layers.GRU(16), layers.Dense(2)])
    board = importlib.import_module("dad.tensorflow.board")
    plans = []
    make_plan = board.Board._make_plan
    with mock.patch.object(board.Board, "_make_plan", lambda *of: plans.append(of) or make_plan(*of)):
        step = make_step(model, "vgc", compiled=True)
        for x, y in batches(hvd().rank(), (3, 6), 2, steps=4):
            step(tf.constant(x), tf.constant(y))
    assert len(plans) == 1, len(plans)


def check_sessions_of_tf1():
    """Placeholders have no known batch; the plan is made while the session runs."""
    v1 = tf.compat.v1
    weights = np.random.default_rng(1).normal(size=(12, 30)).astype(np.float32)
    rows = 2 + hvd().rank()
    data = [np.random.default_rng(10 + rank).normal(size=(2 + rank, 12)) for rank in range(hvd().size())]
    expected = np.mean([d.T @ np.tanh(d @ weights) * 2 / d.shape[0] / 30 for d in data], axis=0)

    def check(method, use_resource):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [None, 12])
            kernel = v1.get_variable("kernel", initializer=weights, use_resource=use_resource)
            target = tf.stop_gradient(tf.matmul(x, kernel) - tf.tanh(tf.matmul(x, kernel)))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) - target))
            optimizer = hvd().DistributedOptimizer(v1.train.GradientDescentOptimizer(0.0), compression=method)
            ((gradient, _),) = optimizer.compute_gradients(loss, [kernel])
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    found = session.run(gradient, {x: data[hvd().rank()].astype(np.float32)})
                    assert data[hvd().rank()].shape[0] == rows
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=method)

    for method in ("dad", "exact", "none"):
        check(method, use_resource=True)
    # What tf.disable_v2_behavior() does to graphs, as most scripts of TF1 call it.
    v1.disable_v2_tensorshape()
    v1.disable_control_flow_v2()
    try:
        for method in ("dad", "exact"):
            check(method, use_resource=False)
        assert not isinstance(tf.TensorShape([1])[0], int), "the user's setting is gone"
    finally:
        v1.enable_v2_tensorshape()
        v1.enable_control_flow_v2()


def check_capture_finds_the_factors_of_eager_steps_by_any_tape():
    x, y = shard(hvd().rank(), rows=4)
    expected = None
    for method, chosen in (
        ("none", "dense"),
        ("dad", "dad"),
        ("edad", "edad"),
        ("rank_dad:rank=2", "rank_dad"),
    ):
        model = mlp_in_keras()
        optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.05), compression=method)
        for _ in range(2):
            with hvd().capture(model) as captured, tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(captured(x) - y))
                variables = model.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        assert_replicas_are_equal(model, method)
        ways = {row["name"]: (row["method"], row["why"]) for row in optimizer.plan()}
        assert ways[variables[0].path][0] == chosen, ways
        expected = expected or model.get_weights()
        if method in EXACT:
            for a, b in zip(model.get_weights(), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=method)
    # A tape of dad's sees only the backward pass by itself.
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    tape = hvd().DistributedGradientTape(tape, compression="edad")
    tape.gradient(loss, model.trainable_variables)
    assert tape.plan()[0]["method"] == "dad", tape.plan()


def check_a_step_may_reduce_the_same_names_twice():
    """Gradients of two losses, or of two models whose layers have the same names, wait for each other; and a
    variable that was written in between is, to the second, what the forward pass has read."""

    def net(seed):
        tf.keras.utils.set_random_seed(seed)
        inputs = tf.keras.Input((16,))
        hidden = tf.keras.layers.Dense(24, activation="relu", name="first")(inputs)
        return tf.keras.Model(inputs, tf.keras.layers.Dense(8, name="last")(hidden))

    def data(rank):
        x = np.random.default_rng(rank).normal(size=(2, 16)).astype(np.float32)
        return x, x[:, :8] * 0.5

    def train(wrap, x, y, two_models):
        models = [net(1), net(2 if two_models else 1)]
        if not two_models:
            models[1] = models[0]
        optimizers = [wrap(tf.keras.optimizers.SGD(0.05)) for _ in range(1 + two_models)]
        for optimizer, model in zip(optimizers, models, strict=False):
            optimizer.build(model.trainable_variables)

        @tf.function
        def step():
            with tf.GradientTape(persistent=True) as tape:
                losses = [
                    tf.reduce_mean((model(x) - way * y) ** 2)
                    for model, way in zip(models, (1, -1), strict=True)
                ]
            gradients = [
                tape.gradient(one, model.trainable_variables)
                for one, model in zip(losses, models, strict=True)
            ]
            for number, (model, of_model) in enumerate(zip(models, gradients, strict=True)):
                optimizer = optimizers[number % len(optimizers)]
                optimizer.apply_gradients(zip(of_model, model.trainable_variables, strict=True))

        for _ in range(3):
            step()
        return [weight for model in models for weight in model.get_weights()]

    everyone = [np.concatenate(parts) for parts in zip(*map(data, range(hvd().size())), strict=True)]
    for two_models in (True, False):
        expected = train(lambda optimizer: optimizer, *everyone, two_models)
        for method in ("dad", "edad", "int8"):
            wrap = functools.partial(hvd().DistributedOptimizer, compression=method)
            found = train(wrap, *data(hvd().rank()), two_models)
            tolerance = 0.1 if method == "int8" else 1e-5
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=tolerance, err_msg=f"{method} {two_models}")


def check_eager_and_custom_steps():
    """By a tape that is not dad's: gradients come formed in eager mode; clipped by a scalar they have factors."""

    class Clipping(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    for eagerly, words in ((True, "computed eagerly"), (False, "rows of")):
        model = Clipping(mlp_in_keras())
        optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.05), compression="dad")
        model.compile(optimizer, run_eagerly=eagerly)
        model.fit(*shard(hvd().rank()), batch_size=4, epochs=1, shuffle=False, verbose=0)
        assert_replicas_are_equal(model, words)
        assert words in " ".join(row["why"] for row in model.optimizer.plan()), model.optimizer.plan()
    passes = hvd().DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression="rank_dad:rank=2", backward_passes_per_step=2
    )
    model = mlp_in_keras()
    model.compile(passes, loss="mse")
    model.fit(*shard(hvd().rank()), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_replicas_are_equal(model, "several passes")
    assert any("rank_dad" in row["method"] for row in model.optimizer.plan())
