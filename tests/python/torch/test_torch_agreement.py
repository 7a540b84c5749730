"""Ranks whose optimizers or replicas differ are told so, whatever differs; the job goes on or ends, but it
does not hang."""

import os

import pytest

from util import Warnings, check_names, hvd, launched_once

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

NUM_RANKS = 3

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


def told(said):
    """What rank 0 has warned of, for all ranks; the others say nothing."""
    first, *others = hvd().allgather_object(said)
    assert not any(others), others
    return [one for one in first if "replicas differ" in one]


def net(*widths):
    torch.manual_seed(0)
    layers = []
    for before, after in zip((4, *widths), (*widths, 2), strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def distributed(model, /, lr=0.1, params=None, **options):
    optimizer = torch.optim.SGD(params or model.parameters(), lr=lr)
    options.setdefault("named_parameters", list(model.named_parameters()))
    return hvd().DistributedOptimizer(optimizer, **options)


def step(model, optimizer, passes=1):
    for _ in range(passes):
        model(torch.ones(2, 4) * (1 + hvd().rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, steps):
    for _ in range(steps):
        step(model, optimizer)


def odd(there, elsewhere):
    """Something that only rank 1 has."""
    return there if hvd().rank() == 1 else elsewhere


def a_layer_more_on_rank_1():
    return odd(nn.Sequential(*net(8), nn.Linear(2, 2)), net(8))


def all_raise(words, model, optimizer, error=None):
    with pytest.raises(error or hvd().MismatchError) as raised:
        step(model, optimizer)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    good = net(8)
    train(good, distributed(good), 3)
    hvd().check_replicas(good)


def check_a_model_that_differs_is_named_on_all_ranks():
    for method in ("none", "rank_dad:rank=2"):
        model = a_layer_more_on_rank_1()
        words = ['"4.weight" is nothing on ranks 0, 2, (2, 2) float32 on rank 1', "the same model"]
        all_raise(words, model, distributed(model, compression=method))
        model = odd(net(8), net(9))
        words = ['"0.weight" is (9, 4) float32 on ranks 0, 2, (8, 4) float32 on rank 1']
        all_raise(words, model, distributed(model, compression=method))
    model = odd(net(8).double(), net(8))
    with pytest.raises(hvd().MismatchError, match="float32 on ranks 0, 2, .* float64 on rank 1"):
        model(torch.ones(2, 4, dtype=odd(torch.float64, torch.float32))).sum().backward()
        distributed(model).step()
    model = net(8)
    if hvd().rank() == 1:
        model[0].bias.requires_grad_(False)
    all_raise(['"0.bias"', "(8,) float32, frozen on rank 1"], model, distributed(model))


def check_parameters_in_another_order():
    model = net(8)
    params = list(model.parameters())
    optimizer = distributed(model, params=odd(params[::-1], params))
    all_raise(["order", 'number 0 is "0.weight" on ranks 0, 2, "2.bias" on rank 1'], model, optimizer)


def check_options_that_differ_are_named_on_all_ranks():
    Average, Sum = hvd().Average, hvd().Sum
    for option, values, words in (
        ("compression", ("fp16", "none"), "compression none on ranks 0, 2, fp16 on rank 1"),
        ("compression", ("topk", "none"), "compression none on ranks 0, 2, topk on rank 1"),
        ("op", (Sum, Average), "op Average on ranks 0, 2, Sum on rank 1"),
        (
            "gradient_predivide_factor",
            (2.0, 1.0),
            "gradient_predivide_factor 1.0 on ranks 0, 2, 2.0 on rank 1",
        ),
        ("groups", (2, None), "groups [] on ranks 0, 2"),
        ("sparse_as_dense", (True, False), "sparse_as_dense False on ranks 0, 2"),
        ("weighted", (True, False), "weighted False on ranks 0, 2"),
    ):
        model = net(8)
        all_raise([words], model, distributed(model, **{option: odd(*values)}))
    model = net(8)
    passes = odd(2, 1)
    optimizer = distributed(model, backward_passes_per_step=passes)
    words = "backward_passes_per_step 1 on ranks 0, 2, 2 on rank 1"
    with pytest.raises(hvd().MismatchError, match=words):
        step(model, optimizer, passes)


def check_parameters_that_only_one_rank_adds():
    model, more = net(8), nn.Linear(2, odd(3, 4))
    optimizer = distributed(model)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": list(more.parameters())})
    words = "(4, 2) float32 on ranks 0, 2, (3, 2) float32 on rank 1"
    with pytest.raises(hvd().MismatchError) as error:
        step(model, optimizer)
    assert words in str(error.value), error.value


def check_process_sets_compare_among_themselves():
    pair = hvd().add_process_set([0, 1])
    model = a_layer_more_on_rank_1()
    optimizer = distributed(model, process_set=pair)
    try:
        if hvd().rank() < 2:
            with pytest.raises(hvd().MismatchError, match='"4.weight" is nothing on rank 0'):
                step(model, optimizer)
        else:
            step(model, optimizer)
    finally:
        hvd().remove_process_set(pair)


def check_a_forgotten_broadcast_is_told_once():
    for method in ("none", "rank_dad:rank=1"):
        model = net(8)
        if hvd().rank() == 1:
            with torch.no_grad():
                model[2].bias += 1
        optimizer = distributed(model, compression=method)
        with Warnings() as said:
            step(model, optimizer)
            assert not told(said), "the first step may come before the broadcast"
            train(model, optimizer, 8)
        (one,) = told(said)
        assert 'after step 1: "2.bias" differs between ranks 0, 2 / rank 1' in one, one
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in one, one


def check_settings_that_differ_by_rank_are_named():
    model = net(8)
    optimizer = distributed(model, lr=odd(0.5, 0.1))
    with Warnings() as said:
        train(model, optimizer, 6)
        (first,) = told(said)
        optimizer.param_groups[0]["weight_decay"] = odd(0.25, 0.125)
        train(model, optimizer, 6)
    _, second = told(said)
    assert "lr of parameter group 0 is 0.1 on ranks 0, 2, 0.5 on rank 1" in first, first
    assert "weight_decay of parameter group 0 is 0.125 on ranks 0, 2, 0.25 on rank 1" in second, second


def check_a_scheduler_of_one_rank_is_found_later():
    model = net(8)
    optimizer = distributed(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=odd(0.5, 1.0))
    with Warnings() as said:
        for _ in range(10):
            step(model, optimizer)
            scheduler.step()
    (one,) = told(said)
    assert "after step 8" in one and "lr of parameter group 0" in one, one
    assert "equal after step 4" in one, one


def check_a_module_that_was_left_out_of_the_optimizer():
    model = net(8)
    with torch.no_grad():
        model[2].weight *= odd(2, 1)
    for options in ({}, {"named_parameters": None, "model": model}):
        optimizer = distributed(model, params=list(model[0].parameters()), **options)
        with Warnings() as said:
            train(model, optimizer, 3)
        (one,) = told(said)
        assert '"2.weight" differs' in one and "No DistributedOptimizer has it" in one, one


def check_running_statistics_may_differ():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with Warnings() as said:
        train(model, distributed(model, named_parameters=None, model=model), 9)
    assert not told(said)
    with pytest.raises(hvd().ReplicaError, match="1.running_mean"):
        hvd().check_replicas(model)


def in_mode(mode, model, /, **options):
    os.environ["DAD_CHECK_REPLICAS"] = mode
    try:
        return distributed(model, **options)
    finally:
        del os.environ["DAD_CHECK_REPLICAS"]


def check_the_environment_decides():
    model = net(8)
    with Warnings() as said:
        train(model, in_mode("0", model, lr=odd(0.5, 0.1)), 5)
    assert not told(said)
    model = net(8)
    optimizer = in_mode("raise", model, lr=odd(0.5, 0.1))
    step(model, optimizer)
    all_raise(["lr of parameter group 0"], model, optimizer, hvd().ReplicaError)
    # One rank that does not check must not leave the others waiting.
    model = net(8)
    train(model, in_mode(odd("0", "1"), model, lr=odd(0.5, 0.1)), 5)
    with pytest.raises(ValueError, match="0, 1 or raise"):
        in_mode("often", model)


def check_uneven_steps_are_no_difference():
    """Ranks that join make fewer steps, and none waits for their hashes."""
    torch.manual_seed(0)
    model = net(8)
    optimizer = in_mode("raise", model)
    for _ in range(3):
        train(model, optimizer, 3 + hvd().rank())
        hvd().join()
        hvd().broadcast_parameters(model.state_dict(), root_rank=2)
    train(model, optimizer, 10)
    hvd().check_replicas(model)


def check_an_optimizer_that_only_one_rank_makes():
    """Dense gradients go by their names; what methods keep goes by the number of the optimizer."""
    if hvd().rank() == 1:
        spare = net(3)
        distributed(spare)
    model = net(8)
    train(model, distributed(model), 3)
    hvd().check_replicas(model)
    optimizer = distributed(model, compression="topk")
    with pytest.raises(hvd().MismatchError, match="number among the optimizers made"):
        step(model, optimizer)


def check_adasum_is_compared_too():
    model = net(8)
    optimizer = distributed(model, lr=odd(0.5, 0.1), op=hvd().Adasum)
    with Warnings() as said:
        train(model, optimizer, 4)
    (one,) = told(said)
    assert "lr of parameter group 0" in one, one
    model = net(8)
    words = ["op Average on ranks 0, 2, Adasum on rank 1"]
    all_raise(words, model, distributed(model, op=odd(hvd().Adasum, hvd().Average)))
