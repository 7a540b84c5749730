"""One rank of a golden run: trains a small model by every method and writes what came of it.

    dadrun -np 2 python golden_job.py torch OUT_FOLDER

For each method: a digest of the weights after 20 steps, and the payload bytes and messages per step that
this rank sent in the last ten, when ranks follow a schedule and nothing depends on timing any more.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 20
SETTLED = 10  # by this step ranks follow a schedule
ROWS, FEATURES, HIDDEN, CLASSES = 6, 24, 48, 5
METHODS = [
    "none",
    "fp16",
    "bf16",
    "dad",
    "dad:wire=bf16",
    "edad",
    "exact",
    "rank_dad:rank=2",
    "rank_dad:rank=2,combine=gather",
    "rank_dad:rank=2,combine=owner",
    "rank_dad:rank=2,combine=power",
    "rank_dad:rank=2,residual=rows,wire=fp32",
    "rank_dad:rank=2,error_feedback=0,rest=none",
    "vgc",
    "vgc:variance=sample,coding=word,error_feedback=1",
    "vgc_strom",
    "strom",
    "int8",
    "topk:ratio=0.1",
    "chunk_topk:chunk=256,k=16",
    "chunk_topk:chunk=256,k=16,bits=3,decay=0.9,combine=gather",
    "chunk_topk:chunk=256,k=16,bits=1,combine=owner",
    "qsgd",
    "powersgd:rank=2",
    "auto",
    "per_layer:0.*=rank_dad:rank=2;*=int8",
]

# Runs one step on a batch; and the weights, in order.
Step = Callable[[np.ndarray, np.ndarray], None]
Weights = Callable[[], Iterable[np.ndarray]]


def initial_weights() -> list[np.ndarray]:
    """Of three dense layers, as (out, in) and (out,) in turn."""
    generator = np.random.default_rng(0)
    sizes = [FEATURES, HIDDEN, HIDDEN, CLASSES]
    weights = []
    for columns, out in zip(sizes[:-1], sizes[1:], strict=True):
        weights.append(generator.normal(size=(out, columns)).astype(np.float32) / np.float32(columns**0.5))
        weights.append(np.zeros(out, np.float32))
    return weights


def torch_training(method: str) -> tuple[Step, Weights]:
    import torch

    import dad.torch as hvd
    from dad.methods import compression

    model = torch.nn.Sequential()
    weights = initial_weights()
    for i in range(0, len(weights), 2):
        if i:
            model.append(torch.nn.ReLU())
        model.append(torch.nn.Linear(weights[i].shape[1], weights[i].shape[0]))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(value))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression=compression.parse(method),
    )

    def step(x: np.ndarray, y: np.ndarray) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()

    return step, lambda: (parameter.detach().numpy() for parameter in model.parameters())


def tensorflow_training(method: str) -> tuple[Step, Weights]:
    import tensorflow as tf

    import dad.tensorflow as hvd

    variables = [
        tf.Variable(value.T, name=f"{i // 2}.{'bias' if i % 2 else 'weight'}")
        for i, value in enumerate(initial_weights())
    ]

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            for i in range(0, len(variables), 2):
                x = tf.matmul(tf.nn.relu(x) if i else x, variables[i]) + variables[i + 1]
            loss = tf.reduce_mean(tf.square(x - y))
        tape = hvd.DistributedGradientTape(tape, compression=method)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)

    return (
        lambda x, y: step(tf.constant(x), tf.constant(y)),
        lambda: (np.ascontiguousarray(variable.numpy().T) for variable in variables),
    )


TRAINING = {"torch": torch_training, "tensorflow": tensorflow_training}


def run(framework: str, method: str, rank: int) -> dict[str, Any]:
    from dad._lib import _core

    step, weights = TRAINING[framework](method)
    generator = np.random.default_rng(100 + rank)
    for index in range(STEPS):
        x = generator.normal(size=(ROWS, FEATURES)).astype(np.float32)
        y = generator.normal(size=(ROWS, CLASSES)).astype(np.float32)
        if index == SETTLED:
            _core.reset_stats()
        step(x, y)
    digest = hashlib.sha256()
    for weight in weights():
        digest.update(weight.tobytes())
    stats = _core.stats()
    return {
        "digest": digest.hexdigest()[:16],
        "bytes": stats["payload_bytes_sent"] // (STEPS - SETTLED),
        # Rounded: the last messages of the step before may be counted after the reset.
        "messages": round(stats["messages_sent"] / (STEPS - SETTLED)),
    }


def use_fixed_rates() -> None:
    """`exact` and `auto` plan with measured rates; here all machines measure the same."""
    from dad.planning import link

    link.measure = lambda process_set, multiply: link.Measured(0.0, 1e5, 1e10, 1e10, False)


def main() -> None:
    framework, folder = sys.argv[1:]
    if framework == "torch":
        import dad.torch as hvd
    else:
        import dad.tensorflow as hvd

    use_fixed_rates()
    results = {}
    for method in METHODS:
        hvd.init()  # a new engine: the schedule of one method must not depend on the methods before it
        rank = hvd.rank()
        results[method] = run(framework, method, rank)
        hvd.shutdown()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
