"""Local steps in Keras 3: what 2 ranks check, on each backend."""

import os
import tempfile

import numpy as np

try:
    import keras
except ImportError:
    keras = None


def hvd():
    import dad.keras

    return dad.keras


def model_of(seed=0, dtype="float64"):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(24, activation="tanh", dtype=dtype),
        keras.layers.Dense(16, dtype=dtype),
    ]
    return keras.Sequential([keras.Input((12,), dtype=dtype), *layers])


def batch(step, rank, rows=4, dtype="float64"):
    x = np.random.default_rng(1000 * step + rank).normal(size=(rows, 12)).astype(dtype)
    return x, np.repeat(x.sum(1, keepdims=True), 16, 1)


def compiled(model, optimizer=None, run_eagerly=False, **options):
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    model.compile(hvd().DistributedOptimizer(optimizer, **options), loss="mse", run_eagerly=run_eagerly)
    return model


def train(model, step, rank=None, rows=4, dtype="float64"):
    model.train_on_batch(*batch(step, hvd().rank() if rank is None else rank, rows, dtype))


def weights(model):
    return [np.asarray(w, np.float64) for w in model.get_weights()]


def same_bits_everywhere(model):
    flat = np.concatenate([np.asarray(w).reshape(-1) for w in model.get_weights()])
    everyone = hvd().allgather_object(flat)
    return all(np.array_equal(everyone[0], one) for one in everyone)


def assert_close(here, there, tolerance=1e-7):
    for a, b in zip(here, there, strict=True):
        assert np.allclose(a, b, rtol=0, atol=tolerance), np.abs(a - b).max()


def check_one_local_step_of_sgd_with_a_plain_outer_step_is_dense_sgd():
    ends = []
    for options in ({}, {"outer": hvd().Outer(lr=1.0, momentum=0.0, nesterov=False)}):
        model = compiled(model_of(), **options)
        for step in range(4):
            train(model, step)
        ends.append(weights(model))
    assert_close(*ends)


def check_rounds_are_those_of_a_simulation_weighted_by_samples():
    for outer, run_eagerly in ((hvd().Outer(), False), (None, True)):
        lr, momentum = (0.7, 0.9) if outer else (1.0, 0.0)
        model = compiled(model_of(), run_eagerly=run_eagerly, local_steps=2, outer=outer)
        start = weights(model)
        m = [np.zeros_like(w) for w in start]
        for step in range(4):
            train(model, step, rows=4 + 4 * hvd().rank())
        for turn in range(2):
            changes = []
            for rank in range(2):
                local = model_of()
                local.compile(keras.optimizers.SGD(0.05), loss="mse")
                local.set_weights(start)
                for step in range(2 * turn, 2 * turn + 2):
                    train(local, step, rank, rows=4 + 4 * rank)
                changes.append([a - b for a, b in zip(start, weights(local), strict=True)])
            mean = [(a + 2 * b) / 3 for a, b in zip(*changes, strict=True)]
            m = [momentum * old + c for old, c in zip(m, mean, strict=True)]
            start = [w - lr * (c + momentum * n) for w, c, n in zip(start, mean, m, strict=True)]
        assert_close(weights(model), start)


def check_ranks_are_equal_after_a_round_and_not_within_it():
    for compression in ("none", "rank_dad:rank=2", "int8", "topk:ratio=0.1", "vgc"):
        model = compiled(model_of(dtype="float32"), local_steps=3, compression=compression)
        for step in range(6):
            train(model, step, dtype="float32")
            assert same_bits_everywhere(model) == (step % 3 == 2), (compression, step)
    row = model.optimizer.plan()[0]
    assert row["every"] == "3 steps"


def check_delay_and_fragments_learn_and_end_with_equal_ranks():
    for options in ({"delay": 1}, {"fragments": 2}, {"fragments": 2, "delay": 1}, {"local_steps": "50ms"}):
        model = compiled(model_of(), **{"local_steps": 4, **options})
        x, y = batch(999, 0)
        first = float(model.evaluate(x, y, verbose=0))
        for step in range(24):
            train(model, step)
        model.optimizer.end_round()
        assert same_bits_everywhere(model), options
        assert float(model.evaluate(x, y, verbose=0)) < first, options


def check_a_checkpoint_within_a_round_goes_on_with_the_same_bits():
    folder = hvd().broadcast_object(tempfile.mkdtemp())
    options = {"local_steps": 4, "outer": hvd().Outer(), "compression": "int8"}
    os.environ.update(DAD_LOCAL_STEPS="4", DAD_OUTER="default")
    try:
        for delay in (0, 1):
            os.environ["DAD_DELAY"] = str(delay)
            path = os.path.join(folder, f"run.{delay}.keras")
            model = compiled(model_of(), keras.optimizers.Adam(0.01), **options, delay=delay)
            for step in range(9):
                train(model, step)
                if step == 5:
                    hvd().save_model(model, path)
            model.optimizer.end_round()
            loaded = hvd().load_model(path, compression="int8")
            for step in range(6, 9):
                train(loaded, step)
            loaded.optimizer.end_round()
            for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
                assert np.array_equal(a, b), delay
    finally:
        for name in ("DAD_LOCAL_STEPS", "DAD_OUTER", "DAD_DELAY"):
            os.environ.pop(name, None)


def check_a_step_that_a_scaler_skips_counts():
    model = model_of(dtype="float32")
    inner = hvd().DistributedOptimizer(keras.optimizers.SGD(0.01), local_steps=2)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    model.compile(scaler, loss="mse")
    for step in range(4):
        x, y = batch(step, hvd().rank(), dtype="float32")
        if hvd().rank() == 1 and step in (0, 3):
            y = y * np.float32(np.inf)
        model.train_on_batch(x, y)
        assert step % 2 == 0 or same_bits_everywhere(model)
    assert all(np.isfinite(w).all() for w in weights(model))


def check_a_fit_from_other_weights_with_batch_norm_ends_with_equal_ranks():
    keras.utils.set_random_seed(hvd().rank())
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(16)]
    )
    compiled(model, local_steps=3)
    x, y = batch(0, hvd().rank(), rows=36, dtype="float32")
    callbacks = [hvd().callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit((1 + hvd().rank()) * x, y, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    model.optimizer.end_round()
    assert same_bits_everywhere(model)


def check_accumulated_gradients_are_one_step():
    model = compiled(model_of(), local_steps=2, backward_passes_per_step=2)
    for step in range(8):
        train(model, step)
        assert same_bits_everywhere(model) == (step % 4 in (3, 0)), step


def check_ranks_with_uneven_data_join():
    model = compiled(model_of(), local_steps=4)
    for step in range(5 + 3 * hvd().rank()):
        train(model, step)
    hvd().join()
    for step in range(4):
        train(model, 100 + step)
    model.optimizer.end_round()
    assert same_bits_everywhere(model)


def check_bad_options_are_value_errors():
    for options, text in (
        ({"local_steps": 0}, "local_steps=0 is not possible"),
        ({"local_steps": 2, "fragments": 3}, "fragments=3 is not possible with local_steps=2"),
        ({"local_steps": 2, "op": hvd().Sum}, "local steps need op=Average"),
    ):
        try:
            hvd().DistributedOptimizer(keras.optimizers.SGD(), **options)
        except ValueError as error:
            assert text in str(error)
        else:
            raise AssertionError(options)
