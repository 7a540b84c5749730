"""dad.tensorflow when a rank dies, in a forked child, beside dad.torch, and under Horovod's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tf_util import ENVIRONMENT, needs
from util import job_environment

OVERLAY = Path(__file__).parents[3] / "python" / "dad" / "_overlay"


def python(code, timeout=200, **environment):
    """Runs code in a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=job_environment(**ENVIRONMENT, **environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SURVIVOR = """
import os, time
import tensorflow as tf
import dad.tensorflow as hvd
hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, name="gradient"))
assert step(tf.ones(3)).numpy().tolist() == [1.0] * 3
if hvd.rank() == 1:
    os._exit(0)
for again in range(2):
    try:
        step(tf.ones(3))
    except tf.errors.UnknownError as error:
        print("UnknownError:", error.message.splitlines()[0])
hvd.shutdown()
"""


def test_the_death_of_a_rank_is_an_error_that_names_it(tmp_path):
    needs("tensorflow")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SURVIVOR],
            env=job_environment(
                **ENVIRONMENT, DAD_RANK=str(rank), DAD_SIZE="2", DAD_RENDEZVOUS=f"file://{tmp_path}"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("UnknownError")]
    assert len(lines) == 2, outputs[0]
    assert "rank 1" in lines[0]


def test_in_a_forked_child_beside_torch_and_under_horovods_name():
    needs("tensorflow", "torch")
    path = os.pathsep.join([str(OVERLAY), job_environment()["PYTHONPATH"]])
    code = """
import os
if os.fork() == 0:
    import horovod.tensorflow
    os._exit(0 if horovod.tensorflow.gloo_built() else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
import torch, tensorflow as tf
import horovod.torch as hvd_torch, horovod.tensorflow as hvd, horovod.tensorflow.keras, horovod.keras
import dad.tensorflow, dad.keras
assert hvd is dad.tensorflow and horovod.keras is dad.keras
assert horovod.tensorflow.keras.DistributedOptimizer is dad.keras.DistributedOptimizer
from horovod.tensorflow.mpi_ops import allreduce
from horovod.keras.callbacks import MetricAverageCallback
assert horovod.tensorflow.elastic.TensorFlowState is dad.tensorflow.elastic.TensorFlowState
hvd.init()
assert hvd_torch.is_initialized() and hvd.size() == 1
assert hvd_torch.allreduce(torch.ones(2)).tolist() == hvd.allreduce(tf.ones(2)).numpy().tolist() == [1.0, 1.0]
hvd.shutdown()
print("fine")
"""
    assert python(code, PYTHONPATH=path).endswith("fine\n")


@pytest.fixture(scope="module")
def tf_keras(pytestconfig):
    """tf_keras of TensorFlow's version, fetched once and kept in pytest's cache."""
    needs("tensorflow")
    place = pytestconfig.cache.mkdir("tf_keras-2.21.0")
    if not (place / "tf_keras").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(place), "tf_keras==2.21.0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        if done.returncode != 0:
            pytest.skip(f"tf_keras cannot be fetched: {done.stderr[-300:]}")
    return place


