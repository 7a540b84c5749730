"""HOROVOD_HIERARCHICAL_ALLREDUCE: four ranks that believe they are on two hosts."""

import os

import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

results = launched_once(__file__, 4, HOROVOD_HIERARCHICAL_ALLREDUCE="1")

if "HOROVOD_RANK" in os.environ:
    os.environ["DAD_HOSTNAME"] = "left" if int(os.environ["HOROVOD_RANK"]) < 2 else "right"


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


def check_sums_are_those_of_all_ranks():
    rank = hvd().rank()
    for step in range(4):
        x = torch.arange(70_000, dtype=torch.float64) + rank
        mean = hvd().allreduce(x, name="mean")
        assert torch.equal(mean, torch.arange(70_000, dtype=torch.float64) + 1.5), step
        parts = [torch.full((n,), rank, dtype=torch.int32) for n in (1, 5)]
        sums = hvd().grouped_allreduce(parts, name="parts", op=hvd().Sum)
        assert [s.tolist() for s in sums] == [[6], [6] * 5]
        assert hvd().allreduce(torch.tensor([rank]), name="max", op=hvd().Max).item() == 3


def check_fewer_bytes_leave_a_host():
    hvd().reset_stats()
    x = torch.ones(100_000)
    for _ in range(3):
        hvd().allreduce_(x, name="bytes")
    (sent,) = [t["wire_bytes_sent"] for n, t in hvd().stats()["tensors"].items() if n.endswith("bytes")]
    # In all: a sum among two, among two leaders and back again; flat 1.5 tensors per rank and step.
    leads = hvd().rank() % 2 == 0
    assert 3 * 400_000 * (2.9 if leads else 0.9) < sent < 3 * 400_000 * (3.2 if leads else 1.2), sent


def check_training_by_every_method_keeps_replicas_equal():
    for method in ("none", "fp16", "dad", "rank_dad:rank=2", "int8", "vgc:alpha=0.5", "auto"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=method
        )
        torch.manual_seed(hvd().rank())
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            all_of_it = hvd().allgather(parameter.detach()[None], name=f"{method}.{name}")
            assert torch.equal(all_of_it, all_of_it[:1].expand_as(all_of_it)), (method, name)


def check_bad_input_is_an_error_on_all_hosts():
    with pytest.raises(hvd().HorovodInternalError, match="shape"):
        hvd().allreduce(torch.ones(2 if hvd().rank() == 1 else 3), name="shapes")
    assert hvd().allreduce(torch.ones(2), name="shapes", op=hvd().Sum).tolist() == [4.0, 4.0]
    for other in (hvd().Average, hvd().Max):
        op = other if hvd().rank() == 1 else hvd().Sum
        with pytest.raises(hvd().HorovodInternalError, match="ops"):
            hvd().allreduce(torch.ones(2), name="ops", op=op)
        with pytest.raises(hvd().HorovodInternalError, match="factors"):
            hvd().allreduce(torch.ones(2), name="factors", prescale_factor=1.0 + (hvd().rank() == 3))
    with pytest.raises(hvd().HorovodInternalError, match="HOROVOD_HIERARCHICAL_ALLREDUCE"):
        hvd().join()
