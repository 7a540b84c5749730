"""HOROVOD_HIERARCHICAL_ALLREDUCE: four ranks that believe they are on two hosts."""

import copy
import re

import numpy as np
import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn

    from dad.state.states import saved_shares
    from dad.torch.checkpoint import as_arrays
except ImportError:
    torch = None

results = launched_once(
    __file__, 4, HOROVOD_HIERARCHICAL_ALLREDUCE="1", DAD_TEST_HOSTS="left,left,right,right"
)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


def test_a_gradient_that_is_not_finite_is_reported_by_its_name(results):
    told = re.findall(
        r'gradient of "(\S+)" has NaN or infinities on ((?:the host of )?rank \d)', results.output
    )
    # Rank 3 within its host, whose sum rank 2 brings to the other.
    assert {one for one in told if one[0].startswith("poisoned")} == {
        ("poisoned.weight", "rank 3"),
        ("poisoned.weight", "the host of rank 2"),
    }


def check_a_gradient_that_is_not_finite_on_one_rank():
    model = nn.Linear(3, 2, bias=False)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=[("poisoned.weight", model.weight)]
    )
    for step in range(2):
        optimizer.zero_grad()
        x = torch.ones(2, 3)
        if step == 1 and hvd().rank() == 3:
            x[0, 0] = float("nan")
        model(x).sum().backward()
        optimizer.step()
    assert model.weight.isnan().any()


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


METHODS = [
    "none",
    "fp16",
    "dad",
    "edad",
    "exact",
    "rank_dad:rank=2",
    "rank_dad:rank=2,combine=owner,residual=rows",
    "rank_dad:rank=2,combine=power",
    "powersgd:rank=2",
    "int8",
    "qsgd",
    "topk:ratio=0.2",
    "chunk_topk:chunk=128,k=16",
    "strom",
    "vgc:alpha=0.5",
    "vgc_strom",
    "auto",
]


def net(dtype=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40), nn.LayerNorm(40)).to(dtype)


def distributed(model, method, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return hvd().DistributedOptimizer(optimizer, model.named_parameters(), compression=method, **options)


def train(model, optimizer, steps, seed=0):
    torch.manual_seed(100 * seed + hvd().rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()


def leads():
    return hvd().rank() % 2 == 0


def check_training_by_every_method_keeps_replicas_equal():
    for method in METHODS:
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
        hvd().check_replicas(model)
        model = net()
        train(model, distributed(model, method), 4)
        hvd().check_replicas(model)


def check_a_method_that_loses_nothing_gives_the_mean():
    for method in ("rank_dad:rank=48,wire=fp32,rest=none", "topk:ratio=1.0", "powersgd:rank=40", "dad"):
        for options in ({}, {"op": hvd().Sum}, {"weighted": True}):
            model, twin = net(torch.float64), net(torch.float64)
            optimizer = distributed(model, method, **options)
            rows = 4 if not options else 2 + hvd().rank()
            weight = rows / 14 if options.get("weighted") else 1.0 if options else 0.25
            for step in range(3):
                torch.manual_seed(10 * step + hvd().rank())
                x = torch.randn(rows, 64, dtype=torch.float64)
                for one in (model, twin):
                    one.zero_grad() if one is twin else optimizer.zero_grad()
                    one(x).sin().mean(0).sum().backward()
                optimizer.synchronize()
                for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
                    mean = hvd().allreduce(other.grad * weight, op=hvd().Sum)
                    error = (param.grad - mean).abs().max() / mean.abs().max()
                    assert error < 1e-9, (method, options, step, name, error)
                with optimizer.skip_synchronize():
                    optimizer.step()
                twin.load_state_dict(model.state_dict())


def check_a_method_goes_between_hosts():
    for method in ("rank_dad:rank=2", "int8", "topk", "vgc"):
        model = net()
        optimizer = distributed(model, method)
        hvd().reset_stats()
        train(model, optimizer, 5)
        row = optimizer.plan()[0]
        assert row["method"] == method.partition(":")[0]
        assert "between 2 hosts, after a sum inside each" in row["why"], row["why"]
        sent = hvd().stats()["tensors"]["0.weight"]["hosts_bytes_sent"]
        # Dense, which the first step of some is, a leader sends as much as the tensor has.
        assert 0 < sent < 5 * 4 * 48 * 64 / 2 if leads() else sent == 0, (method, sent)
        assert row["ratio"] > 2, row


def check_factors_of_exact_methods_go_between_all_ranks():
    model = nn.Linear(512, 400)
    optimizer = distributed(model, "dad")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 512)).square().sum().backward()
        optimizer.step()
    row = optimizer.plan()[0]
    assert row["method"] == "dad" and "between all ranks" in row["why"], row
    # Eight rows of a host go to two ranks of the other one.
    assert row["bytes"] == 2 * 2 * 2 * (512 + 400) * 4
    assert hvd().stats()["tensors"]["weight"]["hosts_bytes_sent"] == 0
    # What is more than the sum of a host would be goes as that.
    many = nn.Linear(40, 40)
    optimizer = distributed(many, "dad")
    optimizer.zero_grad()
    many(torch.randn(8, 40)).square().sum().backward()
    optimizer.step()
    row = optimizer.plan()[0]
    assert row["method"] == "dense" and "between 2 hosts" in row["why"], row