LEGACY = """
import sys, tempfile
import numpy as np
import tensorflow as tf
import dad.tensorflow.keras as hvd
assert tf.keras.Model.__module__.startswith("tf_keras")
hvd.init()
keras = tf.keras

def shard(rank):
    x = np.random.default_rng(rank).normal(size=(16, 6)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)

def joined():
    parts = [[a.reshape(4, 4, -1) for a in shard(r)] for r in range(hvd.size())]
    return [np.concatenate(p, axis=1).reshape(16 * hvd.size(), -1) for p in zip(*parts)]

def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])

def fit(model, optimizer, data, rows, **options):
    model.compile(optimizer, loss="mse")
    return model.fit(*data, batch_size=rows, epochs=2, shuffle=False, verbose=0, **options)

def check(make, **options):
    ours, theirs = model(), model()
    distributed = hvd.DistributedOptimizer(make(), **options)
    assert isinstance(distributed, type(make()))
    fit(ours, distributed, shard(hvd.rank()), 4)
    rows = 4 * hvd.size() * options.get("backward_passes_per_step", 1)
    data = joined()
    fit(theirs, make(), data, rows)
    for a, b in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return ours

check(lambda: keras.optimizers.Adam(0.01))
check(lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1))
check(lambda: keras.optimizers.legacy.SGD(0.05, momentum=0.9))
check(lambda: keras.optimizers.SGD(0.05), backward_passes_per_step=2, average_aggregated_gradients=True)
assert [row["method"] for row in check(lambda: keras.optimizers.SGD(0.05)).optimizer.plan()] == ["dense"] * 4
import dad
names = [row["name"] for row in dad.plan(model(), shard(0)[0], compression="dad")]
assert len(names) == 4 and names[0].endswith("/kernel"), names
partial = model()
local = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=partial.layers[0])
fit(partial, local, shard(hvd.rank()), 4)
for number, weight in enumerate(partial.get_weights()):
    mine, other = hvd.allgather_object(weight)
    assert np.array_equal(mine, other) == (number >= 2), number
import dad.keras
partial = model()
local = dad.keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=partial.layers[0])
fit(partial, local, shard(hvd.rank()), 4)
for number, weight in enumerate(partial.get_weights()):
    mine, other = hvd.allgather_object(weight)
    assert np.array_equal(mine, other) == (number >= 2), number
summing = dad.keras.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=3)
fit(model(), summing, shard(hvd.rank()), 4)  # 8 batches
assert summing._agg_helper.counter.numpy() == 2 and summing.iterations.numpy() == 8
normed = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
average = hvd.callbacks.BatchNormAverageCallback()
for callbacks in ([], [average]):
    fit(normed, hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), shard(hvd.rank()), 4, callbacks=callbacks)
    mine, other = hvd.allgather_object(normed.layers[0].get_weights())
    assert [np.array_equal(a, b) for a, b in zip(mine, other)][2:] == [bool(callbacks)] * 2
variable = tf.Variable(1.0)
for optimizer in (keras.optimizers.SGD(), keras.optimizers.legacy.SGD()):
    optimizer = hvd.DistributedOptimizer(optimizer)
    for compute in (optimizer.compute_gradients, optimizer._compute_gradients):
        ((gradient, _),) = compute(lambda: variable * hvd.rank(), [variable])
        assert float(gradient) == 0.5
m = model()
history = fit(
    m, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), shard(hvd.rank()), 4,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
        hvd.callbacks.EarlyStopping("loss", patience=5),
    ],
)
assert abs(history.history["lr"][-1] - 0.1) < 1e-6
with tempfile.TemporaryDirectory() as folder:
    m.save(folder + "/m.keras")
    loaded = hvd.load_model(folder + "/m.keras")
    assert type(loaded.optimizer).__name__ == "SGD"
    loaded.fit(*shard(hvd.rank()), batch_size=4, verbose=0)
layer = hvd.SyncBatchNormalization()
y = layer(np.arange(6.0, dtype=np.float32).reshape(3, 2) + 100 * hvd.rank(), training=True)
total = hvd.allreduce(tf.reduce_sum(y), op=hvd.Sum)
assert abs(float(total)) < 1e-3
print("fine on", hvd.rank())
"""


def test_tf_keras(tf_keras, tmp_path):
    (tmp_path / "train.py").write_text(LEGACY)
    path = os.pathsep.join([job_environment()["PYTHONPATH"], str(tf_keras)])
    done = subprocess.run(
        [sys.executable, "-m", "dad.runner.cli", "-np", "2", sys.executable, str(tmp_path / "train.py")],
        env=job_environment(**ENVIRONMENT, PYTHONPATH=path, TF_USE_LEGACY_KERAS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "fine on 0" in done.stdout and "fine on 1" in done.stdout
