"""Rounds of local steps in torch: each check is an identity of the exchange or of the outer step, on 3 ranks."""

import io
import warnings
from pathlib import Path

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
def test_local_steps(results, check):
    results.assert_passed(check)


# What the checks train


def model_of(seed=0, dtype=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16))
    return model.to(dtype or torch.float64)


def batch(step, rank, rows=4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 12, generator=generator, dtype=torch.float64)


def train(model, optimizer, step, rank=None, rows=4):
    rank = hvd().rank() if rank is None else rank
    optimizer.zero_grad()
    loss(model, batch(step, rank, rows)).backward()
    optimizer.step()


def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def value_of(model):
    with torch.no_grad():
        return float(loss(model, batch(999, 0)))


def wrapped(model, inner=None, **options):
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.05)
    return hvd().DistributedOptimizer(inner, model.named_parameters(), **options)


def same_bits_everywhere(model):
    try:
        hvd().check_replicas(model)
    except hvd().ReplicaError:
        return False
    return True


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def assert_close(here, there, tolerance=1e-12):
    for a, b in zip(here, there, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=tolerance), float((a - b).abs().max())


# The checks


def check_one_local_step_without_an_outer_optimizer_is_what_it_was_before():
    bits = []
    for options in ({}, {"local_steps": 1, "outer": None, "fragments": 1, "delay": 0}):
        model = model_of()
        optimizer = wrapped(model, **options)
        for step in range(3):
            train(model, optimizer, step)
        assert "GradientOptimizer" in [cls.__name__ for cls in type(optimizer).__mro__]
        bits.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))


def check_one_local_step_of_sgd_with_a_plain_outer_step_is_dense_sgd():
    ends = []
    plain = hvd().Outer(lr=1.0, momentum=0.0, nesterov=False)
    for options in ({}, {"outer": plain}):
        model = model_of()
        optimizer = wrapped(model, **options)
        for step in range(5):
            train(model, optimizer, step)
        ends.append(weights(model))
    assert_close(*ends)


def simulated(num_rounds, local_steps, outer, rows):
    """What all ranks come to, computed by one."""
    common = model_of()
    start, momentum, step = weights(common), [torch.zeros_like(p) for p in common.parameters()], 0
    inner = {}
    for _ in range(num_rounds):
        changes, seen = [], []
        for rank in range(hvd().size()):
            model = model_of()
            for param, value in zip(model.parameters(), start, strict=True):
                param.data.copy_(value)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            if rank in inner:
                optimizer.load_state_dict(inner[rank])
            for local in range(local_steps):
                train(model, optimizer, step + local, rank, rows(rank))
            inner[rank] = optimizer.state_dict()
            changes.append([a - b for a, b in zip(start, weights(model), strict=True)])
            seen.append(local_steps * rows(rank))
        step += local_steps
        mean = [
            sum(n * change[i] for n, change in zip(seen, changes, strict=True)) / sum(seen)
            for i in range(len(start))
        ]
        momentum = [outer.momentum * m + c for m, c in zip(momentum, mean, strict=True)]
        if outer.nesterov:
            move = [c + outer.momentum * m for c, m in zip(mean, momentum, strict=True)]
        else:
            move = momentum
        start = [w - outer.lr * s for w, s in zip(start, move, strict=True)]
    return start


def check_rounds_are_those_of_a_simulation_weighted_by_samples():
    outers = (hvd().Outer(), hvd().Outer(lr=0.5, momentum=0.5, nesterov=False), hvd().Outer(1.0, 0.0, False))
    for outer in outers:
        for rows in (lambda rank: 4, lambda rank: 2 + 3 * rank):
            model = model_of()
            adam = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = wrapped(model, adam, local_steps=3, outer=outer)
            for step in range(9):
                train(model, optimizer, step, rows=rows(hvd().rank()))
            assert_close(weights(model), simulated(3, 3, outer, rows))


def check_ranks_are_equal_after_a_round_and_not_within_it():
    for compression in ("none", "rank_dad:rank=2", "int8", "topk:ratio=0.1", "fp16"):
        model = model_of(dtype=torch.float32)
        optimizer = wrapped(model, local_steps=4, compression=compression)
        for step in range(8):
            optimizer.zero_grad()
            loss(model, batch(step, hvd().rank()).float()).backward()
            optimizer.step()
            assert same_bits_everywhere(model) == (step % 4 == 3), (compression, step)


