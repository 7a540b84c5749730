"""How long TensorFlow takes to trace a train step by each method, and how many nodes the graph has.

Claim: by every method tracing takes at most three times as long as with `none`, in the same process.

    dadrun -np 2 python benchmarks/tensorflow_tracing.py [--models MobileNet ConvNeXtTiny]

About three minutes for all models. They are those of keras.applications without weights, on images of 64x64
pixels, and have depthwise convolutions or one with a group per channel. Each model is traced once without
communication before anything is timed. Nothing is run: what a method sends is decided while a graph runs.
Exits with 1 if a method takes longer than the bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")

import tensorflow as tf

import dad.tensorflow as hvd

MODELS = ("MobileNet", "EfficientNetB0", "ConvNeXtTiny")
METHODS = ("none", "exact", "rank_dad", "vgc")
MOST_TIMES_NONE = 3.0
NUM_CLASSES = 10
BATCH_SIZE = 4
PIXELS = 64


def trace(model: tf.keras.Model, method: str | None) -> tuple[float, int]:
    """Seconds and nodes; None: without communication."""

    def step(images: tf.Tensor, labels: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        if method is not None:
            tape = hvd.DistributedGradientTape(tape, compression=method)
        return tape.gradient(loss, model.trainable_variables)

    images = tf.TensorSpec([BATCH_SIZE, PIXELS, PIXELS, 3])
    labels = tf.TensorSpec([BATCH_SIZE], tf.int32)
    begin = time.perf_counter()
    graph = tf.function(step, autograph=False).get_concrete_function(images, labels).graph
    return time.perf_counter() - begin, len(graph.get_operations())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names of keras.applications")
    models = parser.parse_args().models
    hvd.init()
    if hvd.size() < 2:
        sys.exit("tracing by a method needs ranks to talk to: dadrun -np 2 python " + " ".join(sys.argv))
    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(f"{'model':16}{'method':10}{'seconds':>9}{'x none':>8}{'nodes':>9}{'x none':>8}")
    slowest = 0.0
    for name in models:
        model = getattr(tf.keras.applications, name)(
            weights=None, input_shape=(PIXELS, PIXELS, 3), classes=NUM_CLASSES
        )
        trace(model, None)
        dense: tuple[float, int] | None = None
        for method in METHODS:
            seconds, nodes = trace(model, method)
            dense = dense or (seconds, nodes)
            times = (seconds / dense[0], nodes / dense[1])
            say(f"{name:16}{method:10}{seconds:9.2f}{times[0]:8.2f}{nodes:9}{times[1]:8.2f}", flush=True)
            slowest = max(slowest, times[0])
    slowest = float(hvd.allreduce(tf.constant(slowest), op=hvd.Max))
    say(f"bound: {MOST_TIMES_NONE:.1f} times none; slowest: {slowest:.2f}")
    return int(slowest > MOST_TIMES_NONE)


if __name__ == "__main__":
    sys.exit(main())
