"""Factor methods in everything that a training script does around backward() and step()."""

import copy
import gc
import os
import time
import warnings
from pathlib import Path

import pytest

from util import check_names, hvd, joined, launched_once

try:
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_  # as a script does, before dad is there
    from torch.utils.checkpoint import checkpoint

    import factor_util as fu
    from factor_util import D
except ImportError:
    torch = None

NUM_RANKS = 2

HERE = Path(__file__).parent
CHECKS = joined(__file__, str(HERE / "factors_precision_checks.py"), str(HERE / "factors_plan_checks.py"))
results = launched_once(CHECKS, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def net(dtype=None):
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))
    return model.to(dtype or torch.float64)


def data(rows=2, dtype=None):
    return torch.randn(rows, D, dtype=dtype or torch.float64) + hvd().rank()


def distributed(trained, compression="edad", optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(trained.parameters(), lr=1e-2)
    options.setdefault("named_parameters", trained.named_parameters())
    return hvd().DistributedOptimizer(optimizer, compression=compression, **options)


def dense_mean(model, backward):
    """What backward(model) gives on a copy without dad, as the mean over ranks."""
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.grad = None
    backward(twin)
    return fu.mean(fu.gradients(twin), twin, hvd().global_process_set)


def steps(model, optimizer, backward, count=4, tolerance=1e-12, zero=None):
    """So many steps, each with the gradients that it would have without the method."""
    for step in range(count):
        torch.manual_seed(step)
        state = torch.get_rng_state()
        expected = dense_mean(model, backward)
        torch.set_rng_state(state)
        (zero or optimizer.zero_grad)()
        backward(model)
        optimizer.synchronize()
        fu.assert_equal_gradients(model, expected, tolerance, f"step {step}")
        with optimizer.skip_synchronize():
            optimizer.step()
        hvd().check_replicas(model)


def plain(model):
    model(data()).sin().sum().backward()


def check_accumulated_passes():
    def three(model):
        for rows in (1, 2, 1):
            model(data(rows)).sin().sum().backward()

    for method in ("dad", "edad"):
        model = net()
        optimizer = distributed(model, method, backward_passes_per_step=3)
        steps(model, optimizer, three)
        optimizer.set_backward_passes_per_step(1)
        steps(model, optimizer, plain)


def check_clipping():
    model = net()
    optimizer = distributed(model)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for _ in range(4):
        x = data()
        optimizer.zero_grad()
        (100 * model(x).sin().sum()).backward()
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norm = clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        expected = dense_mean(twin, lambda m, x=x: (100 * m(x).sin().sum()).backward())
        for name, param in twin.named_parameters():
            param.grad = expected[name]
        torch.testing.assert_close(norm, clip_grad_norm_(twin.parameters(), 1.0))
        other.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def check_closures():
    for make in (
        lambda params: torch.optim.SGD(params, lr=1e-3),
        lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
    ):
        model = net()
        optimizer = distributed(model, "edad", make(model.parameters()))
        x, losses = data(), []

        def closure(model=model, optimizer=optimizer, x=x, losses=losses):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(4):
            optimizer.step(closure)
            hvd().check_replicas(model)
        assert losses[-1] < losses[0]


def check_several_optimizers():
    first, second = net(), net()
    a = distributed(first, "edad", named_parameters=first.named_parameters(prefix="first"))
    b = distributed(second, "dad", named_parameters=second.named_parameters(prefix="second"))
    for _ in range(4):
        a.zero_grad()
        b.zero_grad()
        x = data()
        wanted_a = dense_mean(first, lambda m, x=x: m(x).sin().sum().backward())
        wanted_b = dense_mean(second, lambda m, x=x: m(x).cos().sum().backward())
        first(x).sin().sum().backward()
        second(x).cos().sum().backward()
        b.synchronize()
        a.synchronize()
        fu.assert_equal_gradients(first, wanted_a, 1e-12)
        fu.assert_equal_gradients(second, wanted_b, 1e-12)
        for optimizer in (a, b):
            with optimizer.skip_synchronize():
                optimizer.step()


def check_weights_and_biases_in_different_optimizers():
    """A bias does not ride with a weight that another optimizer sends."""
    model = net()
    named = dict(model.named_parameters())
    parts = [{n: p for n, p in named.items() if (p.dim() > 1) == matrix} for matrix in (True, False)]
    both = [
        distributed(model, "dad", torch.optim.SGD(part.values(), lr=1e-2), named_parameters=part.items())
        for part in parts
    ]
    for order in (both, both[::-1], both):
        x = data()
        expected = dense_mean(model, lambda m, x=x: m(x).sin().sum().backward())
        for optimizer in order:
            optimizer.zero_grad()
        model(x).sin().sum().backward()
        for optimizer in order:
            optimizer.synchronize()
        fu.assert_equal_gradients(model, expected, 1e-12)
        for optimizer in order:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert {row["method"] for row in both[0].plan()} == {"dad"}
    assert {row["method"] for row in both[1].plan()} == {"dense"}


def check_an_optimizer_that_takes_the_place_of_another():
    model = net()
    optimizer = distributed(model, "dad")
    steps(model, optimizer, plain, 2)
    optimizer = distributed(model, "edad")
    gc.collect()
    steps(model, optimizer, plain, 3)
    assert optimizer.plan()[0]["method"] == "edad"


def check_parameter_groups_that_are_added():
    model, extra = net(), nn.Linear(D, D).double()
    both = nn.ModuleList([model, extra])
    optimizer = distributed(model, "edad", model=both, named_parameters=both[0].named_parameters(prefix="0"))

    def backward(both):
        both[1](both[0](data())).sin().sum().backward()

    steps(model, optimizer, plain, 3)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    steps(both, optimizer, backward)
    assert [row["method"] for row in optimizer.plan()][-2:] == ["dad", "dad"]


def check_gradients_that_are_zeroed_in_place_or_not_at_all():
    model = net()
    optimizer = distributed(model, "dad")
    steps(model, optimizer, plain, zero=lambda: optimizer.zero_grad(set_to_none=False))
    assert optimizer.plan()[0]["method"] == "dad"

    model = net()
    optimizer = distributed(model, "dad")
    x = data()
    expected = dense_mean(model, lambda m: m(x).sin().sum().backward())
    for count in (1, 2, 3):  # what is left in .grad counts, as without a method
        model(x).sin().sum().backward()
        optimizer.synchronize()
        fu.assert_equal_gradients(model, {n: count * g for n, g in expected.items()}, 1e-12)


def check_evaluation_between_steps():
    model = net()
    optimizer = distributed(model)

    def backward(model):
        with torch.no_grad():
            model(data(7))
        model(data(5))  # never goes backward
        model.eval()
        with torch.inference_mode():
            model(data(3))
        model.train()
        plain(model)

    steps(model, optimizer, backward)


def check_weights_that_change_between_backward_and_step():
    def backward(model):
        plain(model)
        for param in model.parameters():
            param.data.mul_(0.9)

    for activation in (nn.ReLU, nn.GELU):
        model = fu.Chain(activation).double()
        optimizer = distributed(model, "edad")
        steps(model, optimizer, backward)
        assert {row["method"] for row in optimizer.plan()} == {"edad"}


def check_an_activation_that_changes_while_it_is_sent_is_an_error():
    for method in ("dad", "edad", "rank_dad:rank=2"):
        model = net()
        optimizer = distributed(model, method)
        for step in range(4):
            optimizer.zero_grad()
            hidden = model[:2](data())
            model[2:](hidden).sin().sum().backward()
            if step == 2:
                hidden.detach().zero_()
                with pytest.raises(RuntimeError, match='weight".* changed in place'):
                    optimizer.step()
            else:
                optimizer.step()


def check_gradients_that_autograd_adds_to_once_they_are_sent():
    """The gradient at the end of a branch is also that of its shortcut, and autograd adds to it in place
    when nobody else has it: after the exchange, which here ends before backward() does."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.1)
            return grad

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.branch, self.top = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            x = self.below(x)
            return x + self.top(Slow.apply(self.branch(x)))

    for method in ("dad", "edad"):
        model = Residual().double()
        steps(model, distributed(model, method), plain)


def check_inputs_and_weights_that_are_not_contiguous():
    model = net()
    with torch.no_grad():
        model[2].weight = nn.Parameter(torch.randn(D, D, dtype=torch.float64).t())
        model[4].weight = nn.Parameter(torch.randn(D, 2 * D, dtype=torch.float64)[:, ::2])
    assert not model[2].weight.is_contiguous()

    def backward(model):
        model(data(4)[::2]).sin().sum().backward()
        x = torch.randn(D, 2, dtype=torch.float64).t()
        model(x).cos().sum().backward()

    for method in ("dad", "edad"):
        steps(model, distributed(model, method, backward_passes_per_step=2), backward)
    model = nn.Sequential(nn.Conv2d(8, D, 3), nn.ReLU(), nn.Conv2d(D, D, 1), nn.Flatten()).double()
    model = model.to(memory_format=torch.channels_last)

    def convolve(model):
        x = torch.randn(2, 8, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
        model(x).sin().sum().backward()

    steps(model, distributed(model, "dad"), convolve)


def check_activation_checkpointing():
    for reentrant in (False, True):

        def backward(model, reentrant=reentrant):
            x = data().requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).sin().sum().backward()

        model = net()
        optimizer = distributed(model, "edad")
        steps(model, optimizer, backward)
        assert all(row["method"] != "dense" for row in optimizer.plan() if len(row["shape"]) > 1)


def check_sparse_embeddings():
    for method in ("dad", "rank_dad:rank=1", "int8", "auto"):
        for options in ({}, {"sparse_as_dense": True}):
            model = nn.Sequential(nn.Embedding(D, D, sparse=True), nn.Linear(D, D))
            # Without a plan only the model tells a rank what others will send.
            known = {"model": model} if method == "auto" else {}
            optimizer = distributed(model, method, **options, **known)
            for step in range(8):
                optimizer.zero_grad()
                if hvd().rank() == 0 or step % 2:  # the other rank does not know that it is sparse
                    model(torch.tensor([step, 5])).sin().sum().backward()
                optimizer.step()
                hvd().check_replicas(model)
            if not options:
                assert model[0].weight.grad.is_sparse
                assert "sparse" in optimizer.plan()[0]["why"]


def check_per_layer_mixtures():
    c = hvd().Compression
    model = net(torch.float32)
    mixed = c.per_layer({"0.*": c.rank_dad(2), "2.weight": c.dad, "4.*": c.int8, "3.weight": c.fp16})
    for options in (
        {},
        {"groups": 2},
        {"groups": [list(model[2].parameters()) + list(model[3].parameters())]},
    ):
        optimizer = distributed(model, mixed, **options)
        for _ in range(5):
            optimizer.zero_grad()
            model(data(dtype=torch.float32)).sum().backward()
            optimizer.step()
            hvd().check_replicas(model)
        methods = {row["name"]: row["method"] for row in optimizer.plan()}
        assert methods["0.weight"] == methods["0.bias"] == "rank_dad"
        assert methods["2.weight"] == "dad" and methods["2.bias"] == "dense"
        assert methods["4.weight"] == "int8" and methods["3.weight"] == "fp16", methods


def check_groups():
    for groups in (1, 3):
        model = net()
        steps(model, distributed(model, "edad", groups=groups), plain)


def check_warm_up():
    model = net(torch.float32)
    optimizer = distributed(model, hvd().Compression.rank_dad(2, warmup_steps=3))
    for step in range(6):
        x = data(dtype=torch.float32)
        expected = dense_mean(model, lambda m, x=x: m(x).sum().backward())
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.synchronize()
        same = all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters())
        assert same == (step < 3), step
        assert optimizer.plan()[0]["method"] == ("dense" if step < 3 else "rank_dad")
        with optimizer.skip_synchronize():
            optimizer.step()


def check_a_method_from_the_environment():
    os.environ["DAD_COMPRESSION"] = "rank_dad:rank=2,warmup_steps=1"
    try:
        model = net(torch.float32)
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(data(dtype=torch.float32)).sum().backward()
            optimizer.step()
        assert optimizer.plan()[0]["method"] == "rank_dad"
    finally:
        del os.environ["DAD_COMPRESSION"]


def check_misuse():
    model = net()
    c = hvd().Compression
    for bad in (
        lambda: c.rank_dad(0),
        lambda: c.rank_dad(256),
        lambda: c.rank_dad(wire="int3"),
        lambda: c.rank_dad(combine="ring"),
        lambda: c.rank_dad(combine="power", residual="rows"),
        lambda: c.int8(bucket=0),
        lambda: c.dad(wire="int8"),
        lambda: c.auto(budget=-1),
        lambda: c.auto(warmup_steps=-1),
    ):
        with pytest.raises(ValueError, match="is not possible"):
            bad()
    for op in (hvd().Adasum, hvd().Min, hvd().Max, hvd().Product):
        for method in (c.dad, c.rank_dad(2), c.exact, c.auto, c.int8, c.per_layer({"0.*": c.dad})):
            with pytest.raises(ValueError, match="op=Average and op=Sum"):
                distributed(model, method, op=op)


def check_sum():
    model = net()
    for method in ("dad", "edad"):
        optimizer = distributed(model, method, op=hvd().Sum)
        for _ in range(3):
            x = data()
            expected = dense_mean(model, lambda m, x=x: m(x).sin().sum().backward())
            optimizer.zero_grad()
            model(x).sin().sum().backward()
            optimizer.synchronize()
            fu.assert_equal_gradients(model, {n: 2 * g for n, g in expected.items()}, 1e-12)


def check_predivide():
    model = net()
    for method in ("dad", "edad", "none"):
        steps(model, distributed(model, method, gradient_predivide_factor=4.0), plain)


def check_freezing_and_thawing():
    model = net()
    optimizer = distributed(model, "edad", torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1))
    for frozen in ([], ["0.weight", "0.bias"], ["0.weight"], ["2.bias", "4.weight"], []):
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        steps(model, optimizer, plain, 3)
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]) == (name in frozen), name


def weighted_steps(method, exact, samples, told=None, passes=1):
    """Against the gradient of the mean over all samples."""
    model = net()
    optimizer = distributed(model, method, weighted=True, backward_passes_per_step=passes)
    mine = samples[hvd().rank()]
    for step in range(4):
        torch.manual_seed(step)
        joined = torch.randn(sum(samples), D, dtype=torch.float64)
        x = joined.split(samples)[hvd().rank()]
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(joined).sin().mean(0).sum().backward()
        optimizer.zero_grad()
        if told:
            optimizer.set_batch_size(told[hvd().rank()])
        for _ in range(passes):
            if mine:
                (model(x).sin().mean(0).sum() / passes).backward()
        optimizer.synchronize()
        if exact:
            fu.assert_equal_gradients(model, {n: p.grad for n, p in twin.named_parameters()}, 1e-11)
        with optimizer.skip_synchronize():
            optimizer.step()
        hvd().check_replicas(model)


def check_weighted_ranks():
    for samples in ([1, 4], [3, 0], [2, 2]):
        for method in ("none", "dad", "edad"):
            weighted_steps(method, True, samples)
            weighted_steps(method, True, samples, passes=2)
        for method in ("rank_dad:rank=2", "int8", "auto"):
            weighted_steps(method, False, samples)
    # Twice as many on both: the same.
    weighted_steps("dad", True, [1, 4], told=[2, 8])


def check_hooks_that_change_a_gradient():
    """A hook on a parameter wants its gradient: it gets it, and the method goes on with what it returns."""
    model = net()
    model[2].weight.register_hook(lambda grad: 2 * grad)

    def backward(model):
        if not model[2].weight._backward_hooks:  # copies have none
            model[2].weight.register_hook(lambda grad: 2 * grad)
        plain(model)

    optimizer = distributed(model, "edad")
    steps(model, optimizer, backward)
    row = optimizer.plan()[2]
    assert row["method"] == "dense" and "hook" in row["why"], row


def check_a_hook_that_was_removed_is_no_reason_to_form_a_gradient():
    model = net()
    model[0].weight.register_hook(lambda grad: None).remove()
    optimizer = distributed(model, "dad")
    steps(model, optimizer, plain, 2)
    assert next(row for row in optimizer.plan() if row["name"] == "0.weight")["method"] == "dad"


def check_a_rank_that_fails_in_the_step_that_all_observe_is_named():
    class TwoOfOneInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.a, self.b = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            self.seen = self.below(x)
            return self.a(self.seen) + self.b(self.seen)

    for method in ("dad", "rank_dad:rank=1"):
        model = TwoOfOneInput().double()
        optimizer = distributed(model, method)
        plain(model)
        if hvd().rank() == 1:
            with torch.no_grad():
                model.seen.zero_()
        with pytest.raises(RuntimeError, match="changed in place") as error:
            optimizer.step()
        if hvd().rank() == 0:
            assert isinstance(error.value, hvd().MismatchError), error.value
            assert "rank 1" in str(error.value), error.value
        optimizer.zero_grad()
        plain(model)
        optimizer.step()
        hvd().check_replicas(model)
        assert all(row["method"] != "dense" for row in optimizer.plan() if len(row["shape"]) > 1)


def check_ranks_that_disagree():
    """An error on both, which names the compression of each; then all is well again."""
    one = hvd().rank()
    for methods in (
        ("dad", "edad"),
        ("rank_dad:rank=2", "rank_dad:rank=3"),
        ("dad", "none"),
        ("int8", "fp16"),
    ):
        model = net(torch.float32)
        optimizer = distributed(model, methods[one])
        model(data(dtype=torch.float32)).sum().backward()
        expected = f"compression {methods[0]} on rank 0, {methods[1]} on rank 1"
        with pytest.raises(hvd().MismatchError, match=expected):
            optimizer.step()
        del optimizer
        hvd().barrier()
        good = net()
        steps(good, distributed(good, "edad"), plain, 2)
    model = nn.Sequential(nn.Linear(D, D + one))
    optimizer = distributed(model, "dad")
    model(data(dtype=torch.float32)).sum().backward()
    with pytest.raises(hvd().MismatchError, match=rf"\({D}, {D}\).* on rank 0, \({D + 1}, {D}\).* on rank 1"):
        optimizer.step()
