"""What the tests of methods in TensorFlow share."""

import numpy as np

from tf_util import Lazy, hvd, tf

keras = Lazy("keras")

EXACT = ["dad", "edad", "exact"]
# alpha=1 is a tie for an element of which only one sample has a gradient.
FEEDBACK = [
    "rank_dad:rank=2",
    "powersgd:rank=2",
    "int8",
    "topk:ratio=0.1",
    "chunk_topk:chunk=128,k=16",
    "strom",
    "vgc:alpha=1.5,error_feedback=1",
]
LOSSY = [
    *FEEDBACK,
    "rank_dad:rank=2,combine=gather,wire=bf16",
    "rank_dad:rank=2,combine=power,rest=none",
    "rank_dad:rank=2,error_feedback=0,wire=fp32",
    "vgc:alpha=0.5",
    "vgc:alpha=0.5,coding=word",
    "vgc_strom:alpha=0.5",
    "qsgd",
    "auto",
]


def weights_of_an_mlp():
    generator = np.random.default_rng(5)
    sizes = [12, 40, 24, 5]
    return [
        (generator.normal(size=(o, i)).astype(np.float32) / np.float32(i**0.5), np.zeros(o, np.float32))
        for i, o in zip(sizes[:-1], sizes[1:], strict=True)
    ]


def mlp_in_keras():
    weights = weights_of_an_mlp()
    activations = ["relu"] * (len(weights) - 1) + [None]
    model = keras.Sequential(
        [keras.Input((12,))]
        + [keras.layers.Dense(len(b), activation=a) for (_, b), a in zip(weights, activations, strict=True)]
    )
    model.set_weights([w for weight, bias in weights for w in (weight.T, bias)])
    return model


def batches(rank, shape, classes, steps, rows=6):
    generator = np.random.default_rng(rank)
    return [
        (
            generator.normal(size=(rows, *shape)).astype(np.float32),
            generator.normal(size=(rows, classes)).astype(np.float32),
        )
        for _ in range(steps)
    ]


def make_step(model, method, compiled, **options):
    """Reduced gradients of a batch, by a tape."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd().DistributedGradientTape(tape, compression=method, **options)
        return tape.gradient(loss, model.trainable_variables)

    return tf.function(step) if compiled else step


def plain_gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    grads = tape.gradient(loss, model.trainable_variables)
    return [tf.convert_to_tensor(g).numpy() for g in grads]
