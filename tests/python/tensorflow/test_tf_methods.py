"""Every method in TensorFlow: the same bytes and gradients as in torch, exactness, feedback, plans, state."""

import importlib

import numpy as np
import pytest

from tf_methods_util import (
    EXACT,
    LOSSY,
    batches,
    make_step,
    mlp_in_keras,
    plain_gradients,
    weights_of_an_mlp,
)
from tf_util import Lazy, hvd, launched_once, raises, tf
from util import check_names, slow_link

keras = Lazy("keras")
torch = Lazy("torch")
NUM_RANKS = 2

results = launched_once(__file__, NUM_RANKS, "tensorflow", "keras", "torch")


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def before_check():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


# The same nets in both frameworks


def mlp_in_torch():
    layers = []
    for weight, bias in weights_of_an_mlp():
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data = torch.from_numpy(weight.copy())
        linear.bias.data = torch.from_numpy(bias.copy())
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def cnn_in_torch(groups=(1, 1)):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 12, 3, padding=1, groups=groups[0]),
        torch.nn.ReLU(),
        torch.nn.Conv2d(12, 6, 3, stride=2, groups=groups[1]),
        torch.nn.Flatten(),
        torch.nn.Linear(6 * 3 * 3, 4),
    )


def cnn_in_keras(groups=(1, 1)):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(12, 3, padding="same", activation="relu", groups=groups[0]),
            layers.Conv2D(6, 3, strides=2, groups=groups[1]),
            layers.Permute((3, 1, 2)),  # torch's order
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    values = [p.detach().numpy() for p in cnn_in_torch(groups).parameters()]
    model.set_weights([to_keras(value) for value in values])
    return model