def check_nothing_of_a_change_is_lost():
    from dad.state.states import saved_shares
    from dad.torch.checkpoint import as_arrays

    for compression in ("int8", "topk:ratio=0.05", "rank_dad:rank=1,wire=int4", "vgc", "powersgd:rank=1"):
        model = model_of()
        before = weights(model)
        optimizer = wrapped(model, local_steps=2, compression=compression)
        part = optimizer._dad.parts[0]
        names = [name for name, _ in model.named_parameters()]
        total = dict.fromkeys(names, 0.0)
        send = part.send

        def recording(changes, total=total, send=send, names=names):
            for name, change in zip(names, changes, strict=True):
                total[name] = total[name] + change.clone()
            send(changes)

        part.send = recording
        for step in range(20):
            train(model, optimizer, step)
        kept = saved_shares(as_arrays(part.sync.save()))
        for name, begin, end in zip(names, before, weights(model), strict=True):
            changes = hvd().allreduce(total[name], name=f"changes.{name}")
            share = torch.from_numpy(kept[name]) if name in kept else torch.zeros_like(begin)
            rest = hvd().allreduce(share.double().reshape(begin.shape), op=hvd().Sum, name=f"kept.{name}")
            if compression == "vgc" and name in kept:
                continue  # its rounding to powers of two is dropped, as in the paper
            assert_close([begin - end + rest], [changes], 1e-6)


def check_a_checkpoint_within_a_round_goes_on_with_the_same_bits():
    cases = [
        {"compression": "topk:ratio=0.1"},
        {"compression": "rank_dad:rank=2", "outer": hvd().Outer()},
        {"compression": "int8", "delay": 1},
        {"fragments": 2, "outer": hvd().Outer(), "compression": "int8"},
        {"fragments": 2, "delay": 1},
    ]
    folder = Path(hvd().broadcast_object(__import__("tempfile").mkdtemp()))
    for number, options in enumerate(cases):
        for save_after in (10, 14, 15):
            ends = []
            model = model_of()
            adam = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = wrapped(model, adam, local_steps=4, **options)
            for step in range(22):
                train(model, optimizer, step)
                if step + 1 == save_after:
                    file = io.BytesIO()
                    torch.save([model.state_dict(), optimizer.state_dict()], file)
                    hvd().save(folder / f"{number}.pt", model=model, optimizer=optimizer)
            optimizer.end_round()
            ends.append(weights(model))
            for way in ("of each rank", "of all ranks"):
                model = model_of(seed=1)
                adam = torch.optim.Adam(model.parameters(), lr=0.01)
                optimizer = wrapped(model, adam, local_steps=4, **options)
                if way == "of each rank":
                    file.seek(0)
                    saved_model, saved_optimizer = torch.load(file, weights_only=True)
                    model.load_state_dict(saved_model)
                    optimizer.load_state_dict(saved_optimizer)
                else:
                    hvd().load(folder / f"{number}.pt", model=model, optimizer=optimizer)
                for step in range(save_after, 22):
                    train(model, optimizer, step)
                optimizer.end_round()
                assert same_bits_everywhere(model)
                ends.append(weights(model))
            for end in ends[1:]:
                assert all(torch.equal(a, b) for a, b in zip(ends[0], end, strict=True)), (
                    options,
                    save_after,
                )


def check_every_step_is_applied_once_with_delay_and_with_fragments():
    """With plain averaging and changes that do not depend on the weights, the sum of all of them is left."""
    for options in ({"delay": 1}, {"delay": 1, "local_steps": 1}, {"local_steps": 5}):
        model = nn.Linear(3, 2).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = wrapped(
            model, torch.optim.SGD(model.parameters(), lr=1.0), **{"local_steps": 4, **options}
        )
        for step in range(11):
            for param in model.parameters():
                param.grad = torch.full_like(param, float(hvd().rank() + step))
            optimizer.step()
        optimizer.end_round()
        expected = -sum(1.0 + step for step in range(11))  # the mean rank is 1
        for param in model.parameters():
            assert_close([param.detach()], [torch.full_like(param, expected)])
        assert same_bits_everywhere(model)


