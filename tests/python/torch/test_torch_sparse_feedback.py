"""Sparse methods lose nothing: what was sent and what waits add up to all gradients, across scaled losses, skipped
steps, new plans, checkpoints, joins and another number of ranks."""

import copy
import logging

import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn

    from dad.log import log
    from test_torch_feedback import Ledger, distributed, net, run, scaled_steps, shares_of, twin_of
except ImportError:
    torch = None

NUM_RANKS = 4
D = 32

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


# Those that keep what they round off, too.
METHODS = [
    "vgc:error_feedback=True",
    "vgc_strom:tau=1.0",
    "strom:tau=1.0",
    "topk:ratio=0.05",
    "chunk_topk:chunk=128,k=8",
    "vgc_strom:tau_absolute=0.01,coding=word",
    "strom:tau_absolute=0.01",
]
OTHERS = ["vgc", "vgc:coding=word,variance=sample", "topk:error_feedback=False", "qsgd", "powersgd:rank=2"]


def states_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["dad"]["states"])


def assert_same_states(a, b, where=""):
    assert a.keys() == b.keys(), where
    for name, tensors in a.items():
        assert tensors.keys() == b[name].keys(), f"{where}: {name}"
        for key, tensor in tensors.items():
            assert torch.equal(tensor, b[name][key]), f"{where}: {key} of {name}"


def check_what_is_applied_and_what_is_kept_add_up():
    for method in [*METHODS, "powersgd:rank=2"]:
        for rows in ([2, 2, 2, 2], [3, 1, 0, 2]):
            model = net()
            optimizer, ledger = distributed(model, method), Ledger(model)
            run(model, optimizer, ledger, 9, rows)
            ledger.assert_balanced(optimizer, method)
            hvd().check_replicas(model)


def check_sums_predivided_and_weighted_means():
    for method in METHODS[:5]:
        model = net()
        optimizer, ledger = distributed(model, method, op=hvd().Sum), Ledger(model)
        run(model, optimizer, ledger, 6, weight=1.0)
        ledger.assert_balanced(optimizer, f"sum, {method}")
        model = net()
        optimizer, ledger = distributed(model, method, gradient_predivide_factor=2.0), Ledger(model)
        run(model, optimizer, ledger, 6)
        ledger.assert_balanced(optimizer, f"predivided, {method}")
        model = net()
        optimizer, ledger = distributed(model, method, weighted=True), Ledger(model)
        for seed, rows in enumerate(([2, 2, 2, 2], [5, 1, 0, 2], [1, 1, 1, 9])):
            run(model, optimizer, ledger, 2, rows, rows[hvd().rank()] / sum(rows), seed)
        ledger.assert_balanced(optimizer, f"weighted, {method}")


def check_scaled_losses_and_overflows_on_one_rank():
    for method in METHODS[:5]:
        scaler = scaled_steps(method, {}, growth_interval=2)
        assert scaler.get_scale() > 64
        scaled_steps(method, {0: (3, ("2.weight",)), 4: (1, ("0.weight", "3.bias")), 5: (0, ("0.bias",))})


def check_an_overflow_leaves_every_state_as_it_was():
    """The loss of one rank overflows, and with it every tensor: all skip, and nothing has changed."""
    for method in [*METHODS, *OTHERS[:-1]]:  # powersgd has added the gradient, and subtracts it again
        model = net()
        optimizer = distributed(model, method)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            x = torch.randn(2, D, dtype=torch.float64) + hvd().rank()
            overflows = step in (2, 4) and hvd().rank() == step - 2
            optimizer.zero_grad()
            scaler.scale(model(x).sin().sum() * (float("inf") if overflows else 1.0)).backward()
            states, shares = states_of(optimizer), copy.deepcopy(shares_of(optimizer))
            weights = copy.deepcopy(model.state_dict())
            scaler.step(optimizer)
            scaler.update()
            if step in (2, 4):
                # A new plan may have come with it, and another form of what waits.
                kept = shares_of(optimizer)
                assert kept.keys() == shares.keys(), f"{method} step {step}"
                wrong = [name for name, share in shares.items() if not torch.equal(kept[name], share)]
                assert not wrong, f"{method} step {step}: {wrong}"
                same = {name: state for name, state in states_of(optimizer).items() if name in states}
                assert_same_states({name: states[name] for name in same}, same, f"{method} step {step}")
                assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
            hvd().check_replicas(model)