def check_what_torch_forms_for_a_device_is_what_the_core_forms():
    """On a GPU torch forms, and weighs, what a host adds up; here it does so on the CPU."""
    from dad.torch.gradient_sync import GradientSync

    in_core = GradientSync.forms_on_device
    for method in ("rank_dad:rank=2,wire=fp32", "int8", "topk:ratio=0.2", "vgc:alpha=1.2"):
        for options in ({}, {"weighted": True}):
            models = []
            for forms in (in_core, lambda sync, slot: True):
                GradientSync.forms_on_device = forms
                try:
                    torch.manual_seed(1)
                    # A bias would go another way: without rows it rides with nothing.
                    layers = nn.Linear(64, 48, bias=False), nn.ReLU(), nn.Linear(48, 40, bias=False)
                    model = nn.Sequential(*layers).double()
                    optimizer = distributed(model, method, **options)
                    for step in range(4):
                        torch.manual_seed(10 * step + hvd().rank())
                        optimizer.zero_grad()
                        x = torch.randn(1 + hvd().rank() * bool(options), 64, dtype=torch.float64)
                        model(x).square().sum(1).mean().backward()
                        optimizer.step()
                finally:
                    GradientSync.forms_on_device = in_core
                hvd().check_replicas(model)
                models.append(model)
            # Of a variance over rows nothing is left there but that over ranks, which are rows here.
            if options and method.startswith("vgc"):
                continue
            for a, b in zip(*(m.parameters() for m in models), strict=True):
                assert torch.allclose(a, b, rtol=1e-6, atol=1e-9), (method, options, (a - b).abs().max())


def check_what_is_kept_lies_with_the_leaders():
    model = net()
    optimizer = distributed(model, "rank_dad:rank=2")
    train(model, optimizer, 4)
    saved = optimizer.state_dict()["dad"]
    assert saved["size"] == 4 and saved["rank"] == hvd().rank() and saved["hosts"] == [[0, 1], [2, 3]]
    assert bool(saved["states"]) == leads()
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3, seed=1)
    other = net()
    other.load_state_dict(weights)
    resumed = distributed(other, "rank_dad:rank=2")
    resumed.load_state_dict(saved)
    train(other, resumed, 3, seed=1)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def check_a_checkpoint_of_ranks_without_hosts():
    """Made between all ranks, as in a job without the option: of other ranks than leaders, too, nothing is
    lost, here for a method that sends nothing by itself."""
    model = nn.Linear(64, 48, bias=False)
    method = "strom:tau_absolute=1e9"
    optimizer = distributed(model, method)
    share = torch.full((48, 64), 1.0 + hvd().rank())
    optimizer.zero_grad()
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["dad"].update(hosts=[], plan=None, states={}, kept={"weight": share})
    other = nn.Linear(64, 48, bias=False)
    resumed = distributed(other, method)
    resumed.load_state_dict(saved)
    for _ in range(2):
        resumed.zero_grad()
        other(torch.zeros(1, 64)).sum().backward()
        resumed.step()
    kept = saved_shares(as_arrays(resumed.state_dict()["dad"])).get("weight", np.zeros((48, 64)))
    assert leads() or not kept.any()
    total = hvd().allreduce(torch.from_numpy(kept.astype(np.float32)), op=hvd().Sum)
    assert torch.equal(total, torch.full((48, 64), 10.0)), total


