"""Callbacks, saving and loading with dad.keras, launched with keras_checks.py."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from keras_checks import (
    COLUMNS,
    ROWS,
    STEPS,
    assert_replicas_are_equal,
    assert_replicas_are_equal_weights,
    before_check,
    fit,
    hvd,
    keras,
    make_model,
    shard,
    value,
)

__all__ = ["before_check"]


def check_batch_norm_is_averaged_at_the_end_of_an_epoch():
    inputs = keras.Input((COLUMNS,))
    inner = keras.Sequential([keras.layers.BatchNormalization()])
    model = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    callbacks = [hvd.callbacks.BatchNormAverageCallback()]
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), shard(hvd.rank()), callbacks=callbacks)
    assert_replicas_are_equal(model)


def check_broadcast_callback_and_local_variables():
    model = make_model(seed=hvd.rank())
    local = model.layers[-1].bias
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss="mse")
    model.optimizer.register_local_var(local)
    local.assign([float(hvd.rank())])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    model.fit(*shard(hvd.rank()), batch_size=ROWS, epochs=1, verbose=0, callbacks=[callback])
    assert callback.broadcast_done
    everyone = hvd.allgather_object(model.get_weights())
    for theirs in everyone[1:]:
        for a, b in zip(everyone[0][:-1], theirs[:-1], strict=True):
            np.testing.assert_array_equal(a, b)
        assert everyone[0][-1] != theirs[-1]


def check_metrics_are_averaged_before_others_see_them():
    seen = []
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    model = make_model()
    data = shard(hvd.rank())
    # Last in the list, and yet the first to run.
    callbacks = [spy, hvd.callbacks.MetricAverageCallback()]
    history = fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        data,
        callbacks=callbacks,
        validation_data=data,
        compile_options={"metrics": ["mae"]},
    )
    assert set(seen[0]) == {"loss", "mae", "val_loss", "val_mae"}
    everyone = hvd.allgather_object(seen)
    assert all(theirs == everyone[0] for theirs in everyone)
    assert history.history["loss"] == [logs["loss"] for logs in seen]
    mine = model.evaluate(*data, verbose=0)
    mean = np.mean(hvd.allgather_object(mine[0]))
    np.testing.assert_allclose(seen[-1]["val_loss"], mean, rtol=1e-5)


def check_learning_rate_callbacks():
    size = hvd.size()
    rates = []
    spy = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(value(model.optimizer.learning_rate)))
    )
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * size, momentum=0.9))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * size, warmup_epochs=2)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1 * size, lambda epoch: 0.5**epoch, start_epoch=2)
    history = fit(model, optimizer, shard(hvd.rank()), epochs=4, callbacks=[warmup, schedule, spy])
    steps = np.arange(1, 2 * STEPS + 1) / STEPS
    expected = [*(0.1 * (steps * (size - 1) / 2 + 1)), *[0.025 * size] * STEPS, *[0.0125 * size] * STEPS]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], np.array(rates)[STEPS - 1 :: STEPS])
    assert_replicas_are_equal(model)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.1, end_epoch=2)
    rates.clear()
    fit(
        model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), shard(0), epochs=3, callbacks=[decay, spy]
    )
    np.testing.assert_allclose(rates[::STEPS], [0.1, 0.01, 0.01], rtol=1e-5)


def check_momentum_is_corrected_when_the_rate_changes():
    """v = m v - r g: after the rate went from r to s the next step is as with a momentum of m s / r."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    x = np.ones((2, 1), np.float32)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: [1.0, 0.5][int(epoch)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, optimizer, (x, 0 * x), batch_size=2, callbacks=[callback])
    w, v = 1.0, 0.0
    for rate, momentum in ((0.1, 0.9), (0.05, 0.9 * 0.5)):
        v = momentum * v - rate * 2 * w
        w += v
    np.testing.assert_allclose(model.get_weights()[0], [[w]], rtol=1e-5)