def check_what_is_not_finite_is_told_with_tensor_and_rank():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log.addHandler(handler)
    try:
        for method in ("vgc", "strom", "topk", "qsgd", "rank_dad:rank=2", "int8"):
            messages.clear()
            by_owner = method in ("rank_dad:rank=2", "int8")
            model = net()
            optimizer = distributed(model, method)
            for step in range(5):
                states = states_of(optimizer)
                optimizer.zero_grad()
                loss = model(torch.ones(2, D, dtype=torch.float64)).sin().sum()
                if step in (2, 3) and hvd().rank() == 2:
                    loss = loss + model[2].weight[0, 0] * float("nan")
                loss.backward()
                optimizer.synchronize()
                lost = {name for name, p in model.named_parameters() if p.grad.isnan().all()}
                assert "2.weight" in lost if step in (2, 3) else not lost, (method, step, lost)
                if step in (2, 3) and not by_owner:
                    same = {name: states[name] for name in lost & states.keys()}
                    assert_same_states(same, {name: states_of(optimizer)[name] for name in same}, method)
            told = [message for message in messages if "not finite" in message]
            assert len(told) == 1 and '"2.weight"' in told[0], told
            # An owner tells that somebody was not, but not who; that one tells itself.
            others = by_owner and hvd().rank() != 2
            assert "on rank 2:" in told[0] or (others and "on some rank:" in told[0]), told
    finally:
        log.removeHandler(handler)


def dyadic_step(model, optimizer, ledger, step):
    """Gradients that float32 adds up exactly: they do not depend on the weights."""
    generator = torch.Generator().manual_seed(1000 * step + hvd().rank())
    x = torch.randint(-4, 5, (3, D), generator=generator) / 4
    c = torch.randint(-4, 5, (3, D), generator=generator) / 8
    twin = twin_of(model)
    optimizer.zero_grad()
    for m in (twin, model):
        (m(x) * c).sum().backward()
    optimizer.synchronize()
    ledger.add_gradients(twin, 1 / 4)
    ledger.add_applied()
    with optimizer.skip_synchronize():
        optimizer.step()


def assert_exactly_balanced(ledger, optimizer, where):
    total = hvd().grouped_allreduce(list(ledger.total.values()), op=hvd().Sum)
    shares = shares_of(optimizer)
    mine = [shares.get(n, torch.zeros_like(t)).reshape(t.shape) for n, t in ledger.total.items()]
    kept = hvd().grouped_allreduce(mine, op=hvd().Sum)
    for name, all_gradients, rest in zip(ledger.total, total, kept, strict=True):
        assert all_gradients.dtype == torch.float32
        assert torch.equal(ledger.applied[name] + rest, all_gradients), f"{where}: {name}"


def check_powers_of_two_add_up_exactly_across_checkpoints_and_plans():
    exact = [
        "vgc:error_feedback=True",
        "vgc_strom:tau_absolute=0.25",
        "strom:tau_absolute=0.25",
        "topk:ratio=0.05",
        # Everything passes, which is too large: dense from the second plan on.
        "vgc:alpha=0.0,coding=word,error_feedback=True",
    ]
    for method in exact:
        torch.manual_seed(1)
        model = nn.Linear(D, D)
        optimizer, ledger = distributed(model, method), Ledger(model)
        for step in range(12):
            dyadic_step(model, optimizer, ledger, step)
            assert_exactly_balanced(ledger, optimizer, f"{method} step {step}")
            if step == 5:
                saved = copy.deepcopy(optimizer.state_dict())
                other = nn.Linear(D, D)
                other.load_state_dict(model.state_dict())
                model, optimizer = other, distributed(other, method)
                optimizer.load_state_dict(saved)
                ledger.model = model
        # Another method takes over what waits.
        other = nn.Linear(D, D)
        resumed = distributed(other, "topk:ratio=0.1" if "vgc" in method else "vgc:error_feedback=True")
        resumed.load_state_dict(optimizer.state_dict())
        ledger.model = other
        for step in range(4):
            dyadic_step(other, resumed, ledger, 100 + step)
            assert_exactly_balanced(ledger, resumed, f"after {method} step {step}")


