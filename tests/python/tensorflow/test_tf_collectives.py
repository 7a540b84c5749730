"""Every collective of dad.tensorflow on several ranks: eager, in tf.function and in graphs of TF1."""

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tf_util import hvd, launched_once, raises, tf
from util import check_names

NUM_RANKS = 3

results = launched_once(__file__, NUM_RANKS, "tensorflow")


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


def values(rank, *shape):
    """Small whole numbers that differ by rank, so that sums are exact in every dtype."""
    return ((np.arange(np.prod(shape, dtype=int)) % 5 + rank) % 7).reshape(shape)


def mine(dtype, *shape):
    return tf.cast(tf.constant(values(hvd().rank(), *shape)), dtype)


def everyone(*shape):
    return np.stack([values(rank, *shape) for rank in range(hvd().size())])


def as_float64(tensor):
    return tf.cast(tensor, tf.float64).numpy()


def modes(function):
    """The function itself, and the function as a graph."""
    return [function, tf.function(function)]


def check_allreduce_of_all_dtypes_and_dimensions():
    def reduce(x):
        return [hvd().allreduce(x, op=op) for op in (hvd().Sum, hvd().Min, hvd().Max)]

    for run in modes(reduce):
        for dtype in FLOATS + INTEGERS:
            for shape in [(), (1,), (17,), (3, 4, 5), (0,), (2, 0, 3)]:
                x = mine(dtype, *shape)
                total, least, most = run(x)
                assert total.dtype == x.dtype and total.shape == x.shape
                np.testing.assert_array_equal(as_float64(total), everyone(*shape).sum(0))
                np.testing.assert_array_equal(as_float64(least), everyone(*shape).min(0))
                np.testing.assert_array_equal(as_float64(most), everyone(*shape).max(0))
                np.testing.assert_array_equal(as_float64(x), values(hvd().rank(), *shape))


def check_average_product_bool_and_scales():
    for run in modes(lambda x: hvd().allreduce(x)):
        np.testing.assert_allclose(as_float64(run(mine("float32", 6))), everyone(6).mean(0), rtol=1e-6)
        assert run(tf.fill([4], 7)).numpy().tolist() == [7] * 4
    for run in modes(lambda x: hvd().allreduce(x, op=hvd().Product)):
        assert run(tf.fill([3], float(hvd().rank() + 1))).numpy().tolist() == [6.0] * 3
    for run in modes(lambda x: hvd().allreduce(x, op=hvd().Adasum)):
        np.testing.assert_allclose(run(tf.fill([3], 2.0)), [2.0] * 3, rtol=1e-6)
    flags = tf.constant([hvd().rank() == 0, True, False])
    assert hvd().allreduce(flags, op=hvd().Max).numpy().tolist() == [True, True, False]
    assert hvd().allreduce(flags, op=hvd().Min).numpy().tolist() == [False, True, False]
    third = 1.0 / 3.0  # not a number that a float32 holds
    scaled = hvd().allreduce(mine("float64", 5), op=hvd().Sum, prescale_factor=third, postscale_factor=7.0)
    np.testing.assert_allclose(scaled, (everyone(5) * third).sum(0) * 7.0, rtol=1e-15)


def check_grouped_allreduce_with_several_dtypes():
    def reduce(*tensors):
        return hvd().grouped_allreduce(list(tensors), op=hvd().Sum)

    for run in modes(reduce):
        tensors = [mine("float32", 3), mine("int64", 2, 2), mine("float16", 4), mine("float32", 0)]
        totals = run(*tensors)
        for total, x in zip(totals, tensors, strict=True):
            assert total.dtype == x.dtype
            np.testing.assert_array_equal(as_float64(total), everyone(*x.shape).sum(0))
    assert hvd().grouped_allreduce([]) == []


def check_compression():
    exact = everyone(9).mean(0)
    for method in ("none", "fp16", "bf16"):
        for spec in (getattr(hvd().Compression, method), getattr(hvd().Compression, method)(), method):
            for run in modes(lambda x, spec=spec: hvd().allreduce(x, compression=spec)):
                mean = run(mine("float32", 9))
                assert mean.dtype == tf.float32
                np.testing.assert_allclose(mean, exact, rtol=1e-2, atol=1e-2)
    assert hvd().allreduce(tf.constant([3]), compression=hvd().Compression.fp16).dtype == tf.int32

    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * ctx

    np.testing.assert_allclose(hvd().allreduce(mine("float32", 9), compression=Halved), exact, rtol=1e-6)
    raises(
        ValueError,
        lambda: hvd().allreduce(mine("float32", 9), compression=hvd().Compression.rank_dad),
        "'rank_dad' keeps state from step to step",
    )