def to_keras(value):
    """A parameter of torch as Keras has it."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T


def gradients_in_torch(model, data, method, keras_model, channels_first=False):
    """The reduced gradients of each step, and the payload that each took. Under the names that TensorFlow will
    have: qsgd rounds by them."""
    import dad.torch

    names = [f"DistributedGradientTape/{variable.path}" for variable in keras_model.trainable_variables]
    named = list(zip(names, model.parameters(), strict=True))
    optimizer = dad.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named, compression=method
    )
    found = []
    for x, y in data:
        before = payload()
        optimizer.zero_grad()
        inputs = torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if channels_first else x)
        (model(inputs) - torch.from_numpy(y)).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        grads = [to_keras(p.grad.numpy().copy()) for p in model.parameters()]
        found.append((grads, payload() - before))
    return found


def gradients_in_tensorflow(model, data, method, compiled=True):
    step = make_step(model, method, compiled)
    found = []
    for x, y in data:
        before = payload()
        grads = [g.numpy() for g in step(tf.constant(x), tf.constant(y))]
        found.append((grads, payload() - before))
    return found


def payload():
    """Sent so far by all ranks, with nothing under way. Which of them owns a piece of a dense tensor depends on
    what it travels with."""
    hvd().barrier()
    return sum(hvd().allgather_object(hvd().stats()["payload_bytes_sent"]))


def assert_same_gradients(ours, theirs, where, tolerance):
    for step, ((a, _), (b, _)) in enumerate(zip(ours, theirs, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            scale = max(np.abs(y).max(), 1e-12)
            difference = np.abs(x - y).max() / scale
            assert difference <= tolerance, f"{where}, step {step}, tensor {i}: {difference}"


def assert_same(ours, theirs, where, tolerance):
    """Of the first steps the bytes differ: by names, and where ranks change what they fuse something is sent
    twice."""
    assert_same_gradients(ours, theirs, where, tolerance)
    mine, their = (min(sent for _, sent in steps[2:]) for steps in (ours, theirs))
    assert abs(mine - their) <= 0.005 * their + 32, f"{where}: {mine}, {their}"


def check_the_same_bytes_and_gradients_as_in_torch():
    data = batches(hvd().rank(), (12,), 5, steps=5)
    for method in [*EXACT, *LOSSY]:
        model = mlp_in_keras()
        with slow_link():
            theirs = gradients_in_torch(mlp_in_torch(), data, method, model)
            ours = gradients_in_tensorflow(model, data, method)
        assert_same(ours, theirs, method, 1e-5 if method in EXACT else 1e-3)
    for method in ("dad", "rank_dad:rank=2", "vgc:alpha=0.5"):
        model = mlp_in_keras()
        theirs = gradients_in_torch(mlp_in_torch(), data, method, model)
        ours = gradients_in_tensorflow(model, data, method, compiled=False)
        assert_same(ours, theirs, f"{method}, eager", 1e-3)


def check_the_same_for_convolutions():
    data = batches(hvd().rank(), (8, 8, 3), 4, steps=4, rows=3)
    for method in ("dad", "rank_dad:rank=2", "vgc:alpha=0.5", "int8", "topk:ratio=0.1", "qsgd"):
        model = cnn_in_keras()
        theirs = gradients_in_torch(cnn_in_torch(), data, method, model, channels_first=True)
        assert_same(gradients_in_tensorflow(model, data, method), theirs, method, 1e-3)


def norm_in_torch(keras_model):
    weights = [torch.from_numpy(to_keras(w).copy()) for w in keras_model.get_weights()]
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.LayerNorm(40, eps=1e-3), torch.nn.Tanh(), torch.nn.Linear(40, 5)
    )
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value
    return model


def check_the_same_for_norms():
    """Their variance is that over samples, too."""
    layers = keras.layers
    data = batches(hvd().rank(), (7, 12), 5, steps=4)
    data = [(x, np.repeat(y[:, None], 7, axis=1)) for x, y in data]
    for method in ("vgc:alpha=1.5", "vgc:alpha=0.5,error_feedback=1"):
        model = keras.Sequential([keras.Input((7, 12)), layers.Dense(40), layers.LayerNormalization()])
        model.add(layers.Activation("tanh"))
        model.add(layers.Dense(5))
        theirs = gradients_in_torch(norm_in_torch(model), data, method, model)
        assert_same(gradients_in_tensorflow(model, data, method), theirs, method, 1e-3)


def check_the_same_for_convolutions_with_groups():
    """The variance of vgc is that over samples in both. Bytes differ: in TensorFlow a bias has a share of its
    own there. After the checks that compare bytes: names that come with other shapes make ranks change what
    they fuse, for a while also in the next check."""
    data = batches(hvd().rank(), (8, 8, 3), 4, steps=4, rows=3)
    for groups in ((3, 2), (3, 6)):
        for method in ("exact", "dad", "rank_dad:rank=2", "vgc:alpha=0.5"):
            model = cnn_in_keras(groups)
            theirs = gradients_in_torch(cnn_in_torch(groups), data, method, model, channels_first=True)
            ours = gradients_in_tensorflow(model, data, method)
            assert_same_gradients(ours, theirs, f"{method}, {groups} groups", 1e-3)


# Exactness


def zoo():
    """Layers with factors and without, a layer that is used twice, an embedding, norms."""
    layers = keras.layers
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 8)(tokens)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x)
    x = layers.EinsumDense("abc,cd->abd", output_shape=(5, 8), bias_axes="d")(x)
    shared = layers.Dense(8, activation="tanh")
    x = shared(shared(x))
    x = layers.Conv1D(6, 3, padding="same", activation="relu")(x)
    x = layers.DepthwiseConv1D(3)(x)
    x = layers.GRU(7, return_sequences=True)(x)
    return keras.Model(tokens, layers.Dense(3)(layers.Flatten()(x)))


def zoo_batch(rank, rows):
    generator = np.random.default_rng(rank)
    return generator.integers(0, 11, size=(rows, 5)), generator.normal(size=(rows, 3)).astype(np.float32)


def check_exact_methods_give_the_mean_of_every_layer():
    model = zoo()
    rows = [2 + rank for rank in range(hvd().size())]
    expected = [
        np.mean(gs, axis=0)
        for gs in zip(
            *(plain_gradients(model, *zoo_batch(rank, rows[rank])) for rank in range(hvd().size())),
            strict=True,
        )
    ]
    x, y = zoo_batch(hvd().rank(), rows[hvd().rank()])
    for method in EXACT:
        for compiled in (True, False):
            step = make_step(model, method, compiled)
            for _ in range(3):
                for variable, a, b in zip(
                    model.trainable_variables, step(tf.constant(x), tf.constant(y)), expected, strict=True
                ):
                    a = tf.convert_to_tensor(a).numpy()
                    # The gradient of a key's bias is zero but for rounding.
                    scale = max(np.abs(b).max(), 1e-3)
                    assert np.abs(a - b).max() <= 1e-5 * scale, f"{method}, {compiled}, {variable.path}"


def check_small_layers_share_an_op_and_others_have_both_ways():
    exchange = importlib.import_module("dad.tensorflow.exchange")
    data = batches(hvd().rank(), (12,), 5, steps=3)
    most = exchange._MOST_FORMED
    for method, tolerance in (("dad", 1e-5), ("rank_dad:rank=2,wire=fp32", 1e-3), ("int8", 0.02)):
        found = []
        for exchange._MOST_FORMED in (most, 0):
            step = make_step(mlp_in_keras(), method, compiled=True)
            graph = step.get_concrete_function(*map(tf.constant, data[0])).graph
            types = [op.type for op in graph.get_operations()]
            found.append([step(tf.constant(x), tf.constant(y)) for x, y in data])
            if exchange._MOST_FORMED:
                assert types.count("DadExchange") == 1 and "Switch" not in types, types
            else:
                assert types.count("DadExchange") > 1 and "Switch" in types, types
        for a, b in zip(*map(tf.nest.flatten, found), strict=True):
            scale = max(np.abs(b.numpy()).max(), 1e-12)
            assert np.abs(a.numpy() - b.numpy()).max() <= tolerance * scale, method
    exchange._MOST_FORMED = most


def many_groups(groups, size):
    layers = keras.layers
    channels = 6 * groups
    model = keras.Sequential([keras.Input((size, size, channels), batch_size=2)])
    model.add(layers.Conv2D(8 * groups, 3, groups=groups))
    model.add(layers.Flatten())
    model.add(layers.Dense(3))
    return model, batches(hvd().rank(), (size, size, channels), 3, steps=3, rows=2)


def check_graphs_do_not_grow_with_the_number_of_groups():
    for method in ("none", "exact", "dad", "rank_dad", "vgc"):
        # Of 3x3 pixels there is one row per sample and group, which is less than the gradient.
        for size in (3, 9):
            num_ops = []
            for groups in (3, 48):
                model, data = many_groups(groups, size)
                step = make_step(model, method, compiled=True)
                arguments = list(map(tf.constant, data[0]))
                num_ops.append(len(step.get_concrete_function(*arguments).graph.get_operations()))
            assert num_ops[1] <= num_ops[0] + 8, f"{method}, {size}x{size} pixels: {num_ops} ops"


def check_groups_go_by_factors_where_these_pay():
    for size, kinds in ((3, {"factor"}), (9, {"dense"})):
        model, data = many_groups(48, size)
        expected = gradients_in_tensorflow(model, data, "none")
        with slow_link():
            ours = gradients_in_tensorflow(model, data, "dad")
        for (a, _), (b, _) in zip(ours, expected, strict=True):
            for x, y in zip(a, b, strict=True):
                assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max(), size
        step = make_step(model, "dad", compiled=True)
        step(*map(tf.constant, data[0]))
        (exchange,) = set(step.get_concrete_function(*map(tf.constant, data[0])).graph._dad_exchanges)
        (choice,) = [
            c for c in exchange.board.plan.choices if "conv2d" in c.layers[0] and "kernel" in c.layers[0]
        ]
        assert {choice.kind} == kinds, choice
        assert "rows" in choice.why, choice


def check_plans_name_layers_without_factors():
    model = zoo()
    optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.0), compression="rank_dad:rank=1")
    model.compile(optimizer, loss="mse")
    x, y = zoo_batch(hvd().rank(), 4)
    assert model.optimizer.plan() == []
    hvd().reset_stats()
    model.fit(x, y, batch_size=2, epochs=1, verbose=0)
    assert hvd().stats()["steps"] == 2, "planning is no step"
    plan = {row["name"]: row for row in model.optimizer.plan()}
    assert len(plan) == len(model.trainable_variables)
    methods = {row["method"] for row in plan.values()}
    assert any("rank_dad" in method for method in methods), methods
    recurrent = [row for name, row in plan.items() if "gru" in name and "recurrent" in name]
    assert recurrent and all(row["bytes"] > 0 for row in recurrent)
    exact = hvd().DistributedOptimizer(keras.optimizers.SGD(0.0), compression="dad")
    model.compile(exact, loss="mse")
    model.fit(x, y, batch_size=2, epochs=1, verbose=0)
    plan = {row["name"]: row for row in model.optimizer.plan()}
    reasons = " ".join(row["why"] for row in plan.values() if row["method"] == "dense")
    assert "loop" in reasons and "depthwise" in reasons, reasons


def check_a_dry_run_plans_the_same():
    import dad

    model = mlp_in_keras()
    x, y = batches(0, (12,), 5, steps=1)[0]
    predicted = dad.plan(model, x, size=hvd().size(), compression="dad")
    step = make_step(model, "dad", compiled=True)
    step(tf.constant(x), tf.constant(y))
    (exchange,) = set(step.get_concrete_function(tf.constant(x), tf.constant(y)).graph._dad_exchanges)
    choices = {name: choice for choice in exchange.board.plan.choices for name in choice.layers}
    assert len(predicted) == len(model.trainable_variables)
    assert {"dad", "dense"} <= {row["method"] for row in predicted}
    for row in predicted:
        if row["name"] in choices:
            assert (row["method"] == "dad") == (choices[row["name"]].kind == "factor"), row
    raises(ValueError, lambda: dad.plan(model, x, link="fast"), "fast")
    layers, inputs = tf.keras.layers, tf.keras.Input((12,))
    heads = tf.keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])
    assert "no gradient" not in str(dad.plan(heads, x, compression="dad"))