def check_fragments_go_in_turn_and_end_with_equal_ranks():
    model = model_of()
    optimizer = wrapped(model, local_steps=4, fragments=2)
    sent = []
    for number, part in enumerate(optimizer._dad.parts):
        send = part.send
        part.send = lambda changes, number=number, send=send: (sent.append(number), send(changes))
    for step in range(8):
        train(model, optimizer, step)
        assert len(sent) == (step + 1) // 2
    assert sent == [0, 1, 0, 1]
    optimizer.end_round()
    assert same_bits_everywhere(model)


def check_fragments_and_delay_learn():
    for options in ({}, {"delay": 1}, {"fragments": 2}, {"fragments": 2, "delay": 1}):
        model = model_of()
        optimizer = wrapped(model, local_steps=4, **options)
        first = value_of(model)
        for step in range(60):
            train(model, optimizer, step)
        optimizer.end_round()
        assert value_of(model) < 0.9 * first, options


def check_ranks_with_uneven_data_join():
    for options in ({}, {"fragments": 2}, {"delay": 1}, {"local_steps": "50ms"}):
        model = model_of()
        optimizer = wrapped(model, **{"local_steps": 4, **options})
        for step in range(5 + 3 * hvd().rank()):
            train(model, optimizer, step)
        last = hvd().join()
        assert 0 <= last < NUM_RANKS
        for step in range(8):  # all take the weights of those that have made the most rounds
            train(model, optimizer, 100 + step)
        optimizer.end_round()
        assert same_bits_everywhere(model), options