def check_indexed_slices():
    rank = hvd().rank()
    slices = tf.IndexedSlices(tf.fill([rank + 1, 2], float(rank)), tf.range(rank + 1), tf.constant([5, 2]))

    def dense(op):
        return tf.convert_to_tensor(hvd().allreduce(slices, op=op))

    expected = np.zeros((5, 2))
    for r in range(hvd().size()):
        expected[: r + 1] += r
    for run in (dense, tf.function(dense)):
        np.testing.assert_allclose(run(hvd().Sum), expected)
        np.testing.assert_allclose(run(hvd().Average), expected / hvd().size(), rtol=1e-6)
    counts = tf.IndexedSlices(tf.fill([1, 2], rank), tf.range(1), tf.constant([5, 2]))
    average = hvd().allreduce(counts)
    assert average.values.dtype.is_floating, "integers have been divided as integers"
    np.testing.assert_allclose(tf.reduce_sum(average.values, axis=0), [1.0, 1.0])
    assert hvd().allreduce(counts, op=hvd().Sum).values.dtype == counts.values.dtype
    raises(NotImplementedError, lambda: dense(hvd().Adasum), "sparse_as_dense")
    raises(NotImplementedError, lambda: dense(hvd().Max))
    for dtype, quotient in {
        "uint8": "float32",
        "int8": "float32",
        "uint16": "float32",
        "int16": "float32",
        "int32": "float64",
        "int64": "float64",
        "float16": "float16",
        "bfloat16": "bfloat16",
        "float32": "float32",
    }.items():
        small = tf.IndexedSlices(tf.cast([[1]], dtype), [rank], [5, 1])
        for average in (hvd().allreduce(small), *hvd().grouped_allreduce([small])):
            assert average.values.dtype == quotient, (dtype, average.values.dtype)
            np.testing.assert_allclose(as_float64(average.values), [[1 / 3]] * 3, rtol=1e-2)
    for factor in ("prescale_factor", "postscale_factor"):
        raises(NotImplementedError, lambda f=factor: hvd().allreduce(slices, **{f: 0.5}), "IndexedSlices")
        raises(NotImplementedError, lambda f=factor: hvd().grouped_allreduce([slices], **{f: 0.5}))
    both = hvd().grouped_allreduce([slices, tf.ones(2)], op=hvd().Sum)
    np.testing.assert_allclose(tf.convert_to_tensor(both[0]), expected)
    assert both[1].numpy().tolist() == [3.0, 3.0]


def check_allgather():
    rank = hvd().rank()
    for run in modes(lambda x: hvd().allgather(x)):
        for dtype in [*FLOATS, *INTEGERS, "bool"]:
            gathered = run(tf.cast(tf.fill([rank, 2], rank), dtype))  # rank 0 has no row
            assert gathered.dtype == dtype
            assert as_float64(gathered)[:, 0].tolist() == [1.0] + [1.0 if dtype == "bool" else 2.0] * 2
    for run in modes(lambda x: hvd().grouped_allgather([x, 2 * x[:1]])):
        a, b = run(tf.fill([rank + 1], rank))
        assert a.numpy().tolist() == [0, 1, 1, 2, 2, 2] and b.numpy().tolist() == [0, 2, 4]
    for run in modes(lambda x: hvd().allgather(x)):
        assert run(tf.constant(float(rank))).numpy().tolist() == [0.0, 1.0, 2.0]


def check_broadcast():
    for root in range(hvd().size()):
        for run in modes(lambda x, root=root: hvd().broadcast(x, root)):
            for dtype in [*FLOATS, *INTEGERS, "bool"]:
                x = mine(dtype, 3, 2)
                expected = tf.cast(tf.constant(values(root, 3, 2)), dtype)
                np.testing.assert_array_equal(as_float64(run(x)), as_float64(expected))