def check_early_stopping_and_plateaus_are_the_same_on_all_ranks():
    class Fake(keras.callbacks.Callback):
        """Only on rank 0 does the loss get better."""

        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = 1.0 - 0.1 * epoch if hvd.rank() == 0 else 1.0 + epoch * hvd.size()

    callbacks = [
        Fake(),
        hvd.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
    ]
    if hvd.size() == 1:
        callbacks[0] = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: logs.update(val_loss=e))
    model = make_model()
    history = fit(
        model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), shard(hvd.rank()), 9, callbacks=callbacks
    )
    assert len(history.epoch) == 3
    assert_replicas_are_equal_weights(model)

    class Averaged(hvd.callbacks.MetricAverageCallback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = float(epoch * (1 + hvd.rank()))
            super().on_epoch_end(epoch, logs)

    plateau = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    model = make_model()
    fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.08)),
        shard(0),
        4,
        callbacks=[plateau, Averaged()],
    )
    np.testing.assert_allclose(value(model.optimizer.learning_rate), 0.01, rtol=1e-6)
    # One rank alone wants to stop.
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda e, logs: setattr(model, "stop_training", e == 1 and hvd.rank() == 0)
    )
    history = fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        shard(0),
        5,
        callbacks=[stop, hvd.callbacks.EarlyStopping("loss", patience=9)],
    )
    assert len(history.epoch) == 2


def check_saving_and_loading_in_the_middle():
    data = shard(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        straight, model = make_model(), make_model()
        fit(straight, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), data, epochs=4)
        fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), data, epochs=2)
        model.save(path)
        # Without dad it is what it was.
        assert type(keras.models.load_model(path).optimizer).__mro__[0].__module__.startswith("keras")
        loaded = hvd.load_model(path)
        assert isinstance(loaded.optimizer, keras.optimizers.Adam)
        assert int(value(loaded.optimizer.iterations)) == 2 * STEPS
        loaded.fit(*data, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
        for a, b in zip(straight.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        model.save_weights(Path(folder) / "x.weights.h5")
        model.load_weights(Path(folder) / "x.weights.h5")


def check_a_model_that_was_loaded_goes_on_by_its_method_with_the_same_bits():
    data = shard(hvd.rank(), steps=8, columns=24)

    def wide(name):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(24), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((24,)), *layers], name=name)

    for method in ("rank_dad:rank=2", "int8", "topk:ratio=0.2", "vgc:alpha=0.5"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{hvd.rank()}.keras"
            straight, half = wide("straight"), wide("half")
            for model, epochs in ((straight, 4), (half, 2)):
                optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=method)
                fit(model, optimizer, data, epochs)
            half.save(path)
            # One file for all ranks, which rank 0 writes.
            shared = Path(hvd.broadcast_object(folder)) / "all ranks.keras"
            hvd.save_model(half, shared)
            wrong = Path(folder) / "nowhere" / "model.keras"
            with pytest.raises(hvd.CheckpointError, match="failed to write"):
                hvd.save_model(half, wrong)
            for file in (path, shared):
                loaded = hvd.load_model(file, compression=method)
                hvd.allreduce(1.0)  # all have loaded it: rank 0 deletes its folder
                loaded.fit(*data, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
                assert_replicas_are_equal(loaded)
                for a, b in zip(straight.get_weights(), loaded.get_weights(), strict=True):
                    np.testing.assert_array_equal(a, b, method)


def check_checkpoints_reports_and_states():
    class State:
        batch = epoch = commits = 0

        def commit(self):
            self.commits += 1

    state = State()
    with tempfile.TemporaryDirectory() as folder:
        best = hvd.callbacks.BestModelCheckpoint("loss")
        best.filepath = str(Path(folder) / "best.keras")
        callbacks = [
            best,
            hvd.callbacks.CompressionReport(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model = make_model()
        fit(
            model,
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
            shard(hvd.rank()),
            callbacks=callbacks,
        )
        assert (Path(folder) / "best.keras").exists() == (hvd.rank() == 0)
    assert (state.epoch, state.batch, state.commits) == (2, 0, 2 * (STEPS // 2 + 1))