def check_a_joined_rank_adds_what_it_has_done_and_no_more():
    model = nn.Linear(3, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=1.0), local_steps=4)
    for _ in range(2 if hvd().rank() == 0 else 4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.set_batch_size(1)
        optimizer.step()
    hvd().join()
    # 2 samples of change 2, and twice 4 of change 4.
    assert_close([model.weight.detach()], [torch.full_like(model.weight, -(2 * 2 + 2 * 4 * 4) / 10)])


def check_a_step_that_a_scaler_skips_counts():
    model = model_of(dtype=torch.float32)
    optimizer = wrapped(model, local_steps=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(8):
        optimizer.zero_grad()
        value = loss(model, batch(step, hvd().rank()).float())
        if hvd().rank() == 1 and step in (2, 7):
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert same_bits_everywhere(model)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def check_clipping_accumulation_and_schedules_are_the_users_own():
    model = model_of()
    optimizer = wrapped(model, local_steps=2, backward_passes_per_step=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):
                loss(model, batch(2 * step + half, hvd().rank())).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
    assert same_bits_everywhere(model)


def check_batch_norm_is_pooled_at_the_end_of_a_round():
    for layer in (nn.BatchNorm1d(12), hvd().SyncBatchNorm(12)):
        model = nn.Sequential(layer, nn.Linear(12, 4)).double()
        hvd().broadcast_parameters(model.state_dict(), 0)
        optimizer = wrapped(model, local_steps=2)
        for step in range(4):
            optimizer.zero_grad()
            model((1 + hvd().rank()) * batch(step, hvd().rank(), rows=8)).square().mean().backward()
            optimizer.step()
            equal = same_bits_everywhere({"mean": layer.running_mean, "variance": layer.running_var})
            assert equal == (step % 2 == 1)


def check_a_frozen_parameter_stays():
    model = model_of()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = wrapped(model, local_steps=2, compression="int8")
    for step in range(4):
        train(model, optimizer, step)
    assert torch.equal(before, model[0].weight)
    assert same_bits_everywhere(model)


def check_a_method_that_sends_factors_says_that_changes_go_dense():
    for compression in ("dad", "exact", "per_layer:0.*=edad;*=int8"):
        model = model_of()
        with Warnings("local steps") as said:
            optimizer = wrapped(model, local_steps=2, compression=compression)
        assert len(said) == (hvd().rank() == 0), said
        for step in range(4):
            train(model, optimizer, step)
        rows = {row["name"]: row for row in optimizer.plan()}
        assert rows["0.weight"]["method"] == "dense"
        assert rows["0.weight"]["every"] == "2 steps"


def check_the_plan_and_the_statistics_count_rounds():
    model = model_of()
    optimizer = wrapped(model, local_steps=5, compression="topk:ratio=0.1")
    for step in range(5):
        train(model, optimizer, step)
    hvd().reset_stats()
    for step in range(5, 15):
        train(model, optimizer, step)
    row = next(row for row in optimizer.plan() if row["name"] == "0.weight")
    assert row["method"] == "topk" and row["every"] == "5 steps"
    assert hvd().stats()["tensors"]["0.weight"]["steps"] == 2


def check_time_ends_rounds_for_ranks_of_any_speed():
    import time

    model = model_of()
    optimizer = wrapped(model, local_steps="200ms")
    steps, rounds = 0, 0
    while optimizer._dad.rounds.rounds < 5:
        train(model, optimizer, steps)
        time.sleep(0.002 * 4 ** hvd().rank())
        steps += 1
        if optimizer._dad.rounds.rounds > rounds:
            rounds += 1
            assert optimizer._dad.rounds.is_between
    optimizer.end_round()
    assert same_bits_everywhere(model)
    all_rounds = hvd().allgather(torch.tensor([optimizer._dad.rounds.rounds]))
    assert len(set(all_rounds.tolist())) == 1


def check_a_new_world_goes_on_with_the_round():
    model = model_of()
    optimizer = wrapped(model, local_steps=4, outer=hvd().Outer(), compression="int8")
    for step in range(6):
        train(model, optimizer, step)
    middle = weights(model)
    hvd().shutdown()
    hvd().init()
    assert all(torch.equal(a, b) for a, b in zip(middle, weights(model), strict=True))
    for step in range(6, 8):
        train(model, optimizer, step)
    assert same_bits_everywhere(model)
    for step in range(8, 12):
        train(model, optimizer, step)
    assert same_bits_everywhere(model)


def check_a_rank_that_comes_new_takes_the_round_of_the_others():
    model = model_of(seed=hvd().rank() // 2)
    optimizer = wrapped(model, local_steps=4, outer=hvd().Outer(), fragments=2)
    if hvd().rank() < 2:  # these are in the middle of a round already
        rounds = optimizer._dad.rounds
        rounds.rounds, rounds.turn, rounds.steps = 3, 1, 2
        for fragment in rounds.fragments:
            fragment.begin()
            fragment.momentum = [torch.ones_like(w) for w in fragment.part.weights()]
            fragment.samples_unit = 8.0
    for step in range(10):
        train(model, optimizer, step)
    optimizer.end_round()
    assert same_bits_everywhere(model)


def check_an_optimizer_state_that_is_broadcast_begins_a_round():
    model = model_of()
    adam = torch.optim.Adam(model.parameters())
    optimizer = wrapped(model, adam, local_steps=3, compression="int8")
    hvd().broadcast_parameters(model.state_dict(), 0)
    hvd().broadcast_optimizer_state(optimizer, 0)
    for step in range(4):
        train(model, optimizer, step)
    hvd().broadcast_optimizer_state(optimizer, 0)
    hvd().broadcast_parameters(model.state_dict(), 0)
    for step in range(6):
        train(model, optimizer, step)
    optimizer.end_round()
    assert same_bits_everywhere(model)


def check_ranks_with_other_options_are_told_so():
    model = model_of()
    optimizer = wrapped(model, local_steps=4 if hvd().rank() == 1 else 2)
    with pytest.raises(hvd().MismatchError, match="local_steps 2 on ranks 0, 2, 4 on rank 1"):
        train(model, optimizer, 0)


def check_an_elastic_state_goes_back_to_the_beginning_of_the_round():
    import dad.torch.elastic as elastic

    model = model_of()
    optimizer = wrapped(model, local_steps=4, outer=hvd().Outer(), compression="int8")
    state = elastic.TorchState(model=model, optimizer=optimizer)
    for step in range(4):
        train(model, optimizer, step)
    common = weights(model)
    for step in range(4, 6):
        train(model, optimizer, step)
    state.save()
    train(model, optimizer, 6)
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(common, weights(model), strict=True))
    for step in range(4, 12):
        train(model, optimizer, step)
    assert same_bits_everywhere(model)
