"""The state of an optimizer, its end, and Adasum: launched with test_torch_optimizer.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

from test_torch_optimizer import data, distributed, net
from util import hvd


def check_state_dict_round_trip():
    model = net()
    optimizer = distributed(model, torch.optim.Adam(model.parameters()))
    model(data()).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other_model = net()
    other = distributed(other_model, torch.optim.Adam(other_model.parameters(), lr=1.0))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.001
    for a, b in zip(saved["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["step"], b["step"])
    plain = torch.optim.Adam(net().parameters())
    plain.load_state_dict(saved)


def check_state_that_was_there_before_wrapping_is_kept():
    model = net()
    inner = torch.optim.Adam(model.parameters())
    model(data()).sum().backward()
    inner.step()
    optimizer = distributed(model, inner)
    assert len(optimizer.state) == 4


def check_broadcast_optimizer_state():
    makers = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.LBFGS(p),
    ]
    for make in makers:
        model = net()
        optimizer = make(model.parameters())
        if hvd().rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.125

            def closure(model=model):
                model.zero_grad()
                loss = model(torch.ones(1, 4)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        if not isinstance(optimizer, torch.optim.LBFGS):
            optimizer = distributed(model, optimizer)
        hvd().broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.125
        states = hvd().allgather_object(str(optimizer.state_dict()))
        assert states[0] == states[1], type(optimizer)


def check_a_copy_says_why_there_is_none():
    model = net()
    for options in ({}, {"op": hvd().Adasum}):
        optimizer = distributed(model, **options)
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"state_dict\(\)"):
                duplicate(optimizer)
        copy.deepcopy(optimizer.state_dict())
        copied = copy.deepcopy(model)  # is not tied to the optimizer
        copied(data()).sum().backward()
        optimizer.zero_grad()


def check_an_optimizer_that_is_gone_sends_nothing():
    import gc

    model = net()
    distributed(model)
    gc.collect()
    optimizer = distributed(model)
    model(data()).sum().backward()
    optimizer.step()
    hvd().check_replicas(model)


def check_adasum_combines_updates():
    torch.manual_seed(1)
    model = nn.Linear(3, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = distributed(model, op=hvd().Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    x = torch.eye(3)[hvd().rank()].unsqueeze(0)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    # The ranks' changes are orthogonal: Adasum adds them.
    torch.testing.assert_close(model.weight, start - torch.tensor([[0.2, 0.2, 0.0]]))
    hvd().check_replicas(model)
    with pytest.raises(AssertionError):
        optimizer.skip_synchronize()
    (row,) = optimizer.plan()
    assert (row["name"], row["shape"], row["method"]) == ("weight", (1, 3), "dense")
    assert "Adasum" in row["why"]
