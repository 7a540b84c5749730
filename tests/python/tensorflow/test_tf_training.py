"""Training with dad.tensorflow: gradient tapes, optimizers of TF1, SyncBatchNormalization."""

import math
import os
import re
import time

import numpy as np
import pytest

from tf_util import Lazy, hvd, launched_once, raises, tf
from util import Warnings, check_names

keras = Lazy("keras")
NUM_RANKS = 2
SHARES_NO_OP = 600_000  # so many elements have an op of their own (OP_BYTES in grouping.py)

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


@pytest.mark.parametrize("method", ["none", "dad"])
def test_a_gradient_that_is_not_finite_is_reported_with_its_rank(results, method):
    told = re.findall(r'gradient of "(\S+)" has NaN or infinities on rank (\d)', results.output)
    of_method = [rank for name, rank in told if f"poisoned_{method}" in name]
    assert of_method and set(of_method) == {"1"}, results.output


def before_check():
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)


def batch(rank, rows=8, columns=6):
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(rows, columns)).astype(np.float32)
    return x, (x @ np.ones((columns, 1), np.float32)).astype(np.float32)


def joined(rows=8):
    parts = [batch(rank, rows) for rank in range(hvd().size())]
    return tuple(np.concatenate(p) for p in zip(*parts, strict=True))


def make_model():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    )


def plain_gradients(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


def tape_gradients(model, data, **options):
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return hvd().DistributedGradientTape(tape, **options).gradient(loss, model.trainable_variables)


def assert_close(ours, theirs, rtol=1e-5, atol=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def check_gradients_that_are_not_finite_on_one_rank():
    x, y = batch(hvd().rank())
    for method in ("none", "dad"):
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(1, use_bias=False, name=f"poisoned_{method}")]
        )
        optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.1), compression=method)
        model.compile(optimizer, "mse", run_eagerly=False, jit_compile=False)
        for step in range(4):
            if step == 2 and hvd().rank() == 1:
                x[0, 0] = np.nan
            model.train_on_batch(x, y)
        assert np.isnan(model.get_weights()[0]).all()


def check_the_tape_gives_the_gradient_of_the_joined_batch():
    model = make_model()
    expected = plain_gradients(model, joined())
    x, y = batch(hvd().rank())
    for options in (
        {},
        {"groups": 2},
        {"groups": [model.trainable_variables[:2], model.trainable_variables[3:]]},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd().Compression.none},
    ):
        assert_close(tape_gradients(model, (x, y), **options), expected)
        step = tf.function(lambda a, b, options=options: tape_gradients(model, (a, b), **options))
        for _ in range(3):
            assert_close(step(x, y), expected)
    assert_close(tape_gradients(model, (x, y), op=hvd().Sum), [2 * g for g in expected])
    for method in ("fp16", "bf16", hvd().Compression.per_layer({"*kernel": "fp16", "*": "none"})):
        assert_close(tape_gradients(model, (x, y), compression=method), expected, rtol=2e-2, atol=1e-2)


def check_a_class_with_compress_and_decompress():
    class Half:
        @staticmethod
        def compress(tensor):
            return tf.cast(tensor, tf.float16), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tf.cast(tensor, ctx)

    model = make_model()
    optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(1.0), compression=Half)
    before = model.get_weights()
    mean = plain_gradients(model, joined())
    mine = [tf.constant(gradient) for gradient in plain_gradients(model, batch(hvd().rank()))]
    optimizer.apply(mine, model.trainable_variables)
    expected = [w - g for w, g in zip(before, mean, strict=True)]
    assert_close(model.get_weights(), expected, rtol=2e-2, atol=1e-2)
    assert [row["method"] for row in optimizer.plan()] == ["Half"] * 4


def check_statistics_compare_with_what_was_not_cast():
    import dad

    model = make_model()
    dense_bytes = []
    for compression in ("none", "fp16"):
        step = tf.function(lambda method=compression: tape_gradients(model, batch(0), compression=method))
        dad.reset_stats()
        step()
        dense_bytes.append(dad.stats()["dense_bytes"])
    elements = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    assert dense_bytes == [4 * elements] * 2


