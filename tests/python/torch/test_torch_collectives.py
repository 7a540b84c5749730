"""Every collective of dad.torch, on several ranks."""

import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import dad
from util import check_names, hvd, joined, launched_once

try:
    import torch
except ImportError:
    torch = None

NUM_RANKS = 3

HERE = Path(__file__).parent
CHECKS = joined(__file__, str(HERE / "observe_checks.py"))
results = launched_once(CHECKS, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


def tensor_of(dtype, *shape):
    """Small whole numbers that differ by rank, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 5 + hvd().rank()) % 7).reshape(shape).to(getattr(torch, dtype))


def of_all_ranks(make):
    """make(rank) for all ranks, computed here."""
    return [make(rank) for rank in range(hvd().size())]


def rank_tensor(dtype, rank, *shape):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 5 + rank) % 7).reshape(shape).to(getattr(torch, dtype))


def of_all_ranks_stacked(dtype, *shape):
    return torch.stack(of_all_ranks(lambda r: rank_tensor(dtype, r, *shape).double()))


def raises(kind, function, *words):
    with pytest.raises(kind) as error:
        function()
    for word in words:
        assert word in str(error.value), str(error.value)


def check_allreduce_of_all_dtypes_and_dimensions():
    for dtype in FLOATS + INTEGERS:
        for shape in [(), (1,), (17,), (3, 4, 5), (0,), (2, 0, 3)]:
            mine = tensor_of(dtype, *shape)
            everyone = of_all_ranks_stacked(dtype, *shape)
            total = hvd().allreduce(mine, op=hvd().Sum)
            assert total.dtype == mine.dtype and total.shape == mine.shape
            assert torch.equal(total.double(), everyone.sum(0)), (dtype, shape)
            assert torch.equal(hvd().allreduce(mine, op=hvd().Max).double(), everyone.amax(0))
            assert torch.equal(hvd().allreduce(mine, op=hvd().Min).double(), everyone.amin(0))
            assert torch.equal(mine, tensor_of(dtype, *shape)), "the input was modified"


def check_average_and_product():
    for dtype in FLOATS:
        mean = hvd().allreduce(tensor_of(dtype, 6))
        expected = of_all_ranks_stacked(dtype, 6).mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-2, atol=1e-2)
    same = torch.full((4,), 7, dtype=torch.int32)
    assert torch.equal(hvd().allreduce(same), same)
    product = hvd().allreduce(torch.full((3,), float(hvd().rank() + 1)), op=hvd().Product)
    assert product.tolist() == [6.0] * 3


def check_bool():
    mine = torch.tensor([hvd().rank() == 0, True, False])
    assert hvd().allreduce(mine, op=hvd().Max).tolist() == [True, True, False]
    assert hvd().allreduce(mine, op=hvd().Min).tolist() == [False, True, False]
    assert hvd().allgather(mine).shape == (9,)
    assert hvd().broadcast(mine, 1).tolist() == [False, True, False]


def check_scaling():
    x = torch.full((5,), float(hvd().rank() + 1))
    total = hvd().allreduce(x, op=hvd().Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert total.tolist() == [12.0] * 5
    mean = hvd().allreduce(x, op=hvd().Average, prescale_factor=2.0)
    assert mean.tolist() == [4.0] * 5


def check_in_place_and_async():
    x = torch.full((1000,), float(hvd().rank()))
    assert hvd().allreduce_(x, op=hvd().Sum) is x
    assert x.tolist() == [3.0] * 1000
    tensors = [torch.full((i + 1,), float(hvd().rank() * i)) for i in range(50)]
    handles = [hvd().allreduce_async_(t, name=f"async.{i}") for i, t in enumerate(tensors)]
    for i in reversed(range(50)):
        out = hvd().synchronize(handles[i])
        assert out is tensors[i] and out.tolist() == [float(i)] * (i + 1)


def check_ranks_may_submit_in_different_orders():
    order = list(range(20))
    if hvd().rank() == 1:
        order.reverse()
    for _ in range(4):
        handles = {
            i: hvd().allreduce_async(torch.full((3,), float(i)), name=f"order.{i}", op=hvd().Sum)
            for i in order
        }
        for i, handle in handles.items():
            assert hvd().synchronize(handle).tolist() == [3.0 * i] * 3


def check_tensors_that_are_not_contiguous():
    base = torch.arange(12.0).reshape(3, 4) + hvd().rank()
    expected = (torch.arange(12.0).reshape(3, 4) + 1).t()
    assert torch.equal(hvd().allreduce(base.t()), expected)
    view = base.t()
    assert hvd().allreduce_(view) is view
    assert torch.equal(base, expected.t()), "the result belongs where the view points"
    image = torch.full((2, 3, 4, 4), float(hvd().rank())).to(memory_format=torch.channels_last)
    hvd().allreduce_(image)
    assert torch.equal(image, torch.ones(2, 3, 4, 4))
    gathered = hvd().allgather(torch.arange(6).reshape(2, 3).t())
    assert torch.equal(gathered, torch.arange(6).reshape(2, 3).t().repeat(3, 1))


def check_grouped_allreduce():
    tensors = [torch.full((i + 1,), float(hvd().rank()), dtype=torch.float64) for i in range(5)]
    for out in (
        hvd().grouped_allreduce(tensors),
        hvd().synchronize(hvd().grouped_allreduce_async(tensors, name="group")),
    ):
        assert [o.tolist() for o in out] == [[1.0] * (i + 1) for i in range(5)]
    outs = hvd().grouped_allreduce_(tensors, op=hvd().Sum)
    assert all(a is b for a, b in zip(outs, tensors, strict=True))
    assert tensors[4].tolist() == [3.0] * 5
    mixed = hvd().grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.int64)], op=hvd().Sum)
    assert [m.dtype for m in mixed] == [torch.float32, torch.int64]
    raises(ValueError, lambda: hvd().grouped_allreduce([]), "at least one")


def check_allgather_with_unequal_rows():
    for dtype in FLOATS + INTEGERS + ["bool"]:
        for rows in [lambda r: 2, lambda r: r, lambda r: 3 - r]:
            mine = torch.full((rows(hvd().rank()), 2), hvd().rank()).to(getattr(torch, dtype))
            everyone = hvd().allgather(mine)
            expected = torch.cat(of_all_ranks(lambda r, rows=rows: torch.full((rows(r), 2), r)))
            assert torch.equal(everyone, expected.to(mine.dtype)), dtype
    a, b = hvd().grouped_allgather([torch.ones(1), torch.full((hvd().rank(), 2), 5)])
    assert a.shape == (3,) and b.shape == (3, 2)
    a, b = hvd().synchronize(hvd().grouped_allgather_async([torch.ones(1), torch.ones(2)]))
    assert a.shape == (3,) and b.shape == (6,)


def check_broadcast():
    for dtype in FLOATS + INTEGERS + ["bool"]:
        for root in range(hvd().size()):
            mine = tensor_of(dtype, 4, 3)
            out = hvd().broadcast(mine, root)
            assert torch.equal(out, rank_tensor(dtype, root, 4, 3))
            assert torch.equal(mine, tensor_of(dtype, 4, 3))
            assert hvd().broadcast_(mine, root, name=f"b.{dtype}") is mine and torch.equal(mine, out)
    out = hvd().synchronize(hvd().broadcast_async(torch.full((2,), hvd().rank()), 2))
    assert out.tolist() == [2, 2]


def check_alltoall():
    rank, size = hvd().rank(), hvd().size()
    even = hvd().alltoall(torch.arange(size * 2) + 100 * rank)
    assert even.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    splits = torch.tensor([rank, 1, 2], dtype=torch.int32)
    x = torch.arange(rank + 3).float().unsqueeze(1).repeat(1, 2) + 10 * rank
    out, received = hvd().alltoall(x, splits)
    assert received.tolist() == [0, 1, 2] if rank == 0 else [rank, rank, rank]
    assert out.shape == (int(received.sum()), 2)
    out2, received2 = hvd().synchronize(hvd().alltoall_async(x, splits.tolist(), name="a2a"))
    assert torch.equal(out, out2) and torch.equal(received, received2)
    raises(ValueError, lambda: hvd().alltoall(x, torch.tensor([1, 1, 100])), "add up")
    raises(ValueError, lambda: hvd().alltoall(x, torch.tensor([1, 1])), "[2]")
    raises(ValueError, lambda: hvd().alltoall(torch.ones(4)), "evenly")


def check_reducescatter_gives_the_remainder_to_the_lowest_ranks():
    rank = hvd().rank()
    x = torch.arange(7.0).unsqueeze(1) * (rank + 1)
    mine = hvd().reducescatter(x)
    first, rows = [(0, 3), (3, 2), (5, 2)][rank]
    assert torch.equal(mine, torch.arange(7.0).unsqueeze(1)[first : first + rows] * 2)
    total = hvd().synchronize(hvd().reducescatter_async(x, op=hvd().Sum, prescale_factor=0.5))
    assert torch.equal(total, torch.arange(7.0).unsqueeze(1)[first : first + rows] * 3)
    a, b = hvd().grouped_reducescatter([torch.ones(3), torch.ones(6, 2)], op=hvd().Sum)
    assert a.tolist() == [3.0] and b.tolist() == [[3.0, 3.0]] * 2
    for scatter in (hvd().reducescatter, hvd().reducescatter_async):
        raises(RuntimeError, lambda scatter=scatter: scatter(x, op=hvd().Adasum), "Adasum")


def check_sparse_allreduce():
    rank = hvd().rank()
    mine = torch.sparse_coo_tensor([[0, rank, 0]], torch.tensor([[1.0, 1.0]] * 3), (4, 2))
    total = hvd().synchronize(hvd().sparse_allreduce_async(mine, name="sparse", op=hvd().Sum))
    expected = torch.tensor([[7.0, 7.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert total.is_coalesced() and torch.equal(total.to_dense(), expected)
    mean = hvd().sparse_allreduce_async(mine, name="sparse", op=hvd().Average)()
    torch.testing.assert_close(mean.to_dense(), expected / 3)


def check_compression_casts_and_casts_back():
    for compression in (hvd().Compression.fp16, hvd().Compression.bf16(), hvd().Compression.none):
        x = torch.full((8,), float(hvd().rank()))
        out = hvd().allreduce(x, compression=compression)
        assert out.dtype == torch.float32 and out.tolist() == [1.0] * 8
        whole = hvd().allreduce(torch.full((8,), 3), compression=compression)
        assert whole.dtype == torch.int64 and whole.tolist() == [3] * 8
    out = hvd().reducescatter(torch.ones(3), compression=hvd().Compression.fp16)
    assert out.tolist() == [1.0] and out.dtype == torch.float32


def check_gradients_of_all_collectives():
    rank, size = hvd().rank(), hvd().size()
    scale = float(rank + 1)

    x = torch.ones(3, 2, requires_grad=True)
    (hvd().allreduce(x, op=hvd().Sum) * scale).sum().backward()
    assert x.grad.tolist() == [[6.0] * 2] * 3
    x = torch.ones(3, requires_grad=True)
    (hvd().allreduce(x, op=hvd().Average, prescale_factor=2.0) * scale).sum().backward()
    assert x.grad.tolist() == [4.0] * 3

    x = torch.ones(rank + 1, 2, requires_grad=True)
    out = hvd().allgather(x)
    weights = torch.arange(6.0).unsqueeze(1)
    (out * weights * scale).sum().backward()
    first = [0, 1, 3][rank]
    torch.testing.assert_close(x.grad, (weights[first : first + rank + 1] * 2).expand(-1, 2))

    x = torch.ones(4, requires_grad=True)
    (hvd().broadcast(x, 1) * scale).sum().backward()
    assert x.grad.tolist() == [2.0 if rank == 1 else 0.0] * 4

    x = torch.ones(6, requires_grad=True)
    out, _ = hvd().alltoall(x, torch.tensor([1, 2, 3]))
    (out * scale).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]

    for op, factor in ((hvd().Average, 1.0), (hvd().Sum, float(size))):
        x = torch.ones(5, requires_grad=True)
        (hvd().reducescatter(x, op=op) * scale).sum().backward()
        assert x.grad.tolist() == [factor * s for s in (1.0, 1.0, 2.0, 2.0, 3.0)]

    tensors = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    a, b = hvd().grouped_allreduce(tensors, op=hvd().Sum)
    (a.sum() * scale + b.sum()).backward()
    assert tensors[0].grad.tolist() == [6.0] * 2 and tensors[1].grad.tolist() == [3.0] * 3
    x = torch.ones(2, requires_grad=True)
    raises(ValueError, lambda: hvd().allreduce(x, op=hvd().Max).sum().backward(), "gradient")


def check_disagreement_is_an_error_on_every_rank_and_the_next_collective_works():
    rank = hvd().rank()
    cases = [
        lambda: hvd().allreduce(torch.ones(3 + (rank == 1)), name="shape"),
        lambda: hvd().allreduce(torch.ones(3).double() if rank == 1 else torch.ones(3), name="dtype"),
        lambda: hvd().allreduce(torch.ones(3), name="op", op=hvd().Sum if rank == 1 else hvd().Max),
        lambda: hvd().broadcast(torch.ones(3), root_rank=int(rank == 1), name="root"),
        lambda: hvd().allgather(torch.ones(2, 3 + (rank == 1)), name="columns"),
        lambda: hvd().synchronize(hvd().allreduce_async(torch.ones(2 + rank), name="async")),
    ]
    for number, case in enumerate(cases):
        for _ in range(2):
            with pytest.raises(hvd().HorovodInternalError) as error:
                case()
            assert isinstance(error.value, hvd().MismatchError), number
            assert "1" in str(error.value)
        assert hvd().allreduce(torch.ones(2), op=hvd().Sum).tolist() == [3.0, 3.0]


def check_errors_in_backward_keep_their_type():
    x = torch.ones(2, requires_grad=True)
    out = hvd().allreduce(x, op=hvd().Sum)
    if hvd().rank() == 1:
        out = out[:1]
    y = out.sum()
    y.backward()
    assert x.grad is not None
    rank = hvd().rank()
    leaf = torch.ones(2 + rank, requires_grad=True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return hvd().allreduce(grad, name="in_backward")

    raises(hvd().HorovodInternalError, lambda: Fails.apply(leaf).sum().backward(), "in_backward")


def check_local_misuse_is_a_value_error_before_anything_is_sent():
    x = torch.ones(2)
    raises(ValueError, lambda: hvd().allreduce(x, average=True, op=hvd().Sum), "op")
    complex = torch.ones(2, dtype=torch.complex64)
    raises(ValueError, lambda: hvd().allreduce(complex, name="wave"), '"wave"', "ComplexFloat", "float32")
    raises(ValueError, lambda: hvd().allreduce(x, op=17), "op=17")
    raises(ValueError, lambda: hvd().allreduce(x.to_sparse()), "sparse")
    raises(ValueError, lambda: hvd().allreduce(x, process_set=hvd().ProcessSet([0])), "init")
    raises(ValueError, lambda: hvd().allreduce(x, compression=object()), "compress")
    raises(ValueError, lambda: hvd().allreduce(x, compression=hvd().Compression.rank_dad), "rank_dad")
    raises(ValueError, lambda: hvd().broadcast(x, root_rank=99), "99")
    for call in (hvd().allreduce, hvd().allreduce_async, hvd().allgather, hvd().alltoall):
        raises(ValueError, lambda call=call: call([1.0, 2.0]), "torch.Tensor", "list")
    raises(ValueError, lambda: hvd().broadcast(x.numpy(), root_rank=0), "torch.Tensor", "ndarray")
    handle = hvd().allreduce_async(x, name="once")
    hvd().synchronize(handle)
    raises(ValueError, lambda: hvd().synchronize(handle), "handle")
    raises(ValueError, lambda: hvd().poll(handle), "handle")
    with pytest.warns(DeprecationWarning):
        assert hvd().allreduce(x, average=False).tolist() == [3.0, 3.0]


def check_what_casts_save_is_counted():
    for compression, saved in ((hvd().Compression.none, 1), (hvd().Compression.fp16, 2)):
        dad.reset_stats()
        hvd().allreduce(torch.ones(3000), compression=compression)
        stats = dad.stats()
        assert stats["dense_bytes"] == 2 * 2 * 3000 * 4 // 3, stats
        assert 0.9 * saved < stats["ratio"] < 1.1 * saved, stats


def check_a_name_twice_in_flight_is_an_error():
    starts = {
        "allreduce": lambda: hvd().allreduce_async(torch.ones(2), name="twice", op=hvd().Sum),
        "allgather": lambda: hvd().allgather_async(torch.ones(2), name="twice"),
        "broadcast": lambda: hvd().broadcast_async(torch.ones(2), 0, name="twice"),
        "alltoall": lambda: hvd().alltoall_async(torch.ones(3), name="twice"),
        "grouped": lambda: hvd().grouped_allreduce_async([torch.ones(2)], name="twice"),
    }
    for start in starts.values():
        # Rank 0 waits for the others, who wait for it to have tried.
        first = start() if hvd().rank() == 0 else None
        if first is not None:
            raises(ValueError, start, "twice")
        hvd().barrier()
        first = start() if first is None else first
        hvd().synchronize(first)
        # Done, it may come again, also if nobody has asked for the result.
        second = start()
        while not hvd().poll(second):
            pass
        hvd().synchronize(start())


def check_collectives_of_different_kinds_may_share_a_name():
    for _ in range(4):
        total = hvd().allreduce_async(torch.ones(2), name="shared", op=hvd().Sum)
        rows = hvd().allgather_async(torch.ones(1), name="shared")
        sent = hvd().broadcast_async(torch.full((1,), hvd().rank()), 1, name="shared")
        assert hvd().synchronize(sent).tolist() == [1]
        assert hvd().synchronize(rows).tolist() == [1.0] * hvd().size()
        assert hvd().synchronize(total).tolist() == [float(hvd().size())] * 2


def check_poll():
    handle = hvd().allreduce_async(torch.ones(4), name="polled")
    while not hvd().poll(handle):
        pass
    assert hvd().synchronize(handle).tolist() == [1.0] * 4


def check_a_result_that_nobody_waits_for_any_more_has_memory_to_go_to():
    """Ctrl-C ends a wait; what was started goes on, and the others count on it."""
    large = torch.ones(10_000_000)  # memory that is given back to the system when it is freed
    if hvd().rank() == 0:
        handle = hvd().allreduce_async(large, name="interrupted")
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
        timer.start()
        raises(KeyboardInterrupt, lambda: hvd().synchronize(handle))
        hvd().barrier()
    else:
        hvd().barrier()
        assert hvd().allreduce(large, name="interrupted")[-1] == 1.0
    assert hvd().allreduce(torch.ones(1)).item() == 1.0


def check_synchronize_gives_up_after_its_timeout_and_the_handle_lives_on():
    mine = torch.ones(2).to_sparse()
    if hvd().rank() == 0:
        handle = hvd().grouped_allreduce_async([torch.ones(2)], name="late", op=hvd().Sum)
        sparse = hvd().sparse_allreduce_async(mine, name="late rows", op=hvd().Sum)
        for timeout in (0, 0.05, 0.05):
            raises(
                TimeoutError, lambda t=timeout: hvd().synchronize(handle, timeout=t), '"late"', f"{timeout} s"
            )
        raises(TimeoutError, lambda: hvd().synchronize(sparse, timeout=0.05), '"late rows.indices"')
        assert not hvd().poll(handle)
        raises(ValueError, lambda: hvd().synchronize(handle, timeout=-1), "timeout=-1")
        hvd().barrier()
    else:
        hvd().barrier()  # rank 0 has given up by now
        handle = hvd().grouped_allreduce_async([torch.ones(2)], name="late", op=hvd().Sum)
        sparse = hvd().sparse_allreduce_async(mine, name="late rows", op=hvd().Sum)
    assert hvd().synchronize(handle, timeout=60)[0].tolist() == [3.0, 3.0]
    assert hvd().synchronize(sparse, timeout=60).to_dense().tolist() == [3.0, 3.0]
    raises(ValueError, lambda: hvd().synchronize(handle), "synchronized already")
    raises(ValueError, lambda: hvd().synchronize(sparse), "synchronized already")


def check_process_sets():
    rank = hvd().rank()
    pair = hvd().add_process_set([0, 2])
    assert pair.size() == 2 and pair.included() == (rank != 1)
    raises(ValueError, lambda: hvd().add_process_set([2, 0]), "already")
    for _ in range(5):
        if pair.included():
            assert pair.rank() == [0, None, 1][rank]
            out = hvd().allreduce(torch.full((2,), float(rank)), process_set=pair, op=hvd().Sum)
            assert out.tolist() == [2.0, 2.0]
            assert hvd().allgather(torch.tensor([rank]), process_set=pair).tolist() == [0, 2]
            assert hvd().broadcast(torch.tensor([rank]), 2, process_set=pair).tolist() == [2]
            assert hvd().reducescatter(torch.ones(3), process_set=pair).shape == (2 - pair.rank(),)
            hvd().barrier(process_set=pair)
        assert hvd().allreduce(torch.ones(1), op=hvd().Sum).tolist() == [3.0]
    if rank == 1:
        raises(ValueError, lambda: hvd().allreduce(torch.ones(1), process_set=pair))
    number = pair.process_set_id
    assert str(pair) == f"ProcessSet(process_set_id={number}, ranks=[0, 2], mpi_comm=None)"
    by_number = hvd().mpi_ops._basics._get_process_set_ids_and_ranks()
    assert by_number == {0: [0, 1, 2], number: [0, 2]}
    unknown = hvd().ProcessSet([0])
    unknown.process_set_id = 10
    raises(ValueError, lambda: hvd().allreduce(torch.ones(1), process_set=unknown), "process_set_id=10")
    assert hvd().remove_process_set(pair) is True
    assert pair.process_set_id is None and hvd().remove_process_set(hvd().global_process_set) is False


def check_join():
    rank = hvd().rank()
    for step in range(rank + 1):
        active = hvd().size() - step
        assert hvd().allreduce(torch.ones(3), op=hvd().Sum).tolist() == [active] * 3
        assert hvd().allgather(torch.ones(1, 2)).shape[0] == active
    last = hvd().join()
    assert hvd().allgather(torch.tensor([last])).tolist() == [last] * 3
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum).tolist() == [3.0]


def check_join_waits_for_all_ranks_where_a_process_set_is_complete():
    sets = [hvd().add_process_set([0, 1]), hvd().add_process_set([0])]
    for _ in range(3):
        if hvd().rank() == 2:
            for _ in range(3):
                assert hvd().allreduce(torch.ones(2), name="alone", op=hvd().Sum).tolist() == [1.0, 1.0]
        assert hvd().join() == 2
        for process_set in sets:
            if process_set.included():
                total = hvd().allreduce(torch.ones(1), op=hvd().Sum, process_set=process_set)
                assert total.item() == process_set.size()
    for process_set in sets:
        hvd().remove_process_set(process_set)


def check_unnamed_calls_on_a_process_set_after_an_uneven_join():
    pair = hvd().add_process_set([0, 1])
    for active in [2, 1][: hvd().rank() + 1] if pair.included() else []:
        total = hvd().allreduce(torch.ones(1), op=hvd().Sum, process_set=pair)
        assert total.item() == active  # rank 0 has joined after the first
    hvd().join()
    if pair.included():
        for _ in range(2):
            assert hvd().allreduce(torch.ones(1), op=hvd().Sum, process_set=pair).item() == 2
    hvd().remove_process_set(pair)


def check_barrier():
    folder = Path(hvd().broadcast_object(tempfile.mkdtemp() if hvd().rank() == 0 else None))
    others = [folder / str(rank) for rank in range(1, hvd().size())]
    if hvd().rank() == 0:
        # The others are in the barrier, or about to enter it, before this rank has written its file.
        while not all(path.exists() for path in others):
            time.sleep(0.001)
    (folder / str(hvd().rank())).touch()
    hvd().barrier()
    assert (folder / "0").exists()
    hvd().barrier()
    if hvd().rank() == 0:
        shutil.rmtree(folder)


def check_objects():
    rank = hvd().rank()
    thing = {"rank": rank, "list": [1, "two", None], "f": lambda x: x + rank}
    got = hvd().broadcast_object(thing if rank == 1 else None, root_rank=1)
    assert got["rank"] == 1 and got["f"](1) == 2
    everyone = hvd().allgather_object(["x"] * rank)
    assert everyone == [[], ["x"], ["x", "x"]]


def check_broadcast_parameters():
    torch.manual_seed(hvd().rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    raises(hvd().ReplicaError, lambda: hvd().check_replicas(model), '"0.weight"', "rank 1")
    hvd().broadcast_parameters(model.state_dict(), root_rank=2)
    hvd().check_replicas(model)
    torch.manual_seed(2)
    expected = torch.nn.Linear(3, 4)
    assert torch.equal(model[0].weight, expected.weight)
    hvd().broadcast_parameters(list(model.named_parameters()), root_rank=0)
    hvd().broadcast_parameters(model.parameters(), root_rank=0)
    raises(ValueError, lambda: hvd().broadcast_parameters(5, 0))
    raises(ValueError, lambda: hvd().broadcast_parameters({"a": "text"}, 0), "'a'")


def check_average_batch_norm():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.InstanceNorm1d(4))
    generator = np.random.default_rng(5)
    means = generator.normal(100.0, 1.0, size=(hvd().size(), 4))
    variances = generator.uniform(0.5, 2.0, size=(hvd().size(), 4))
    model[1].running_mean.copy_(torch.from_numpy(means[hvd().rank()]))
    model[1].running_var.copy_(torch.from_numpy(variances[hvd().rank()]))
    for _ in range(2):  # again nothing changes
        hvd().average_batch_norm(model)
        torch.testing.assert_close(model[1].running_mean, torch.from_numpy(means.mean(0)).float())
        expected = torch.from_numpy(variances.mean(0) + means.var(0)).float()
        torch.testing.assert_close(model[1].running_var, expected)
        everyone = hvd().allgather_object([model[1].running_mean, model[1].running_var])
        assert all(torch.equal(a, b) for other in everyone for a, b in zip(other, everyone[0], strict=True))
    hvd().average_batch_norm(torch.nn.Linear(2, 2))
    other = torch.nn.Sequential(torch.nn.BatchNorm1d(4 + (hvd().rank() == 1)))
    message = ('"0" has 4 channels on rank 0, 5 channels on rank 1', "same model")
    raises(hvd().MismatchError, lambda: hvd().average_batch_norm(other), *message)


def check_autograd_sees_writes_in_place():
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    hvd().broadcast_(weight, 0)
    raises(RuntimeError, loss.backward, "modified by an inplace operation")


def check_what_one_rank_is_refused_takes_no_number():
    # Calls without a name are told apart by their number, which has to be the same on all ranks.
    ones = torch.ones(6)
    if hvd().rank() == 0:
        for wrong in (
            lambda: hvd().broadcast(ones, 99),
            lambda: hvd().allreduce(ones.int(), op=hvd().Adasum),
            lambda: hvd().grouped_allreduce([ones.int(), ones.int()], op=hvd().Adasum),
            lambda: hvd().reducescatter(torch.tensor(1.0)),
            lambda: hvd().add_process_set([0, 99]),
            lambda: hvd().allreduce_(torch.ones(1, 4).expand(3, 4)),
            lambda: hvd().broadcast_(torch.ones(1, 4).expand(3, 4), 0),
        ):
            raises(ValueError, wrong)
    hvd().broadcast(ones, 0)
    hvd().allreduce(ones)
    hvd().grouped_allreduce([ones, ones])
    hvd().reducescatter(ones)
    hvd().remove_process_set(hvd().add_process_set([1]))