def check_what_is_larger_than_dense_goes_dense_for_good():
    method = "vgc:alpha=0.0,coding=word,error_feedback=True"
    model = net().float()
    optimizer = distributed(model, method)

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, D)).sin().sum().backward()
        optimizer.step()
        hvd().check_replicas(model)

    step()
    by_plan = {row["name"]: row for row in optimizer.plan()}
    assert by_plan["0.weight"]["method"] == "vgc"
    assert optimizer._dad.replan_wanted
    saved = copy.deepcopy(optimizer.state_dict())
    for resumed in (False, True):
        if resumed:
            optimizer = distributed(model, method)
            optimizer.load_state_dict(saved)
        for _ in range(3):
            step()
            row = optimizer.plan()[0]
            assert (row["method"], row["why"]) == ("dense", "its sparse form was larger than dense"), row
            assert shares_of(optimizer).get("0.weight") is None


def check_a_checkpoint_continues_with_the_same_bits():
    for method in [*METHODS, *OTHERS]:
        model = net()
        optimizer, ledger = distributed(model, method), Ledger(model)
        run(model, optimizer, ledger, 7, seed=1)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        run(model, optimizer, ledger, 4, seed=2)
        other = net()
        other.load_state_dict(weights)
        resumed = distributed(other, method)
        resumed.load_state_dict(saved)
        second = Ledger(other)
        run(other, resumed, second, 4, seed=2)
        for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), f"{method}: {name}"
        assert_same_states(states_of(optimizer), states_of(resumed), method)
        assert resumed.plan()[0]["method"] == optimizer.plan()[0]["method"]


def check_a_checkpoint_of_another_method():
    for old, new in (
        ("vgc:error_feedback=True", "int8"),
        ("int8", "vgc:error_feedback=True"),
        ("strom", "vgc_strom:tau=1.0"),
        ("topk", "rank_dad:rank=2,combine=owner"),
        ("vgc_strom", "topk"),
        ("strom:tau_absolute=0.01", "dad"),
        ("powersgd:rank=2", "strom:tau=1.0"),
        ("chunk_topk:chunk=128,k=8", "chunk_topk:chunk=64,k=4,combine=gather"),
        ("chunk_topk:chunk=128,k=8,combine=gather", "int8"),
        ("topk", "chunk_topk:chunk=128,k=8"),
    ):
        model = net()
        optimizer, ledger = distributed(model, old), Ledger(model)
        run(model, optimizer, ledger, 5)
        other = net()
        resumed = distributed(other, new)
        resumed.load_state_dict(optimizer.state_dict())
        ledger.model = other
        run(other, resumed, ledger, 4)
        ledger.assert_balanced(resumed, f"{old} -> {new}", kept_something=new != "dad")


def check_what_is_carried_over_counts_as_one_sample():
    model = net()
    optimizer = distributed(model, "strom:tau=1e6")  # nothing is sent
    run(model, optimizer, Ledger(model), 3)
    before = shares_of(optimizer)
    other = net()
    resumed = distributed(other, "vgc:alpha=1e9")
    resumed.load_state_dict(optimizer.state_dict())
    resumed.zero_grad()
    (sum(p.sum() for p in other.parameters()) * 0.0).backward()
    resumed.synchronize()
    for name, tensors in states_of(resumed).items():
        residual, variance = tensors["residual"], tensors["variance"]
        assert torch.allclose(variance, 0.999 * residual.square(), rtol=1e-12, atol=0), name
        assert torch.allclose(residual[: before[name].numel()], 4 * before[name].reshape(-1)), name
    assert all(not p.grad.any() for p in other.parameters())


def words():
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 8)).double()