def check_small_gradients_share_an_op():
    variables = [tf.Variable(tf.fill([n], float(n))) for n in (3, 1 << 20, 5, 7, 1 << 17, 1 << 19)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
        return hvd().DistributedGradientTape(tape).gradient(loss, variables)

    for _ in range(3):
        assert_close(step(), [2 * variable for variable in variables])
    sends = [op for op in step.get_concrete_function().graph.get_operations() if op.type == "DadAllreduce"]
    assert sorted(len(op.inputs) for op in sends) == [1, 1, 1, 3]


def check_the_tape_may_be_wrapped_before_it_records():
    model = make_model()
    x, y = batch(hvd().rank())
    with hvd().DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    assert isinstance(tape, tf.GradientTape)
    assert_close(tape.gradient(loss, model.trainable_variables), plain_gradients(model, joined()))
    only = tape.gradient(loss, model.trainable_variables[0])
    assert_close([only], plain_gradients(model, joined())[:1])
    nested = tape.gradient(loss, {"a": [model.trainable_variables[1]]})
    assert_close(nested["a"], plain_gradients(model, joined())[1:2])


def check_arguments_of_the_tape():
    tape = tf.GradientTape()
    raises(
        ValueError,
        lambda: hvd().DistributedGradientTape(tape, gradient_predivide_factor=2.0, op=hvd().Sum),
        "gradient_predivide_factor",
    )
    for groups in (-1, "a", [1, 2], 1.5):
        raises(ValueError, lambda groups=groups: hvd().DistributedGradientTape(tape, groups=groups), "groups")
    for factor in (0, -1.0, "a", float("inf")):
        raises(
            ValueError,
            lambda factor=factor: hvd().DistributedGradientTape(tape, gradient_predivide_factor=factor),
            "gradient_predivide_factor",
        )
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1), process_set=None), "process_set=None")
    raises(ValueError, lambda: hvd().DistributedGradientTape(tape, op=77), "op=77")
    raises(ValueError, lambda: hvd().DistributedGradientTape(tape, compression="vgc:alpha=-1"), "alpha")
    raises(ValueError, lambda: hvd().DistributedGradientTape(tape, compression=3), "compression=3")
    distributed = hvd().DistributedGradientTape(tape)
    raises(ValueError, lambda: hvd().DistributedGradientTape(distributed), "already")


def check_a_step_that_fails_updates_nothing():
    """One gradient is reduced long before ranks are found to disagree on the other."""
    variables = [
        keras.Variable(np.ones(SHARES_NO_OP, np.float32)),
        keras.Variable(np.ones(SHARES_NO_OP, np.float32)),
    ]
    optimizer = hvd().DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build(variables)

    def late():
        time.sleep(0.3)
        return np.ones(SHARES_NO_OP + hvd().rank(), np.float32)

    @tf.function
    def step():
        slow = tf.py_function(late, [], tf.float32)
        optimizer.apply([tf.ones(SHARES_NO_OP), tf.ensure_shape(slow, [None])], variables)

    raises(tf.errors.FailedPreconditionError, step, "shape")
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.ones(variable.shape))


def check_no_optimizer_of_graphs_splits_a_step():
    """TensorFlow's may take ops apart that only hand tensors on, and updates then come one by one."""
    from dad.tensorflow.gradients import _all_or_none

    variables = [tf.Variable(0.0) for _ in range(3)]

    @tf.function
    def step(x, fails):
        late = tf.fill([400, 400], x)
        for _ in range(8):
            late = tf.tanh(tf.matmul(late, late))
        fine = tf.logical_or(late[0, 0] < 0.0, tf.logical_not(fails))
        with tf.control_dependencies([tf.debugging.Assert(fine, ["on purpose"])]):
            last = tf.identity(x * 4.0)
        for variable, gradient in zip(variables, _all_or_none([x * 2.0, x * 3.0, last]), strict=True):
            variable.assign_sub(gradient)
        return x  # what returns nothing is left alone

    for _ in range(5):
        raises(tf.errors.InvalidArgumentError, lambda: step(tf.constant(1.0), tf.constant(True)))
        assert [float(variable) for variable in variables] == [0.0, 0.0, 0.0]
    step(tf.constant(1.0), tf.constant(False))
    assert [float(variable) for variable in variables] == [-2.0, -3.0, -4.0]


def check_sparse_gradients_of_an_embedding():
    rank = hvd().rank()
    table = tf.Variable(np.arange(10, dtype=np.float32).reshape(5, 2))
    unused = tf.Variable([1.0])
    rows = tf.constant([[0, 1], [1, 4]][rank])

    def gradient(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * (rank + 1.0)
        return hvd().DistributedGradientTape(tape, **options).gradient(loss, [table, unused])

    expected = np.zeros((5, 2))
    expected[[0, 1]] += 0.5
    expected[[1, 4]] += 1.0
    for run in (gradient, tf.function(gradient)):
        sparse, none = run()
        assert isinstance(sparse, tf.IndexedSlices) and none is None
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected)
        dense, _ = run(sparse_as_dense=True)
        assert isinstance(dense, tf.Tensor)
        np.testing.assert_allclose(dense, expected)