def check_ranks_that_have_joined_bring_zeros():
    for first in range(4):  # a leader, or one that it leads
        rank = hvd().rank()
        if rank == first:
            assert hvd().join() in set(range(4)) - {first}
            continue
        x = torch.arange(1000.0)
        mean = hvd().allreduce(x + rank, name="mean")
        assert torch.equal(mean, (3 * x + 6 - first) / 4), first
        ints = hvd().allreduce(torch.tensor([rank + 1, 10]), name="ints", op=hvd().Sum)
        assert ints.tolist() == [9 - first, 30]
        assert hvd().allreduce(torch.tensor(rank), name="most", op=hvd().Max).item() == (
            2 if first == 3 else 3
        )
        scaled = hvd().allreduce(x, name="scaled", op=hvd().Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert torch.equal(scaled, 3 * x)
        with pytest.raises(hvd().HorovodInternalError, match="shape"):
            hvd().allreduce(torch.ones(2 if rank == (first + 1) % 4 else 3), name="shapes")
        assert hvd().allreduce(torch.ones(2), name="shapes", op=hvd().Sum).tolist() == [3.0, 3.0]
        hvd().join()
    # As if nothing had been.
    assert hvd().allreduce(torch.ones(2), name="mean", op=hvd().Sum).tolist() == [4.0, 4.0]


def check_all_but_one_rank_may_have_joined():
    for last in range(4):
        if hvd().rank() == last:
            for step in range(3):
                assert (
                    hvd().allreduce(torch.full((9,), 8.0 + step), name="alone").tolist() == [2 + step / 4] * 9
                )
        assert hvd().join() == last


def check_a_rank_joins_when_what_it_has_sent_is_through():
    for first in range(4):
        handle = hvd().allreduce_async(torch.ones(5000), name="sent", op=hvd().Sum)
        if hvd().rank() == first:
            hvd().join()
            assert torch.equal(hvd().synchronize(handle), torch.full((5000,), 4.0))
            continue
        assert torch.equal(hvd().synchronize(handle), torch.full((5000,), 4.0))
        assert hvd().allreduce(torch.ones(3), name="after", op=hvd().Sum).tolist() == [3.0] * 3
        hvd().join()


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


def check_ranks_that_go_different_ways_hear_of_it():
    """From host to host, or between all ranks by themselves: they would wait for each other for ever."""
    odd = hvd().rank() % 2 == 1
    x = torch.ones(3)

    def train_by(method):
        model = nn.Sequential()
        model.add_module(f"ways{len(methods)}", nn.Linear(64, 8))
        train(model, distributed(model, method), 1)

    for methods in (("dad", "none"), ("none", "vgc", ""), ("int8", "none", "", "")):
        with pytest.raises(hvd().HorovodInternalError) as error:
            train_by(methods[odd])
        words = f"compression {methods[0]} on ranks 0, 2, {methods[1]} on ranks 1, 3"
        assert words in str(error.value), (methods, str(error.value))
        assert hvd().allreduce(x, op=hvd().Sum).tolist() == [4.0] * 3, methods
    with pytest.raises(hvd().MismatchError, match="collective allreduce on rank 0, allgather on rank 1"):
        hvd().allgather(x, name="kinds") if odd else hvd().allreduce(x, name="kinds")
    with pytest.raises(hvd().MismatchError, match="op Sum on rank 0, Adasum on rank 1"):
        hvd().allreduce(x, name="adds", op=hvd().Adasum if odd else hvd().Sum)
    assert hvd().allreduce(x, name="adds", op=hvd().Sum).tolist() == [4.0] * 3