def check_broadcast_of_variables():
    rank = hvd().rank()
    a, b = tf.Variable([float(rank)] * 3), tf.Variable(rank, dtype=tf.int64)
    seen = a.read_value()
    hvd().broadcast_variables([a, b], root_rank=2)
    assert a.numpy().tolist() == [2.0] * 3 and b.numpy() == 2
    assert seen.numpy().tolist() == [float(rank)] * 3, "a value that was read before has changed"
    a.assign([float(rank)] * 3)

    @tf.function
    def in_graph():
        hvd().broadcast_variables([a, b], root_rank=1, inplace=True)
        return a + 1.0

    assert in_graph().numpy().tolist() == [2.0] * 3 and a.numpy().tolist() == [1.0] * 3
    a.assign([float(rank)] * 3)
    (value,) = hvd().broadcast_([a], root_rank=0)
    assert value.numpy().tolist() == a.numpy().tolist() == [0.0] * 3
    raises(ValueError, lambda: hvd().broadcast_([tf.ones(2)], root_rank=0), "only variables")


def check_broadcast_of_the_reference_variables_of_tf1():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        a, b = (
            v1.get_variable(name, initializer=tf.fill([2], float(hvd().rank())), use_resource=False)
            for name in "ab"
        )
        written = hvd().broadcast_([a], root_rank=1)
        broadcast = hvd().broadcast_variables([b], root_rank=2)
        session.run(v1.global_variables_initializer())
        assert session.run(written)[0].tolist() == session.run(a).tolist() == [1.0, 1.0]
        session.run(broadcast)
        assert session.run(b).tolist() == [2.0, 2.0]


def check_alltoall():
    rank, size = hvd().rank(), hvd().size()
    for run in modes(lambda x: hvd().alltoall(x)):
        assert run(tf.fill([size, 2], rank)).numpy()[:, 0].tolist() == [0, 1, 2]
    for run in modes(lambda x, splits: hvd().alltoall(x, splits)):
        # Rank r sends i rows to rank i.
        received, splits = run(tf.fill([3], float(rank)), tf.constant([0, 1, 2]))
        assert received.numpy().tolist() == [float(r) for r in range(size) for _ in range(rank)]
        assert splits.numpy().tolist() == [rank] * size
    wrong_splits = modes(lambda x: hvd().alltoall(x, [1, 1, 1]))
    for bad, words in [(modes(hvd().alltoall), "divided evenly"), (wrong_splits, "add up")]:
        for run in bad:
            raises(tf.errors.InvalidArgumentError, lambda run=run: run(tf.ones(4)), words)


def check_reducescatter():
    rank = hvd().rank()
    whole = everyone(7, 2)
    rows = [3, 2, 2]  # the remainder goes to the lowest ranks
    first = sum(rows[:rank])
    for run in modes(lambda x: hvd().reducescatter(x, op=hvd().Sum)):
        part = run(mine("float32", 7, 2))
        np.testing.assert_array_equal(part, whole.sum(0)[first : first + rows[rank]])
    for run in modes(lambda x: hvd().grouped_reducescatter([x, x + 1.0])):
        _, part = run(mine("float32", 7, 2))
        np.testing.assert_allclose(part, whole.mean(0)[first : first + rows[rank]] + 1, rtol=1e-6)


def check_gradients():
    rank, size = hvd().rank(), hvd().size()

    def gradient(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * tf.cast(rank + 1, y.dtype))
        return tape.gradient(loss, x)

    x = tf.ones([size, 2])
    total, mean = sum(range(1, size + 1)), sum(range(1, size + 1)) / size
    cases = [
        (lambda t: hvd().allreduce(t, op=hvd().Sum), total),
        (lambda t: hvd().allreduce(t), mean),
        (lambda t: hvd().allreduce(t, prescale_factor=2.0), 2 * mean),
        (lambda t: hvd().grouped_allreduce([t, 2 * t])[0], mean),
        (lambda t: hvd().allgather(t), mean),
        (lambda t: hvd().broadcast(t, 1), mean if rank == 1 else 0.0),
        (lambda t: hvd().reducescatter(t), None),
        (lambda t: hvd().reducescatter(t, op=hvd().Sum), None),
        (lambda t: hvd().alltoall(t), None),
    ]
    for function, expected in cases:
        for run in modes(lambda t, f=function: gradient(f, t)):
            result = run(x)
            assert result.shape == x.shape
            if expected is not None:
                np.testing.assert_allclose(result, np.full((size, 2), expected), rtol=1e-6)
    row = np.arange(1, size + 1, dtype=float)[:, None] * np.ones((1, 2))
    np.testing.assert_allclose(gradient(cases[6][0], x), row, rtol=1e-6)
    np.testing.assert_allclose(gradient(cases[7][0], x), row * size, rtol=1e-6)
    np.testing.assert_allclose(gradient(cases[8][0], x), row, rtol=1e-6)
    uneven = tf.ones([rank + 1, 2])
    np.testing.assert_allclose(gradient(lambda t: hvd().allgather(t), uneven), np.full((rank + 1, 2), mean))
    raises(
        ValueError, lambda: gradient(lambda t: hvd().allreduce(t, op=hvd().Max), x), "op=Sum and op=Average"
    )


