"""Step times of methods in TensorFlow against dense dad, beside the same in torch; and what the ops cost.

Claims: at 100 Mbit exact and rank_dad take the same part of a dense step as in torch, within a tenth; in a
model of 200 variables the ops take less than 5 % of a step where nothing limits the link.

    python benchmarks/tensorflow_methods.py [--quick] [--json FILE] [--models mlp]

With --models mlp it takes about seven minutes. 4 ranks with one thread each, SGD, compiled train steps
(tf.function), random images. Both frameworks take turns in the same processes, in blocks, and a quotient or a
difference is made of blocks of the same round: the median of the rounds is told, and their quartiles.

Overhead is the step less the same step without communication, less one grouped allreduce of the same
tensors, as a part of the step. Beside it, since 4 ranks may share 2 cores, CPU time: "CPU of the graph" is
what a rank's threads other than the core's take more than without communication, as a part of all that the
step takes. The core does the same for torch.

oneDNN is on, unless TF_ENABLE_ONEDNN_OPTS says otherwise. By itself TensorFlow uses it only on some CPUs; on
others its products are Eigen's and take half as long again as torch's, whatever dad does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from contest import Step, say, take_turns, threads_of_others
from lab import UNSHAPED, Link
from models import IMAGES, MODELS, batch
from report import Result, Row, Settings, main, measure_on

import dad.torch as hvd

METHODS = ("exact", "rank_dad:rank=4")
WIDTHS = {"mlp": 1024, "bigfc": 4096}
NUM_VARIABLES = 200
# Of the layers of the model that has them: a step of the first is little but overhead, TensorFlow's own
# among it; the second is what a model of so many variables is like (6.7 million parameters).
LAYER_WIDTHS = (64, 256)
LEARNING_RATE = 0.01
# A dense step on a slow link takes a second, so that there is time for few.
WANT_BLOCKS = 8


def quiet_tensorflow() -> Any:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def perceptron(tf: Any, widths: list[int], name: str) -> Any:
    layers = tf.keras.layers
    inside = [layers.Dense(width, activation="relu", name=f"{name}_{i}") for i, width in enumerate(widths)]
    return tf.keras.Sequential([tf.keras.Input((784,)), *inside, layers.Dense(10, name=f"{name}_top")])


# A way to train: all gradients in one tensor, the least that a step with communication can do.
ONE_TENSOR = "one tensor"


def reduced_as_one(tf: Any, gradients: list[Any]) -> list[Any]:
    import dad.tensorflow as hvd_tf

    flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
    parts = tf.split(hvd_tf.allreduce(flat, name="flat"), [tf.size(g) for g in gradients])
    return [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


def tensorflow_step(tf: Any, model: Any, method: str | None, num_classes: int = 10) -> Step:
    """A compiled step of training on one batch; method None: without communication."""
    import dad.tensorflow as hvd_tf

    optimizer = tf.keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    images = tf.constant(torch.randn(IMAGES, 784).numpy())
    labels = tf.constant(torch.randint(num_classes, (IMAGES,)).numpy())

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            )
        if method not in (None, ONE_TENSOR):
            tape = hvd_tf.DistributedGradientTape(tape, compression=method)
        gradients = tape.gradient(loss, model.trainable_variables)
        if method == ONE_TENSOR:
            gradients = reduced_as_one(tf, gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def torch_step(name: str, method: str | None) -> Step:
    model = MODELS[name]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if method is not None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = [(f"{name}.{method}.{key}", value) for key, value in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=method)
    inputs, targets = batch(name)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def quartiles(values: Iterable[float]) -> str:
    """The first and the last."""
    values = list(values)
    first, _, last = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return f"{first:.3g}..{last:.3g}"


def methods(tf: Any, name: str, seconds: float) -> list[Row]:
    contestants: dict[str, Step] = {}
    for method in (None, "none", *METHODS):
        model = perceptron(tf, [WIDTHS[name]] * 2, f"{name}_{str(method).partition(':')[0]}")
        contestants[f"tf {method}"] = tensorflow_step(tf, model, method)
        contestants[f"torch {method}"] = torch_step(name, method)
    times = take_turns(contestants, seconds, even_time=True, want_blocks=WANT_BLOCKS)

    def against_dense(framework: str, method: str) -> list[float]:
        steps, dense = (times[f"{framework} {which}"].each_ms for which in (method, "none"))
        return [step / other for step, other in zip(steps, dense, strict=True)]

    rows = []
    for method in METHODS:
        mine, theirs = against_dense("tf", method), against_dense("torch", method)
        quotients = [tf_part / torch_part for tf_part, torch_part in zip(mine, theirs, strict=True)]
        rows.append(
            {
                "model": name,
                "method": method,
                "rounds": len(quotients),
                "time / dense": statistics.median(mine),
                "torch's": statistics.median(theirs),
                "TensorFlow / torch": statistics.median(quotients),
                "quartiles": quartiles(quotients),
                "ms": times[f"tf {method}"].ms,
                "dense ms": times["tf none"].ms,
                "local ms": times["tf None"].ms,
                "MB": times[f"tf {method}"].dad_sent / 1e6,
                "torch's ms": times[f"torch {method}"].ms,
                "torch's dense ms": times["torch none"].ms,
                "torch's local ms": times["torch None"].ms,
                "torch's MB": times[f"torch {method}"].dad_sent / 1e6,
                "CPU ms": times[f"tf {method}"].cpu_ms,
                "local CPU ms": times["tf None"].cpu_ms,
                "torch's CPU ms": times[f"torch {method}"].cpu_ms,
                "torch's local CPU ms": times["torch None"].cpu_ms,
            }
        )
    return rows


def overhead(tf: Any, width: int, seconds: float, core_threads: set[int]) -> list[Row]:
    """Of a model with many variables: layers of this width."""
    import dad.tensorflow as hvd_tf

    def deep(name: str) -> Any:
        return perceptron(tf, [width] * (NUM_VARIABLES // 2 - 1), f"{name}_{width}")

    model = deep("grouped")
    tensors = [tf.zeros(variable.shape) for variable in model.trainable_variables]
    contestants = {
        "local": tensorflow_step(tf, deep("local"), None),
        "dense": tensorflow_step(tf, deep("dense"), "none"),
        "rank_dad": tensorflow_step(tf, deep("rank_dad"), "rank_dad:rank=4"),
        ONE_TENSOR: tensorflow_step(tf, deep("one_tensor"), ONE_TENSOR),
        "grouped": lambda: hvd_tf.grouped_allreduce(tensors, name=f"grouped_{width}"),
    }
    times = take_turns(contestants, seconds, even_time=True, want_blocks=WANT_BLOCKS, threads=core_threads)

    def by_round(name: str) -> list[float]:
        rounds = zip(*(times[one].each_ms for one in (name, "local", "grouped")), strict=True)
        return [(step - local - grouped) / step for step, local, grouped in rounds]

    def graph_ms(name: str) -> float:
        return times[name].cpu_ms - times[name].cpu_ms_of_threads

    return [
        {
            "method": name,
            "variables": len(model.trainable_variables),
            "width": width,
            "rounds": len(times[name].each_ms),
            "overhead": statistics.median(by_round(name)),
            "quartiles": quartiles(by_round(name)),
            "ms": times[name].ms,
            "local ms": times["local"].ms,
            "one allreduce ms": times["grouped"].ms,
            "one tensor ms": times[ONE_TENSOR].ms,
            "over one tensor": times[name].ms / times[ONE_TENSOR].ms - 1,
            "CPU of the graph": (graph_ms(name) - graph_ms("local")) / times[name].cpu_ms,
            "CPU ms": times[name].cpu_ms,
            "the core's": times[name].cpu_ms_of_threads,
            "local CPU ms": times["local"].cpu_ms,
            "one tensor CPU ms": times[ONE_TENSOR].cpu_ms,
        }
        for name in ("dense", "rank_dad")
    ]


def work(parameters: dict[str, Any]) -> list[Row]:
    core_threads = threads_of_others()  # and torch.distributed's, which do nothing in a step
    tf = quiet_tensorflow()
    if parameters["what"] == "overhead":
        rows: list[Row] = []
        for width in LAYER_WIDTHS:
            say(f"{NUM_VARIABLES} variables, layers {width} wide")
            rows += overhead(tf, width, parameters["seconds"], core_threads)
        return rows
    rows = []
    for name in parameters["models"]:
        say(f"{name}: TensorFlow and torch")
        rows += methods(tf, name, parameters["seconds"])
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--seconds", type=float, default=120, help="for each model")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    seconds = 5 if settings.quick else options.seconds
    result = Result("Methods in TensorFlow and in torch, 4 ranks: step time / that of dense dad")
    models = options.models[:1] if settings.quick else options.models
    parameters = {"what": "methods", "models": models, "seconds": seconds}
    measure_on([Link("100mbit")], "tensorflow_methods", lambda link: parameters, result)
    print(result.text())
    ops = Result("What the ops take of a step with many variables")
    parameters = {"what": "overhead", "seconds": seconds / 2}
    measure_on([UNSHAPED], "tensorflow_methods", lambda link: parameters, ops)
    ops.left_out += result.left_out
    ops.failed += result.failed
    return ops


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
