"""The ops under torch.compile, and compiled models under DistributedOptimizer."""

import pytest

from util import check_names, hvd, launch, needs_torch

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

NUM_RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    needs_torch()
    # One cache for all ranks, as on a real machine: what one rank compiles another may load.
    cache = tmp_path_factory.mktemp("inductor")
    return launch(__file__, NUM_RANKS, timeout=280, TORCHINDUCTOR_CACHE_DIR=str(cache))


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def check_the_ops_pass_opcheck():
    ops = torch.ops.dad
    x = torch.ones(4, 2, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    reduction = ("", hvd().Sum, 1.0, 1.0, 0)
    torch.library.opcheck(ops.allreduce.default, ([x, y], *reduction, [32, 12]))
    torch.library.opcheck(ops.reducescatter.default, ([x], *reduction))
    torch.library.opcheck(ops.broadcast.default, (x, 0, "", 0))
    torch.library.opcheck(ops.allgather.default, ([x], "", 0))
    torch.library.opcheck(ops.alltoall.default, (x, torch.tensor([1, 3]), "", 0))


def check_collectives_stay_in_the_graph():
    def function(x):
        mean = hvd().allreduce(x * 2, op=hvd().Average)
        root = hvd().broadcast(mean + 1, 0)
        part = hvd().reducescatter(root, op=hvd().Sum)
        return part.square().sum() + hvd().grouped_allreduce([x, x + 1])[1].sum()

    x = torch.arange(6.0) + hvd().rank()
    eager = x.clone().requires_grad_()
    function(eager).backward()
    for backend in ("aot_eager", "inductor"):
        mine = x.clone().requires_grad_()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            mine.grad = None
            out = compiled(mine)
            out.backward()
            torch.testing.assert_close(out, function(x))
            torch.testing.assert_close(mine.grad, eager.grad)


def check_allgather_and_alltoall_stay_in_the_graph():
    def function(x):
        rows = hvd().allgather(x)
        back = hvd().alltoall(x)
        return rows.square().sum() + back.sum()

    x = torch.arange(4.0).unsqueeze(1) + hvd().rank()
    eager = x.clone().requires_grad_()
    function(eager).backward()
    for backend in ("aot_eager", "inductor"):
        mine = x.clone().requires_grad_()
        torch.compile(function, backend=backend, fullgraph=True)(mine).backward()
        torch.testing.assert_close(mine.grad, eager.grad)


def check_a_collective_whose_result_this_rank_drops_still_happens():
    def function(x):
        mean = hvd().allreduce(x, op=hvd().Sum)
        return mean + 1 if hvd().rank() == 0 else x

    for backend in ("aot_eager", "inductor"):
        out = torch.compile(function, backend=backend)(torch.ones(3))
        assert out.tolist() == ([3.0] * 3 if hvd().rank() == 0 else [1.0] * 3)


def check_errors_keep_their_type():
    rank = hvd().rank()
    compiled = torch.compile(lambda x: hvd().allreduce(x, name="bad"), backend="aot_eager", fullgraph=True)
    with pytest.raises(hvd().HorovodInternalError):
        compiled(torch.ones(2 + rank))
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum).item() == 2


def check_compiled_models():
    for backend in ("aot_eager", "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        twin.load_state_dict(model.state_dict())
        compiled = torch.compile(model, backend=backend)
        a = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        b = hvd().DistributedOptimizer(torch.optim.SGD(twin.parameters(), lr=0.1))
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(hvd().rank()))
        for _ in range(3):
            for net, optimizer in ((compiled, a), (twin, b)):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        hvd().check_replicas(model)


def check_compiled_models_with_factor_methods():
    """Rows are kept by the compiled graph; chains are not seen there."""
    for backend, method in (("aot_eager", "dad"), ("aot_eager", "edad"), ("inductor", "dad")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 40))
        twin = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 40))
        twin.load_state_dict(model.state_dict())
        a = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=method
        )
        compiled = torch.compile(model, backend=backend)
        b = hvd().DistributedOptimizer(torch.optim.SGD(twin.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(hvd().rank())
        for _ in range(4):
            x = torch.randn(3, 48, generator=generator)
            for net, optimizer in ((compiled, a), (twin, b)):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
        assert {row["method"] for row in a.plan()} == {"dad"}, a.plan()
        hvd().check_replicas(model)


def check_a_compiled_model_with_residuals():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 40))
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression="rank_dad:rank=2"
    )
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (3, 3, 60, 60, 3):  # as rows, and formed
        optimizer.zero_grad()
        compiled(torch.randn(rows, 48) + hvd().rank()).square().sum().backward()
        optimizer.step()
        hvd().check_replicas(model)
    assert {row["method"] for row in optimizer.plan()} == {"rank_dad"}
