"""A custom training loop with TensorFlow: dadrun -np 2 python examples/tensorflow2_mnist.py

A script for Horovod differs in one line:

    -import horovod.tensorflow as hvd
    +import dad.tensorflow as hvd

"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from idx_files import fashion_mnist

import dad.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--compression", help="a method: auto, exact, rank_dad:rank=4, …; default: dense")
args = parser.parse_args()

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())

images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
model = tf.keras.Sequential(
    [
        tf.keras.Input((28, 28)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)

# All start from the network of rank 0.
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)


@tf.function
def train(x, y):
    with tf.GradientTape() as tape:
        loss = loss_function(y, model(x, training=True))
    # Gradients are averaged over the ranks, each as soon as the backward pass has it.
    tape = hvd.DistributedGradientTape(tape, compression=args.compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


order = np.random.default_rng(hvd.rank())
for step in range(1, args.steps + 1):
    batch = order.integers(len(images), size=64)
    loss = train(images[batch], labels[batch])
    if step % 100 == 0 or step == args.steps:
        mean_loss = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0:
            print(f"step {step}: loss {mean_loss:.3f}", flush=True)

if hvd.rank() == 0:
    print(f"{hvd.stats()['wire_bytes_sent'] / 1e6:.2f} MB sent by rank 0", flush=True)
