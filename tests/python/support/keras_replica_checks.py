"""What dad.keras says of ranks that differ, launched with keras_checks.py."""

import numpy as np
import pytest

from keras_checks import ROWS, before_check, fit, hvd, keras, make_model, on_tensorflow, shard
from tf_util import raises
from util import Warnings

__all__ = ["before_check"]


def check_replicas_are_checked():
    import dad

    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(*shard(hvd.rank()), batch_size=ROWS, verbose=0)
    dad.check_replicas(model)
    model.layers[0].bias.assign(np.full(5, float(hvd.rank())))
    if hvd.size() > 1:
        raises(dad.ReplicaError, lambda: dad.check_replicas(model), "/bias", "rank 1")


def fails_on_all_ranks(words, model, optimizer):
    """The error is TensorFlow's where the step is a graph."""
    with pytest.raises(Exception) as error:  # noqa: PT011  its class depends on the backend
        fit(model, optimizer, shard(hvd.rank()))
    assert words in str(error.value), str(error.value)
    assert float(hvd.allreduce(1.0)) == 1.0, "the engine works"


def check_ranks_whose_models_or_optimizers_differ_are_told():
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    last = hvd.rank() == hvd.size() - 1
    others = f"on {'rank 0' if hvd.size() == 2 else 'ranks 0, 1, 2'}"
    me = f"on rank {hvd.size() - 1}"
    for compression in ("none", "rank_dad:rank=1"):
        keras.backend.clear_session()
        model = make_model()
        if last:
            model.add(keras.layers.Dense(1, name="more"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        fails_on_all_ranks(f"is nothing {others}, (1, 1) float32 {me}", model, optimizer)
        for option, values in (
            ("gradient_predivide_factor", (1.0, 2.0)),
            ("backward_passes_per_step", (1, 2)),
            ("compression", (compression, "int8")),
        ):
            options = {"compression": compression, option: values[last]}
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
            words = f"{option} {values[0]} {others}, {values[1]} {me}"
            fails_on_all_ranks(words, make_model(), optimizer)
    fit(make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), shard(hvd.rank()))


def check_replicas_that_differ_are_told_once():
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    rate = 0.1 * (1 + (hvd.rank() == 1))
    everything_at_once = {"steps_per_execution": 2} if on_tensorflow() else {"run_eagerly": True}
    for seed, rate_here, words, roots in (
        (hvd.rank(), 0.1, ["kernel", "BroadcastGlobalVariablesCallback(0)"], []),
        (1, rate, ["learning_rate is 0.1", "0.2", "on rank 1"], []),
        (hvd.rank(), 0.1, None, [0]),
        (1, 0.1, None, []),
    ):
        for compile_options in ({}, everything_at_once):
            if compile_options and roots and on_tensorflow():
                continue  # replicas are broadcast after the first two steps, and differ before
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate_here))
            with Warnings("replicas differ") as said:
                fit(
                    make_model(seed),
                    optimizer,
                    shard(hvd.rank()),
                    compile_options=compile_options,
                    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(root) for root in roots],
                )
            first, *others = hvd.allgather_object(said)
            assert not any(others), others
            assert len(first) == (words is not None), first
            for text in first:
                assert all(word in text for word in ("replicas differ after step 1", *words)), text


def check_a_layer_that_the_optimizer_does_not_get_is_told_of():
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    for compression in ("none", "rank_dad:rank=2"):
        for differs in (True, False):
            model = make_model()
            frozen = make_model(hvd.rank() if differs else 0).layers[0]
            model.layers[0].set_weights(frozen.get_weights())
            model.layers[0].trainable = False
            with Warnings("replicas differ") as said:
                optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=compression)
                fit(model, optimizer, shard(hvd.rank()))
            first, *others = hvd.allgather_object(said)
            assert not any(others), others
            assert len(first) == differs, first
            for text in first:
                assert "kernel" in text and "nothing keeps it equal" in text, text