def run_words(model, optimizer, ledger, steps, seed=0):
    """Rank 2 looks nothing up in every third step."""
    generator = torch.Generator().manual_seed(100 * seed + hvd().rank())
    for step in range(steps):
        tokens = torch.randint(0, 300, (2, 5), generator=generator)
        twin = twin_of(model)
        optimizer.zero_grad()
        if hvd().rank() != 2 or step % 3 != 1:
            for m in (twin, model):
                m(tokens).sin().mean(0).sum().backward()
        optimizer.synchronize()
        ledger.add_gradients(twin, 1 / hvd().size())
        ledger.add_applied()
        with optimizer.skip_synchronize():
            optimizer.step()


def check_rows_of_an_embedding_wait_until_they_are_looked_up_again():
    for method in ("chunk_topk:chunk=64,k=4", "chunk_topk:chunk=48,k=4,bits=3,combine=gather"):
        model = words()
        optimizer, ledger = distributed(model, method), Ledger(model)
        run_words(model, optimizer, ledger, 9)
        row = optimizer.plan()[0]
        assert row["method"] == "chunk_topk" and "rows that were looked up" in row["why"], row
        assert row["bytes"] < row["dense_bytes"] / 50, row
        ledger.assert_balanced(optimizer, method)
        hvd().check_replicas(model)
        # By other chunks, and by another method.
        for new in ("chunk_topk:chunk=128,k=4", "topk"):
            other = words()
            other.load_state_dict(model.state_dict())
            resumed = distributed(other, new)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            after = copy.deepcopy(ledger)
            after.model = other
            run_words(other, resumed, after, 4, seed=1)
            after.assert_balanced(resumed, f"{method} -> {new}")
            hvd().check_replicas(other)


def check_ranks_that_join():
    for method in METHODS[:5]:
        model = net()
        optimizer, ledger = distributed(model, method), Ledger(model)
        for epoch in range(2):
            # Every epoch another rank has less.
            run(model, optimizer, ledger, 4 if hvd().rank() == epoch else 7, seed=epoch)
            hvd().join()
            # What was applied without this rank it has not seen.
            hvd().broadcast_parameters(model.state_dict(), 3)
            applied = {n: t.clone() for n, t in ledger.applied.items()}
            hvd().broadcast_parameters(applied, 3)
            ledger.applied = applied
            ledger.assert_balanced(optimizer, f"{method} epoch {epoch}")
        hvd().check_replicas(model)


def check_other_numbers_of_ranks():
    all_ranks = hvd().global_process_set
    pair = hvd().add_process_set([1, 3])
    for method in METHODS:
        ledger, saved = Ledger(net()), None
        for number, place in enumerate((all_ranks, pair, all_ranks)):
            everybody = [one for one in hvd().allgather_object(saved) if one is not None]
            if not place.included():
                saved = None
                continue
            model = net()
            optimizer = distributed(model, method, process_set=place)
            if everybody:
                optimizer.load_state_dict(hvd().merge_states(everybody, place.size())[place.rank()])
            ledger.model = model
            run(model, optimizer, ledger, 7 if number == 0 else 3, seed=number)
            saved = copy.deepcopy(optimizer.state_dict())
        # Rank 1 was in both sets.
        hvd().broadcast_parameters(ledger.applied, 1)
        ledger.assert_balanced(optimizer, method)
    hvd().remove_process_set(pair)


def check_a_state_has_two_numbers_per_element_or_one():
    for method, floats in (
        ("vgc", 2),
        ("vgc_strom", 2),
        ("strom", 1),
        ("topk", 1),
        ("topk:error_feedback=False", 0),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 50), nn.LayerNorm(50), nn.Linear(50, 200))
        optimizer = distributed(model, method)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 100)).sin().sum().backward()
            optimizer.step()
        rows = [row for row in optimizer.plan() if row["method"] != "dense"]
        elements = sum(dict(model.named_parameters())[row["name"]].numel() for row in rows)
        states = states_of(optimizer)
        # Beside them two numbers in double for a request, of which tau is made.
        per_element = [t for s in states.values() for key, t in s.items() if key != "tau"]
        assert sum(t.numel() * t.element_size() for t in per_element) == floats * 4 * elements, method
        assert all(s["tau"].numel() == 2 for s in states.values() if "tau" in s)
        assert elements > 15000