def check_the_world_as_ops():
    for run in modes(
        lambda: [hvd().rank_op(), hvd().size_op(), hvd().local_rank_op(), hvd().local_size_op()]
    ):
        assert [int(v) for v in run()] == [hvd().rank(), 3, hvd().local_rank(), 3]
    assert int(hvd().process_set_included_op()) == 1
    assert int(hvd().process_set_included_op(77)) < 0


def check_process_sets():
    pair = hvd().add_process_set([0, 2])
    if pair.included():
        for run in modes(lambda x: hvd().allreduce(x, op=hvd().Sum, process_set=pair)):
            assert run(tf.constant(float(hvd().rank()))).numpy() == 2.0
        assert hvd().allgather([hvd().rank()], process_set=pair).numpy().tolist() == [0, 2]
        assert int(hvd().size_op(pair.process_set_id)) == 2
    else:
        raises(
            tf.errors.InvalidArgumentError,
            lambda: hvd().allreduce(tf.ones(1), process_set=pair),
            "rank 1 is not in process set",
        )
    assert int(hvd().process_set_included_op(pair.process_set_id)) == (hvd().rank() != 1)
    assert hvd().remove_process_set(pair)
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1), process_set=pair), "was not given to init()")
    pair.process_set_id = 10
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1), process_set=pair), "process_set_id=10")


def check_names_that_scripts_take_from_horovods_modules():
    h = hvd()
    assert h.mpi_ops.allreduce is h.allreduce and h.mpi_ops._basics.size() == 3
    assert h.util._executing_eagerly() and not tf.function(lambda: h._executing_eagerly())()
    assert h.gpu_available("tensorflow") is False
    kernel = tf.keras.layers.Dense(1)
    kernel.build((1, 1))
    for variables in ([tf.Variable(1.0), tf.Variable(2.0)], kernel.weights):
        references = h.util.vars_to_refs(list(variables))
        assert len({*references, *h.util.vars_to_refs(list(variables))}) == 2
        assert all(a is b for a, b in zip(h.util.refs_to_vars(references), variables, strict=True))


def check_misuse_is_an_error_before_anything_is_sent():
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1), average=True, op=hvd().Sum), "both")
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1), op=99), "op=99")
    raises(ValueError, lambda: hvd().allreduce(tf.constant("text")), "string")
    raises(ValueError, lambda: hvd().allreduce(tf.ones(1, tf.complex64)), "complex64")
    with pytest.warns(DeprecationWarning):
        assert hvd().allreduce(tf.constant(1.0), average=False).numpy() == 3.0


def check_what_one_rank_is_refused_takes_no_number():
    # Calls without a name are told apart by their number, which has to be the same on all ranks; so are
    # equal names in a graph.
    h, rank = hvd(), hvd().rank()
    slices = tf.IndexedSlices([[1.0]], [0], [3, 1])
    text = ["no number"]
    refused_by_python = [
        lambda x: h.allreduce(slices, op=h.Max),
        lambda x: h.allreduce(x, process_set=h.ProcessSet([0])),
        lambda x: h.allreduce(x, compression=h.Compression.rank_dad),
        lambda x: h.grouped_allreduce([slices, text]),
        lambda x: h.grouped_allgather([x, text]),
        lambda x: h.allgather(text),
        lambda x: h.allgather(text, name="twice"),
        lambda x: h.alltoall(text),
        lambda x: h.broadcast(text, 0),
        lambda x: h.reducescatter(text),
        lambda x: h.reducescatter(x, op=99),
        lambda x: h.broadcast_variables([tf.Variable(1.0)], 0, process_set=h.ProcessSet([0])),
    ]
    refused_by_the_core = [
        lambda x: h.broadcast(x, 99),
        lambda x: h.allreduce(tf.constant(1), op=h.Adasum),
        lambda x: h.grouped_allreduce([tf.constant(1)] * 2, op=h.Adasum),
        lambda x: h.reducescatter(tf.constant(1.0)),
    ]

    def all_kinds(x):
        if rank == 0:
            for wrong in refused_by_python:
                raises((ValueError, NotImplementedError), lambda wrong=wrong: wrong(x))
        reduced = h.allreduce(tf.IndexedSlices(x[:1], [0], [6]))
        return [
            h.allreduce(x),
            *h.grouped_allreduce([x, x]),
            reduced.values,
            h.allgather(x)[:6],
            h.allgather(x, name="twice")[:6],
            *(gathered[:6] for gathered in h.grouped_allgather([x, x])),
            h.broadcast(x, 0),
            h.alltoall(x),
            h.reducescatter(x),
        ]

    ones = tf.ones(6)
    for run in modes(all_kinds):
        if rank == 0 and run is all_kinds:
            for wrong in refused_by_the_core:
                raises(tf.errors.InvalidArgumentError, lambda wrong=wrong: wrong(ones))
        for result in run(ones):
            assert result.numpy().ravel()[0] in (1.0, np.float32(1 / 3))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for result in session.run(all_kinds(tf.ones(6))):
            assert result.ravel()[0] in (1.0, np.float32(1 / 3))


