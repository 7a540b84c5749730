"""A worker that trains with TensorFlow: a step in a tf.function, and one computed eagerly."""

import json
import os
import sys

import tensorflow as tf

import dad.tensorflow as hvd

plan = json.loads(sys.argv[1])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
hvd.init()
graph_weight, eager_weight = tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([4, 2]))
state = hvd.elastic.TensorFlowState([graph_weight, eager_weight], step=0, sizes=[])


def reduced(weight):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * tf.cast(hvd.rank_op() + 1, tf.float32)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    weight.assign_add(tape.gradient(loss, weight))


in_graph = tf.function(reduced)


@hvd.elastic.run
def train(state):
    print("ROUND", hvd.rank(), "of", hvd.size(), "step", state.step, flush=True)
    while state.step < plan["steps"]:
        kind, step = plan["die"].get(slot, (None, None))
        in_graph(graph_weight) if not (kind == "graph" and step == state.step) else os._exit(3)
        reduced(eager_weight) if not (kind == "eager" and step == state.step) else os._exit(3)
        state.sizes = [*state.sizes, hvd.size()]
        state.step += 1
        state.commit()


train(state)
total = sum(size * (size + 1) / 2 for size in state.sizes)
for weight in (graph_weight, eager_weight):
    assert weight.numpy().tolist() == [[total] * 2] * 4, (weight.numpy(), total)
print("DONE", hvd.rank(), state.sizes, flush=True)
hvd.shutdown()
