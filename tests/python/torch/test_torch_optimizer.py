"""DistributedOptimizer: everything around the mean of gradients."""

import copy
import logging
import re
import warnings
from pathlib import Path

import pytest

from util import check_names, hvd, joined, launched_once

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

NUM_RANKS = 2

HERE = Path(__file__).parent
CHECKS = joined(__file__, str(HERE / "optimizer_state_checks.py"))
results = launched_once(CHECKS, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


POISONED = ["none", "exact", "dad", "edad"]


@pytest.mark.parametrize("method", POISONED)
def test_a_gradient_that_is_not_finite_is_reported_with_its_rank(results, method):
    told = re.findall(r'gradient of "(\S+)" has NaN or infinities on rank (\d)', results.output)
    of_method = [rank for name, rank in told if f"poisoned_{method}." in name]
    assert of_method and set(of_method) == {"1"}, results.output
    assert len(of_method) <= NUM_RANKS  # each rank says it once


def test_an_overflow_of_a_scaled_loss_is_not_reported(results):
    assert "scaled_overflow" not in results.output


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(rows=4):
    """Differs by rank."""
    generator = torch.Generator().manual_seed(100 + hvd().rank())
    return torch.randn(rows, 4, generator=generator)


def distributed(net, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    options.setdefault("named_parameters", net.named_parameters())
    return hvd().DistributedOptimizer(optimizer, **options)


def mean_gradients(model, loss):
    """What the optimizer should see: the mean over ranks, computed apart from it."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [hvd().allreduce(grad) for grad in grads]


def assert_gradients(model, expected):
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def check_gradients_that_are_not_finite_on_one_rank():
    # Before the checks with a GradScaler, after which overflows are expected.
    for method in POISONED:
        model = net()
        names = [(f"poisoned_{method}.{name}", param) for name, param in model.named_parameters()]
        optimizer = distributed(model, named_parameters=names, compression=method)
        for step in range(4):
            x = data()
            if step > 1 and hvd().rank() == 1:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        assert model[0].weight.isnan().any()


def check_overflows_of_a_scaled_loss_are_no_news():
    model = net()
    names = [(f"scaled_overflow.{name}", param) for name, param in model.named_parameters()]
    optimizer = distributed(model, named_parameters=names)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(data()).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9


def check_it_is_an_instance_of_the_users_class():
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    optimizer = distributed(model, inner)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups is inner.param_groups
    with pytest.raises(ValueError, match="already"):
        hvd().DistributedOptimizer(optimizer)


def check_gradients_are_there_before_the_first_backward():
    model = net()
    model[0].bias.requires_grad_(False)
    distributed(model)
    assert model[0].bias.grad is None
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)


def check_gradients_are_sent_during_backward():
    model = net()
    optimizer = distributed(model)
    sent = []
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: sent.append(sum(unit.handle is not None for unit in optimizer._dad.units))
    )
    model(data()).sum().backward()
    assert sent == [0], "in the first step ranks compare before they send"
    optimizer.step()
    model(data()).sum().backward()
    # The gradients of the last layer come first; they are on their way when the first layer's come.
    assert sent[1] >= 2, sent
    optimizer.step()


def check_synchronize_gives_the_mean_and_leaves_it_in_grad():
    model = net()
    optimizer = distributed(model)
    expected = mean_gradients(model, model(data()).square().sum())
    model(data()).square().sum().backward()
    before = [param.grad for param in model.parameters()]
    optimizer.synchronize()
    assert_gradients(model, expected)
    assert all(a is p.grad for a, p in zip(before, model.parameters(), strict=True)), "needless copies"
    with optimizer.skip_synchronize():
        optimizer.step()


def check_sum_and_compression():
    for options, scale, tolerance in (
        ({"op": "Sum"}, 2.0, 1e-6),
        ({"compression": "fp16"}, 1.0, 1e-2),
        ({"compression": "bf16"}, 1.0, 1e-1),
        ({"compression": "per_layer:0.*=fp16"}, 1.0, 1e-2),
    ):
        if "op" in options:
            options["op"] = hvd().Sum
        model = net()
        optimizer = distributed(model, **options)
        expected = mean_gradients(model, model(data()).square().sum())
        model(data()).square().sum().backward()
        optimizer.synchronize()
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad * scale, rtol=tolerance, atol=tolerance)
        hvd().check_replicas({n: p.grad for n, p in model.named_parameters()})


def check_statistics_compare_with_what_was_not_cast():
    import dad

    dense_bytes = []
    for compression in ("none", "fp16"):
        model = net()
        optimizer = distributed(model, compression=compression)
        dad.reset_stats()
        model(data()).sum().backward()
        optimizer.synchronize()
        dense_bytes.append(dad.stats()["dense_bytes"])
    assert dense_bytes[0] == dense_bytes[1] == sum(4 * param.numel() for param in net().parameters())


def check_a_users_compressor():
    class Halves:
        @staticmethod
        def compress(tensor):
            return tensor / 2, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2

    model = net()
    optimizer = distributed(model, compression=Halves)
    expected = mean_gradients(model, model(data()).sum())
    model(data()).sum().backward()
    optimizer.synchronize()
    assert_gradients(model, expected)
    assert {row["method"] for row in optimizer.plan()} == {"Halves"}


def check_the_environment_chooses_where_the_script_does_not():
    import os

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dad").addHandler(handler)
    os.environ["DAD_COMPRESSION"] = "bf16"
    try:
        assert {row["method"] for row in distributed(net()).plan()} == {"bf16"}
        assert not lines
        for _ in range(2):
            explicit = distributed(net(), compression=hvd().Compression.none)
        assert {row["method"] for row in explicit.plan()} == {"dense"}
    finally:
        del os.environ["DAD_COMPRESSION"]
        logging.getLogger("dad").removeHandler(handler)
    # Once, and by one rank: who gave --compression should not think that it was heard.
    assert len(lines) == (hvd().rank() == 0), lines
    assert all("bf16" in line and "none" in line for line in lines)


def check_plan():
    rows = distributed(net(), compression=hvd().Compression.per_layer({"0.*": hvd().Compression.fp16})).plan()
    assert [row["name"] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [row["method"] for row in rows] == ["fp16", "fp16", "dense", "dense"]
    assert rows[0]["shape"] == (8, 4) and rows[0]["bytes"] == 64 and rows[0]["ratio"] == 2.0


def check_accumulation_adds_up_as_in_horovod():
    model = net()
    optimizer = distributed(model, backward_passes_per_step=2)
    x = data()
    expected = [2 * grad for grad in mean_gradients(model, model(x).square().sum())]
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        model(x).square().sum().backward()
        optimizer.synchronize()
        assert_gradients(model, expected)
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.zero_grad()
    model(x).square().sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(x).square().sum().backward()
    optimizer.step()


def check_a_pass_too_many_on_one_rank_changes_nothing():
    for compression in ("none", "fp16", "int8", "dad", "edad", "rank_dad:rank=1", "vgc"):
        model = net()
        optimizer = distributed(model, compression=compression)
        exact = compression in ("none", "dad", "edad")
        for step in range(4):
            expected = mean_gradients(model, model(data()).square().sum())
            optimizer.zero_grad()
            model(data()).square().sum().backward()
            # Also when the sums are there already, in .grad.
            while step % 2 and not all(
                hvd().poll(u.handle) for u in optimizer._dad.units if u.handle is not None
            ):
                pass
            if hvd().rank() == step // 2:
                with pytest.raises(AssertionError, match="backward_passes_per_step"):
                    model(data()).square().sum().backward()
                with pytest.raises(AssertionError, match="zero_grad"):
                    optimizer.zero_grad()
            optimizer.synchronize()
            if exact:
                assert_gradients(model, expected)
            with optimizer.skip_synchronize():
                optimizer.step()
            hvd().check_replicas(model)


def check_synchronize_before_all_passes_sends_what_there_is():
    model = net()
    optimizer = distributed(model, backward_passes_per_step=3)
    expected = mean_gradients(model, model(data()).sum())
    model(data()).sum().backward()
    optimizer.synchronize()
    assert_gradients(model, expected)


def check_an_optimizer_that_one_rank_refuses_leaves_no_trace():
    # The ranks number what they agree on by their optimizers.
    model = net()
    if hvd().rank() == 0:
        for options in ({"named_parameters": [("a", p) for p in model.parameters()]}, {"groups": "two"}):
            with pytest.raises(ValueError):
                distributed(model, **options)
    optimizer = distributed(model, compression="rank_dad:rank=1")
    model(data()).sum().backward()
    optimizer.step()
    hvd().check_replicas(model)


def check_misuse():
    model = net()
    optimizer = distributed(model)
    model(data()).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(w.message) for w in seen)
    optimizer.zero_grad()
    model(data()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    params = list(model.named_parameters())
    for named, word in (
        (params[:-1], "misses"),
        (params + [("0.weight", torch.ones(1))], "unique"),
        ([p for _, p in params], "named_parameters"),
    ):
        with pytest.raises(ValueError, match=word):
            distributed(model, named_parameters=named)
    for options in (
        {"backward_passes_per_step": 0},
        {"gradient_predivide_factor": 2.0, "op": hvd().Sum},
        {"gradient_predivide_factor": 0.0},
        {"process_set": 3},
        {"groups": 0},
        {"groups": [[params[0][1], params[0][1]]]},
        {"compression": "gzip"},
        {"compression": "vgc:alpha=-1"},
    ):
        with pytest.raises(ValueError):
            distributed(model, **options)
    with pytest.raises(ValueError, match="Optimizer"):
        hvd().DistributedOptimizer(model)


def check_clipping():
    model = net()
    optimizer = distributed(model)
    for _ in range(3):
        optimizer.zero_grad()
        (100 * model(data())).sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd().check_replicas(model)


def check_parameters_that_a_rank_does_not_use():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x, which):
            return getattr(self, which)(x).sum()

    for options in ({}, {"groups": 2}, {"groups": 1}):
        model = Branches()
        optimizer = distributed(model, **options)
        for step in range(6):
            optimizer.zero_grad()
            model(data(), "ab"[(hvd().rank() + step) % 2]).backward()
            optimizer.step()
        assert torch.equal(model.c.weight.grad, torch.zeros(2, 4))
        hvd().check_replicas(model)


def check_a_rank_without_a_batch():
    model = net()
    optimizer = distributed(model)
    for _ in range(2):
        optimizer.zero_grad()
        if hvd().rank() == 0:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    hvd().check_replicas(model)


def check_freezing_thawing_and_adding_parameters():
    model = net()
    for param in model[0].parameters():
        param.requires_grad_(False)
    optimizer = distributed(model)
    frozen = model[0].weight.clone()

    def step():
        optimizer.zero_grad()
        model(data()).square().sum().backward()
        optimizer.step()

    step()
    assert torch.equal(model[0].weight, frozen) and model[0].weight.grad is None
    for param in model[0].parameters():
        param.requires_grad_(True)
    step()
    step()
    assert not torch.equal(model[0].weight, frozen)
    hvd().check_replicas(model)
    model[2].bias.requires_grad_(False)
    step()
    hvd().check_replicas(model)

    extra = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    names = optimizer._parameter_names
    assert names[model[0].weight] == "0.weight" and extra in names and len(names) == 5
    for _ in range(3):
        optimizer.zero_grad()
        model(data() * extra).square().sum().backward()
        optimizer.step()
    hvd().check_replicas({"extra": extra.data, **model.state_dict()})


def check_lazy_modules_may_have_no_shape_yet():
    for method in ("none", "dad"):
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = distributed(model, compression=method)
        model(data())
        hvd().broadcast_parameters(model.state_dict(), 0)
        for _ in range(3):
            optimizer.zero_grad()
            expected = mean_gradients(model, model(data()).square().sum())
            model(data()).square().sum().backward()
            optimizer.synchronize()
            assert_gradients(model, expected)
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd().check_replicas(model)


def check_several_groups_schedulers_and_optimizers():
    first, second = net(), net()
    groups = [{"params": first[0].parameters()}, {"params": first[2].parameters(), "lr": 0.01}]
    a = hvd().DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    b = hvd().DistributedOptimizer(torch.optim.Adam(second.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(a, 1, gamma=0.5)
    for _ in range(3):
        a.zero_grad()
        b.zero_grad()
        first(data()).square().sum().backward()
        second(data()).square().sum().backward()
        b.step()
        a.step()
        schedule.step()
    assert [group["lr"] for group in a.param_groups] == [0.0125, 0.00125]
    hvd().check_replicas(first)
    hvd().check_replicas(second)


def check_closures():
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.05),
        lambda params: torch.optim.LBFGS(params, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        model = net()
        optimizer = distributed(model, make(model.parameters()))
        losses = []

        def closure(model=model, optimizer=optimizer, losses=losses):
            optimizer.zero_grad()
            loss = (model(data()) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(4):
            optimizer.step(closure)
        assert losses[-1] < losses[0]
        hvd().check_replicas(model)


def check_grad_scaler_skips_together():
    model = net()
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(5):
        optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data()).float().square().mean()
        if step == 2 and hvd().rank() == 1:
            loss = loss * float("inf")
        expected = mean_gradients(model, loss) if step != 2 else None
        scaler.scale(loss).backward(retain_graph=False) if expected is None else scaler.scale(
            model(data()).square().mean()
        ).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if step == 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert unchanged == (step == 2), step
    assert scaler.get_scale() == 2.0
    hvd().check_replicas(model)
    # The way of Horovod's documentation still works.
    optimizer.zero_grad()
    scaler.scale(model(data()).square().mean()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    hvd().check_replicas(model)


def check_sparse_gradients():
    for options in ({}, {"sparse_as_dense": True}):
        model = nn.Embedding(10, 3, sparse=True)
        dense = copy.deepcopy(model)
        dense.sparse = False
        a, b = distributed(model, **options), distributed(dense)
        rank = hvd().rank()
        for _ in range(3):
            for m, optimizer in ((model, a), (dense, b)):
                optimizer.zero_grad()
                m(torch.tensor([rank, 5, 5, rank + 1])).sum().backward()
                optimizer.step()
            assert model.weight.grad.is_sparse
            torch.testing.assert_close(model.weight.grad.to_dense(), dense.weight.grad)
        hvd().check_replicas(model)
        torch.testing.assert_close(model.weight, dense.weight)


def check_a_rank_that_does_not_use_a_sparse_embedding():
    model = nn.ModuleDict({"e": nn.Embedding(6, 2, sparse=True), "l": nn.Linear(2, 1)})
    optimizer = distributed(model, model=model)
    for _ in range(2):
        optimizer.zero_grad()
        x = model["e"](torch.tensor([1, 2])) if hvd().rank() == 0 else torch.ones(2, 2)
        model["l"](x).sum().backward()
        optimizer.step()
    hvd().check_replicas(model)


def check_checkpointed_activations():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = net()
        optimizer = distributed(model)
        x = data().requires_grad_()
        expected = mean_gradients(model, model(x).square().sum())
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        optimizer.synchronize()
        assert_gradients(model, expected)


def check_a_weight_used_twice():
    layer = nn.Linear(4, 4)
    optimizer = distributed(layer)
    expected = mean_gradients(layer, layer(layer(data())).square().sum())
    layer(layer(data())).square().sum().backward()
    optimizer.synchronize()
    assert_gradients(layer, expected)


def check_process_set():
    only = hvd().add_process_set([0])
    model = net()
    optimizer = distributed(model, process_set=only)
    grads = torch.autograd.grad(model(data()).sum(), list(model.parameters()))
    model(data()).sum().backward()
    optimizer.synchronize()
    assert_gradients(model, grads)
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd().remove_process_set(only)


def check_disagreement_is_raised_by_step_and_training_goes_on():
    model = nn.Linear(4, 2 + hvd().rank())
    optimizer = distributed(model)
    model(data()).sum().backward()
    with pytest.raises(hvd().HorovodInternalError, match="weight"):
        optimizer.step()
    torch.manual_seed(0)
    good = net()
    optimizer = distributed(good)
    good(data()).sum().backward()
    optimizer.step()
    hvd().check_replicas(good)