def check_ranks_that_disagree_get_an_error_and_go_on():
    rank = hvd().rank()

    def mismatches():
        yield "shape", lambda: hvd().allreduce(tf.ones([2 + rank]), name="shape"), "[2] on rank 0"
        dtype = tf.float32 if rank else tf.float64
        yield "dtype", lambda: hvd().allreduce(tf.ones([2], dtype), name="dtype"), "float64 on rank 0"
        op = hvd().Sum if rank else hvd().Max
        yield "op", lambda: hvd().allreduce(tf.ones([2]), op=op, name="op"), "Max on rank 0"
        yield "root", lambda: hvd().broadcast(tf.ones([2]), rank, name="root"), "root"

    for name, function, words in mismatches():
        for run in modes(function):
            raises(tf.errors.FailedPreconditionError, run, f'"{name}"', words)
            assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum).numpy() == 3.0


def check_ops_of_a_function_run_in_any_order():
    order = ["a", "b"] if hvd().rank() else ["b", "a"]

    @tf.function
    def step(x):
        results = {name: hvd().allreduce(x, op=hvd().Sum, name=name) for name in order}
        hvd().allreduce(x, name="unused")  # others may use theirs
        return results["a"] + results["b"]

    for _ in range(4):
        assert step(tf.constant(1.0)).numpy() == 6.0


def check_constants_are_not_folded_and_equal_calls_not_merged():
    @tf.function
    def step():
        one = tf.constant(1.0)
        return hvd().allreduce(one, op=hvd().Sum) + hvd().allreduce(one, op=hvd().Sum)

    hvd().reset_stats()
    for _ in range(5):
        assert step().numpy() == 6.0
    steps = [t["steps"] for name, t in hvd().stats()["tensors"].items() if name.startswith("allreduce.step")]
    assert steps == [5, 5], hvd().stats()


def check_conditions_and_loops():
    @tf.function
    def step(n):
        total = tf.constant(0.0)
        for i in tf.range(n):
            total += hvd().allreduce(tf.cast(i, tf.float32), op=hvd().Sum)
        if total > 0.0:  # noqa: SIM108  AutoGraph makes a tf.cond of it
            total = hvd().allreduce(total)
        else:
            total = hvd().allreduce(total - 1.0)
        return total

    assert step(5).numpy() == 30.0
    assert step(70).numpy() == 3.0 * 69 * 70 / 2
    assert step(0).numpy() == -1.0


def check_results_that_depend_on_each_other():
    @tf.function
    def step(x):
        for _ in range(5):
            x = hvd().allreduce(x, op=hvd().Sum) / 3.0
        return x

    for _ in range(5):
        np.testing.assert_allclose(step(tf.constant([1.0, 2.0])), [1.0, 2.0], rtol=1e-6)


def check_many_tensors_of_many_steps():
    @tf.function
    def step(*tensors):
        return [hvd().allreduce(t, op=hvd().Sum) for t in tensors]

    tensors = [tf.fill([i % 17 + 1], float(hvd().rank() + i)) for i in range(100)]
    for _ in range(10):
        for i, total in enumerate(step(*tensors)):
            assert total.numpy().tolist() == [3.0 * i + 3.0] * (i % 17 + 1)


