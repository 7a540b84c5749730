"""A worker that trains with TensorFlow: a step in a tf.function, and one computed eagerly."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import dad.tensorflow as hvd
from dad._lib import _core
from dad.state.states import saved_shares
from dad.tensorflow.gradients import kept_by_tapes

plan = json.loads(sys.argv[1])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
hvd.init()
graph_weight, eager_weight = tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([4, 2]))
lossy_weight = tf.Variable(tf.zeros([16, 64], tf.float64))
state = hvd.elastic.TensorFlowState([graph_weight, eager_weight, lossy_weight], step=0, sizes=[])


def reduced(weight):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * tf.cast(hvd.rank_op() + 1, tf.float32)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    weight.assign_add(tape.gradient(loss, weight))


in_graph = tf.function(reduced)


def gradient(step, rank):
    return np.random.default_rng([step, rank]).normal(size=(16, 64))


def lossy(step):
    """Sent in 8 bits; what they do not hold is kept."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lossy_weight * gradient(step, hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=hvd.Compression.int8)
    lossy_weight.assign_add(tape.gradient(loss, lossy_weight))


def kept():
    (share,) = saved_shares(kept_by_tapes()).values()
    return share


def die():
    np.save(Path(plan["folder"], f"died.{slot}.npy"), kept())
    os._exit(3)


@hvd.elastic.run
def train(state):
    print("ROUND", hvd.rank(), "of", hvd.size(), "step", state.step, flush=True)
    while state.step < plan["steps"]:
        kind, step = plan["die"].get(slot, (None, None))
        if (kind, step) == ("graph", state.step):
            die()
        in_graph(graph_weight)
        if (kind, step) == ("eager", state.step):
            die()
        reduced(eager_weight)
        lossy(state.step)
        state.sizes = [*state.sizes, hvd.size()]
        state.step += 1
        state.commit()


train(state)
total = sum(size * (size + 1) / 2 for size in state.sizes)
for weight in (graph_weight, eager_weight):
    assert weight.numpy().tolist() == [[total] * 2] * 4, (weight.numpy(), total)
rest = sum(np.frombuffer(one).reshape(16, 64) for one in _core.gather_bytes("kept", kept().tobytes(), 0))
rest = rest + sum(np.load(file) for file in Path(plan["folder"]).glob("died.*.npy"))
wanted = sum(gradient(step, rank) for step, size in enumerate(state.sizes) for rank in range(size))
error = np.abs(lossy_weight.numpy() + rest - wanted).max()
assert error < 1e-12 and np.abs(rest).max() > 0, error
print("DONE", hvd.rank(), state.sizes, flush=True)
hvd.shutdown()