def check_local_layers_keep_their_gradients():
    model = make_model()
    x, y = batch(hvd().rank())
    mine, expected = plain_gradients(model, (x, y)), plain_gradients(model, joined())
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd().PartialDistributedGradientTape(
            tape, local_layers=model.layers[0], scale_local_gradients=scale
        )
        local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
        assert_close([g for _, g in shared], expected[2:])
        assert_close([g for _, g in local], [g / (2 if scale else 1) for g in mine[:2]])
    raises(
        ValueError,
        lambda: hvd().PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1]),
        "local layers",
    )


def check_a_custom_loop_keeps_replicas_equal():
    keras.utils.set_random_seed(hvd().rank())
    model = make_model()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    hvd().broadcast_variables(model.variables, root_rank=0)
    hvd().broadcast_variables(optimizer.variables, root_rank=0)
    x, y = batch(hvd().rank())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd().DistributedGradientTape(tape)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    losses = [float(step(x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
    everyone = hvd().allgather_object([v.numpy() for v in model.variables])
    for a, b in zip(*everyone, strict=True):
        np.testing.assert_array_equal(a, b)


def check_tapes_that_differ_fail_on_all_ranks():
    odd = hvd().rank() == 1
    x, y = batch(hvd().rank())

    def step(model, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd().DistributedGradientTape(tape, **options)
        return tape.gradient(loss, model.trainable_variables)

    for wrap in (tf.function, lambda function: function):
        keras.backend.clear_session()
        model = make_model()
        if odd:
            model.add(keras.layers.Dense(1))
        words = ("nothing on rank 0, (1, 1) float32 on rank 1", "DistributedGradientTape")
        raises(tf.errors.FailedPreconditionError, lambda m=model, w=wrap: w(step)(m), *words)
        keras.backend.clear_session()
        good = make_model()
        op = hvd().Sum if odd else hvd().Average
        words = ("op Average on rank 0, Sum on rank 1",)
        raises(tf.errors.FailedPreconditionError, lambda m=good, w=wrap, o=op: w(step)(m, op=o), *words)
        wrap(step)(good)


def check_replicas_of_a_tape_that_differ_end_the_step_if_wanted():
    os.environ["DAD_CHECK_REPLICAS"] = "raise"
    model = make_model()
    model.layers[0].bias.assign(np.full(5, float(hvd().rank())))
    x, y = batch(hvd().rank())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = hvd().DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        for gradient, variable in zip(gradients, model.trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)

    try:
        for _ in range(2):
            step(x, y)
        words = ("replicas differ", '"sequential/dense/bias"', "between rank 0 / rank 1")
        raises(tf.errors.FailedPreconditionError, lambda: step(x, y), *words)
        step(x, y)
    finally:
        del os.environ["DAD_CHECK_REPLICAS"]


def check_a_layer_that_no_tape_trains_is_told_of():
    rank = hvd().rank()
    x, y = batch(rank)
    for trains_all in (False, True):
        model, critic = make_model(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.layers[0].bias.assign(np.full(5, float(rank if not trains_all else 0)))
        parts = [model.layers[1], critic] + ([model.layers[0]] if trains_all else [])

        def step(x, y, model=model, critic=critic, parts=parts):
            """A tape for each part, as in adversarial training."""
            for part in parts:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(critic(model(x)) - y))
                tape = hvd().DistributedGradientTape(tape)
                for gradient, variable in zip(
                    tape.gradient(loss, part.trainable_variables), part.trainable_variables, strict=True
                ):
                    variable.assign_sub(0.1 * gradient)

        for run in (step, tf.function(step)):
            with Warnings("replicas differ") as said:
                for _ in range(4):
                    run(x, y)
            if rank == 0 and not trains_all and run is step:
                assert len(said) == 1 and "dense/bias" in said[0] and "register_local_var" in said[0], said
            else:
                assert not said, said


def check_replicas_of_a_session_of_tf1():
    v1, rank = tf.compat.v1, hvd().rank()
    x, y = batch(rank)
    for case in ("equal", "variable", "rate", "passes"):
        # A condition of TensorFlow 2 takes no variable without a resource.
        for use_resource in (True,) if case == "passes" else (True, False):
            with tf.Graph().as_default(), v1.Session() as session, Warnings("replicas differ") as said:
                start = 0.5 + 0.1 * rank * (case in ("variable", "passes"))
                with v1.variable_scope(f"{case}_{use_resource}"):
                    w = v1.get_variable("w", initializer=tf.fill([6, 1], start), use_resource=use_resource)
                loss = tf.reduce_mean(tf.square(tf.matmul(tf.constant(x), w) - tf.constant(y)))
                optimizer = v1.train.GradientDescentOptimizer(0.01 * (1 + rank * (case == "rate")))
                optimizer = hvd().DistributedOptimizer(
                    optimizer, backward_passes_per_step=2 if case == "passes" else 1
                )
                train = optimizer.minimize(loss)
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for _ in range(8):
                    session.run(train)
            words = {"equal": None, "rate": "learning_rate is 0.01 on rank 0, 0.02 on rank 1"}.get(
                case, f'"{case}_{use_resource}/w" differs between rank 0 / rank 1. Run hvd.broadcast_global'
            )
            if rank == 0 and words is not None:
                assert any("replicas differ after step 1" in one and words in one for one in said), (
                    case,
                    said,
                )
            else:
                assert not said, (case, said)


def check_a_tape_over_variables_of_keras_in_a_graph_of_tf1():
    """They are no tf.Variables; what compares replicas reads what is behind them."""
    v1, rank = tf.compat.v1, hvd().rank()
    with tf.Graph().as_default(), v1.Session() as session:
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        x = tf.constant([[1.0 + rank, 2.0]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        tape = hvd().DistributedGradientTape(tape)
        (gradient,) = tape.gradient(loss, layer.trainable_variables)
        session.run(v1.global_variables_initializer())
        np.testing.assert_allclose(session.run(gradient), [[1.5], [2.0]])


def check_process_sets_of_one_rank_send_nothing():
    alone = [hvd().add_process_set([rank]) for rank in range(2)]
    model = make_model()
    data = batch(hvd().rank())
    for process_set in alone:
        hvd().reset_stats()
        gradients = tape_gradients(model, data, process_set=process_set)
        assert_close(gradients, plain_gradients(model, data))
    for process_set in alone:
        hvd().remove_process_set(process_set)


def _v1_losses(distributed, passes, steps=4, **options):
    """Weights after steps of a linear model in a session of TF1."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x, y = v1.placeholder(tf.float32, [None, 6]), v1.placeholder(tf.float32, [None, 1])
        w = v1.get_variable("w", initializer=tf.fill([6, 1], 0.5))
        b = v1.get_variable("b", initializer=tf.zeros([1]))
        loss = tf.reduce_mean(tf.square(x @ w + b - y))
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        if distributed:
            optimizer = hvd().DistributedOptimizer(optimizer, **options)
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        if distributed:
            session.run(hvd().broadcast_global_variables(0))
        data = batch(hvd().rank()) if distributed else joined()
        for _ in range(steps * passes):
            session.run(train, {x: data[0], y: data[1]})
        assert session.run(step) == steps * passes
        if distributed:
            assert [row["name"] for row in optimizer.plan()] == ["w", "b"]
        assert isinstance(optimizer, v1.train.Optimizer) and optimizer.get_slot_names() == ["momentum"]
        return session.run([w, b])


def check_optimizers_of_tf1():
    expected = _v1_losses(False, 1)
    assert_close(_v1_losses(True, 1), expected)
    assert_close(_v1_losses(True, 1, groups=1), expected)
    # The same batch three times: the mean of its gradients is its gradient.
    averaged = _v1_losses(
        True, 3, backward_passes_per_step=3, average_aggregated_gradients=True, sparse_as_dense=True
    )
    assert_close(averaged, expected)
    summed = _v1_losses(True, 2, steps=1, backward_passes_per_step=2)
    half = _v1_losses(False, 1, steps=1)
    assert_close([0.5 - summed[0]], [2 * (0.5 - half[0])])


def check_optimizers_of_tf1_in_eager_mode():
    w = tf.Variable(np.full((6, 1), 0.5, np.float32))
    x, y = batch(hvd().rank())
    optimizer = hvd().DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    optimizer.minimize(lambda: tf.reduce_mean(tf.square(x @ w - y)), var_list=[w])
    a, b = joined()
    gradient = 2 * a.T @ (a @ np.full((6, 1), 0.5) - b) / len(a)
    np.testing.assert_allclose(w, 0.5 - 0.1 * gradient, rtol=1e-5)
    raises(
        ValueError,
        lambda: hvd().DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2
        ),
        "backward_passes_per_step",
    )


def check_adasum_of_tf1_optimizers_combines_the_ranks_own_steps():
    v1, rank, size = tf.compat.v1, hvd().rank(), hvd().size()

    def optimizer(**options):
        # With momentum the second step is 1.9 times as long as the first.
        return hvd().DistributedOptimizer(v1.train.MomentumOptimizer(0.1, 0.9), op=hvd().Adasum, **options)

    def loss(a, b):
        return a[rank] + tf.reduce_sum(b)

    # Adasum adds orthogonal changes and takes the mean of equal ones.
    a, b = tf.Variable(tf.ones(size)), tf.Variable(tf.ones(2))
    optimizer().minimize(lambda: loss(a, b), var_list=[a, b])
    np.testing.assert_allclose(a, np.full(size, 0.9), rtol=1e-5)
    np.testing.assert_allclose(b, [0.9, 0.9], rtol=1e-5)
    for passes in (1, 2):
        with tf.Graph().as_default(), v1.Session() as session:
            a = v1.get_variable("a", initializer=tf.ones(size))
            b = v1.get_variable("b", initializer=tf.ones(2), use_resource=False)
            train = optimizer(backward_passes_per_step=passes).minimize(loss(a, b))
            session.run(v1.global_variables_initializer())
            if passes > 1:
                session.run(v1.local_variables_initializer())
            for step, moved in enumerate([0.1, 0.29]):
                session.run(train)
                own = passes == 2 and step == 0  # nothing has been combined yet
                expected = (
                    np.where(np.arange(size) == rank, 1 - moved, 1) if own else np.full(size, 1 - moved)
                )
                np.testing.assert_allclose(session.run(a), expected, rtol=1e-5)
                np.testing.assert_allclose(session.run(b), [1 - moved] * 2, rtol=1e-5)
    raises(ValueError, lambda: optimizer(average_aggregated_gradients=True), "average_aggregated_gradients")


def check_sync_batch_norm_equals_batch_norm_of_the_joined_batch():
    rank, size = hvd().rank(), hvd().size()
    parts = [
        np.random.default_rng(r).normal(100.0, 1 + r, (4 + 3 * r, 5, 3)).astype(np.float32)
        for r in range(size)
    ]
    weights = [
        np.random.default_rng(9 + r).normal(size=p.shape).astype(np.float32) for r, p in enumerate(parts)
    ]
    plain = keras.layers.BatchNormalization(momentum=0.5)
    sync = hvd().SyncBatchNormalization(momentum=0.5)
    assert isinstance(sync, keras.layers.BatchNormalization) and sync.name == "sync_batch_normalization"
    whole, whole_weight = np.concatenate(parts), np.concatenate(weights)

    def run(layer, x, weight):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * weight)
        return y, tape.gradient(loss, [x, *layer.trainable_variables])

    expected, expected_gradients = run(plain, whole, whole_weight)
    first = sum(len(p) for p in parts[:rank])
    rows = slice(first, first + len(parts[rank]))
    sync.build(whole.shape)
    for call in (run, tf.function(run)):
        sync.moving_mean.assign(np.zeros(3)), sync.moving_variance.assign(np.ones(3))
        y, gradients = call(sync, parts[rank], weights[rank])
        np.testing.assert_allclose(y, expected[rows], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradients[0], expected_gradients[0][rows], rtol=1e-3, atol=1e-4)
        total = hvd().allreduce(gradients[1], op=hvd().Sum)
        np.testing.assert_allclose(total, expected_gradients[1], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(sync.moving_mean, plain.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(sync.moving_variance, plain.moving_variance, rtol=1e-3)
    raises(ValueError, lambda: hvd().SyncBatchNormalization(fused=True), "fused")
    raises(ValueError, lambda: hvd().SyncBatchNormalization(virtual_batch_size=4), "virtual_batch_size=4")
    dropped = {"fused": False, "virtual_batch_size": None, "adjustment": None}
    assert hvd().SyncBatchNormalization(axis=1, **dropped).axis == 1
    config = keras.layers.serialize(sync)
    again = keras.layers.deserialize(
        config, custom_objects={"SyncBatchNormalization": hvd().SyncBatchNormalization}
    )
    assert type(again) is hvd().SyncBatchNormalization


def check_no_thread_of_tensorflow_waits():
    """More collectives in flight than TensorFlow has threads, which come in the opposite order."""
    order = range(40) if hvd().rank() else reversed(range(40))
    order = list(order)

    @tf.function
    def step(x):
        done = {i: hvd().allreduce(x + float(i), op=hvd().Sum, name=f"many.{i}") for i in order}
        return tf.add_n(list(done.values()))

    for _ in range(3):
        assert step(tf.constant(1.0)).numpy() == 2 * (40 + sum(range(40)))