def check_a_graph_of_tf1_in_a_session():
    v1 = tf.compat.v1
    rank = hvd().rank()
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None])
        total, gathered = hvd().allreduce(x, op=hvd().Sum), hvd().allgather(x)
        gradient = tf.gradients(total, x)[0]
        weight = v1.get_variable("weight", initializer=tf.fill([2], float(rank)))
        broadcast = hvd().broadcast_global_variables(2)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            a, b, c = session.run([total, gathered, gradient], {x: [float(rank)]})
            assert (a.tolist(), b.tolist(), c.tolist()) == ([3.0], [0.0, 1.0, 2.0], [3.0])
        session.run(broadcast)
        assert session.run(weight).tolist() == [2.0, 2.0]
        assert hvd().broadcast_object({"rank": rank}, 1, session=session) == {"rank": 1}
        send = hvd().broadcast_object_fn(2, session=session)
        assert send(rank) == 2 and send([rank] * 100) == [2] * 100
        assert hvd().allgather_object(rank, session=session) == [0, 1, 2]
        raises(
            tf.errors.FailedPreconditionError,
            lambda: session.run(hvd().allreduce(tf.ones([2 + rank]), name="bad")),
            "ranks disagree",
        )

    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=tf.fill([2], float(rank)))
        hook = hvd().BroadcastGlobalVariablesHook(1)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            assert session.run(weight).tolist() == [1.0, 1.0]


def check_objects():
    rank = hvd().rank()
    assert hvd().broadcast_object({"rank": rank}, 2) == {"rank": 2}
    assert hvd().broadcast_object(None if rank else [1, 2]) == [1, 2]
    assert hvd().allgather_object("x" * rank) == ["", "x", "xx"]


def check_a_cancelled_step_ends():
    """One op fails while another waits for ranks that come later."""
    rank = hvd().rank()

    @tf.function
    def step(x):
        late = hvd().allreduce(x, name="late")
        if rank == 0:
            x = tf.numpy_function(lambda value: (time.sleep(0.3), value)[1], [x], tf.float32)
            tf.debugging.assert_less(x, 0.0, message="on purpose")
        return late

    if rank == 0:
        raises(tf.errors.InvalidArgumentError, lambda: step(tf.constant(1.0)), "on purpose")
    hvd().barrier()
    if rank != 0:
        # Rank 0 has left its share behind.
        assert step(tf.constant(1.0)).numpy() == 1.0
    assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum).numpy() == 3.0


def check_join_with_uneven_data():
    rank = hvd().rank()
    step = tf.function(lambda x: hvd().allreduce(x, op=hvd().Sum))
    for i in range(3 + rank):
        there = hvd().size() if i < 3 else hvd().size() - (i - 2)
        assert step(tf.constant(1.0)).numpy() == float(there), i
    assert int(hvd().join()) == 2
    assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum).numpy() == 3.0


def check_unnamed_calls_on_a_process_set_after_an_uneven_join():
    pair = hvd().add_process_set([0, 1])
    for active in [2, 1][: hvd().rank() + 1] if pair.included() else []:
        total = hvd().allreduce(tf.constant(1.0), op=hvd().Sum, process_set=pair)
        assert total.numpy() == active  # rank 0 has joined after the first
    hvd().join()
    if pair.included():
        for _ in range(2):
            assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum, process_set=pair).numpy() == 2.0
    hvd().remove_process_set(pair)


def check_xla_is_refused_in_one_sentence():
    step = tf.function(lambda x: hvd().allreduce(x), jit_compile=True)
    raises(ValueError, lambda: step(tf.constant(1.0)), "cannot be compiled by XLA")


def check_timeline():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd().start_timeline(path)
        tf.function(lambda: hvd().allreduce(tf.ones(3), name="traced"))()
        hvd().stop_timeline()
        events = json.loads(Path(path).read_text())
        assert any("ALLREDUCE" in event.get("name", "") for event in events)
        assert "traced" in json.dumps(events)


def check_init_after_an_error_of_a_peer_needs_no_shutdown():
    if hvd().rank() == 0:
        hvd().shutdown()  # as a rank does that has caught an error of its own
    else:
        raises(tf.errors.UnknownError, lambda: hvd().allreduce(tf.ones(1)), "rank 0 has shut down")
    hvd().init()
    assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum).numpy() == 3.0


def check_init_and_shutdown_again():
    for _ in range(3):
        hvd().shutdown()
        raises(tf.errors.InvalidArgumentError, lambda: hvd().allreduce(tf.ones(1)), "call init() first")
        hvd().init()
        assert hvd().allreduce(tf.constant(1.0), op=hvd().Sum).numpy() == 3.0
