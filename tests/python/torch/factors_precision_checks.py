"""Methods in half precision, under autocast and with scaled losses: launched with test_torch_factors_use.py."""

import copy
import warnings

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import factor_util as fu
from factor_util import D
from test_torch_factors_use import data, dense_mean, distributed, net, steps
from util import hvd, slow_link


def check_half_precision_models():
    for dtype, tolerance in ((torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        for method in ("dad", "edad"):
            model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).to(dtype)

            def backward(model, dtype=dtype):
                model(data(dtype=dtype)).float().sin().sum().backward()

            steps(model, distributed(model, method), backward, tolerance=tolerance)
        for method in ("rank_dad:rank=1", "int8", "auto"):
            optimizer = distributed(model, method)
            for _ in range(8):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
                hvd().check_replicas(model)
            assert all(p.grad.dtype == dtype for p in model.parameters())


def check_autocast():
    model = net(torch.float32)
    for method in ("dad", "edad", "exact"):

        def backward(model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data(dtype=torch.float32)).float().sin().sum()
            loss.backward()

        steps(model, distributed(model, method), backward, tolerance=2e-2)


def check_grad_scaler_and_autocast_with_exact_methods():
    """An infinite loss on one rank: all skip the step, and go on."""
    for method in ("dad", "edad", "exact"):
        model = net(torch.float32)
        optimizer = distributed(model, method)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(8):
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data(dtype=torch.float32)).float().square().mean()
            if step in (0, 4) and hvd().rank() == step // 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == 6:
                scaler.unscale_(optimizer)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            skipped = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
            assert skipped == (step in (0, 4)), step
            hvd().check_replicas(model)
        assert scaler.get_scale() == 2.0**10  # halved and doubled twice


def check_exact_methods_under_autocast():
    """What is sent dense has the bits of `none`, also in the step that is observed. Factors are multiplied in
    float32, where autograd rounds the product to bfloat16: they differ by one such rounding."""

    def gradients(method):
        torch.manual_seed(0)
        conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(D - 2, D))
        model = nn.Sequential(conv, nn.Linear(D, D), nn.LayerNorm(D), nn.GELU(), nn.Linear(D, D))
        optimizer = distributed(model, method, torch.optim.Adam(model.parameters(), lr=1e-2))
        for step in range(4):
            torch.manual_seed(10 * step + hvd().rank())
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(4, 1, 3, D)).float().square().mean()
            loss.backward()
            yield fu.gradients(model)
            optimizer.step()
        if method == "exact":
            assert {row["method"] for row in optimizer.plan()} == {"dense"}, optimizer.plan()

    with slow_link(bytes_per_second=1e13):  # no factors pay on this one
        for step, (wanted, exact) in enumerate(zip(gradients("none"), gradients("exact"), strict=True)):
            for name, grad in exact.items():
                assert torch.equal(grad, wanted[name]), (step, name)
    wanted, exact = next(gradients("none")), next(gradients("dad"))
    for name, grad in exact.items():
        assert (grad - wanted[name]).norm() <= 2**-8 * wanted[name].norm(), name
    assert not torch.equal(exact["4.weight"], wanted["4.weight"])


def check_what_is_not_a_number_is_not_hidden_by_an_activation():
    """One value of one rank's batch: the same gradients are NaN on all ranks as without a method."""
    for method in ("dad", "edad"):
        for activation in (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU):
            model = fu.Chain(activation).float()
            optimizer = distributed(model, method)
            for step in range(4):
                optimizer.zero_grad()
                batch = data(dtype=torch.float32)
                if step > 1 and hvd().rank() == 1:
                    batch[0, 0] = float("nan")
                expected = dense_mean(model, lambda twin, x=batch: twin(x).sum().backward())
                model(batch).sum().backward()
                optimizer.synchronize()
                for name, grad in fu.gradients(model).items():
                    where = (method, activation, step, name)
                    assert grad.isnan().equal(expected[name].isnan()), where
