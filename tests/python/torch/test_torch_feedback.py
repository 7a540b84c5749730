"""Nothing is lost by methods with error feedback: what was applied and what is kept add up to all gradients,
across scaled losses, skipped steps, new plans, checkpoints, joins and another number of ranks."""

import copy
import logging
import tempfile
import uuid
from pathlib import Path

import pytest

from util import check_names, hvd, launched_once

try:
    import numpy as np
    import torch
    from torch import nn

    from dad.state import states
    from dad.state.state_bytes import from_bytes
    from dad.torch.checkpoint import as_arrays, as_tensors, read
except ImportError:
    torch = None

NUM_RANKS = 4
D = 32

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


METHODS = [
    "rank_dad:rank=2,combine=gather",
    "rank_dad:rank=2,combine=owner",
    "rank_dad:rank=2,combine=power",
    "rank_dad:rank=1,combine=owner,wire=bf16,rest=none",
    "int8",
    "auto",
]


def net():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)
    ).double()


def shares_of(optimizer):
    return as_tensors(states.saved_shares(as_arrays(optimizer.state_dict()["dad"])))


class Ledger:
    """All gradients on the one side, what was applied and what is kept on the other."""

    def __init__(self, model):
        self.model = model
        self.total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.applied = copy.deepcopy(self.total)

    def add_gradients(self, twin, weight, except_for=()):
        """This rank's, which counts so much; the ranks are added up in the end."""
        for name, param in twin.named_parameters():
            if param.grad is not None and name not in except_for:
                self.total[name] += weight * param.grad

    def add_applied(self):
        for name, param in self.model.named_parameters():
            self.applied[name] += param.grad

    def assert_balanced(self, optimizer, what="", kept_something=True, process_set=None):
        process_set = process_set or hvd().global_process_set
        total = hvd().grouped_allreduce(list(self.total.values()), op=hvd().Sum, process_set=process_set)
        shares = shares_of(optimizer)
        mine = [shares.get(n, torch.zeros_like(t)).reshape(t.shape) for n, t in self.total.items()]
        kept = hvd().grouped_allreduce(mine, op=hvd().Sum, process_set=process_set)
        for name, all_gradients, rest in zip(self.total, total, kept, strict=True):
            scale = all_gradients.abs().max().clamp(min=1e-30)
            error = (self.applied[name] + rest - all_gradients).abs().max() / scale
            assert error < 1e-12, f"{what}: {name}: {error:.2e}"
        if kept_something:
            assert max(rest.abs().max() for rest in kept) > 0, what


def distributed(model, method, **options):
    return hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), compression=method, **options
    )


def twin_of(model):
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.grad = None
    return twin


def run(model, optimizer, ledger, steps, rows=None, weight=None, seed=0):
    """Steps, with the ledger kept. rows[rank]: samples of a rank; weight: of this rank in the result."""
    place = optimizer._dad.process_set
    rows = rows or [2] * place.size()
    generator = torch.Generator().manual_seed(100 * seed + place.rank())
    for _ in range(steps):
        x = torch.randn(rows[place.rank()], D, generator=generator, dtype=torch.float64)
        twin = twin_of(model)
        optimizer.zero_grad()
        if len(x):
            for m in (twin, model):
                m(x).sin().mean(0).sum().backward()
        optimizer.synchronize()
        ledger.add_gradients(twin, 1 / place.size() if weight is None else weight)
        ledger.add_applied()
        with optimizer.skip_synchronize():
            optimizer.step()


def check_what_is_applied_and_what_is_kept_add_up():
    for method in METHODS:
        for rows in ([2, 2, 2, 2], [3, 1, 0, 2]):
            model = net()
            optimizer, ledger = distributed(model, method), Ledger(model)
            run(model, optimizer, ledger, 9, rows)
            ledger.assert_balanced(optimizer, method)
            hvd().check_replicas(model)


def check_sums_and_predivided_means():
    for method in METHODS[:3] + METHODS[4:5]:
        model = net()
        optimizer, ledger = distributed(model, method, op=hvd().Sum), Ledger(model)
        run(model, optimizer, ledger, 6, weight=1.0)
        ledger.assert_balanced(optimizer, f"sum, {method}")
        model = net()
        optimizer, ledger = distributed(model, method, gradient_predivide_factor=2.0), Ledger(model)
        run(model, optimizer, ledger, 6)
        ledger.assert_balanced(optimizer, f"predivided, {method}")


def check_weighted_means_of_batches_that_change():
    for method in METHODS[:3] + METHODS[4:5]:
        model = net()
        optimizer, ledger = distributed(model, method, weighted=True), Ledger(model)
        for seed, rows in enumerate(([2, 2, 2, 2], [5, 1, 0, 2], [1, 1, 1, 9])):
            run(model, optimizer, ledger, 2, rows, rows[hvd().rank()] / sum(rows), seed)
        ledger.assert_balanced(optimizer, method)


def check_what_was_kept_goes_over_to_a_new_plan():
    for method in METHODS[:2]:
        torch.manual_seed(4)
        model = nn.ParameterDict({"w": torch.randn(D, D), "b": torch.randn(D)}).double()
        optimizer, ledger = distributed(model, method), Ledger(model)
        for step in range(8):
            # The bias comes late, with so many rows that a new plan is made, in which it rides.
            x = torch.randn(2 if step < 4 else 40, D, dtype=torch.float64) + hvd().rank()
            twin = twin_of(model)
            optimizer.zero_grad()
            for m in (twin, model):
                nn.functional.linear(x, m["w"], m["b"] if step >= 4 else None).sin().sum().backward()
            optimizer.synchronize()
            ledger.add_gradients(twin, 1 / 4)
            ledger.add_applied()
            with optimizer.skip_synchronize():
                optimizer.step()
            ledger.assert_balanced(optimizer, f"{method} step {step}", kept_something=step > 0)
        # Between hosts there are no rows that a new plan could be for.
        assert optimizer._dad.circle.hosts or optimizer.plan()[0]["why"] == "rides with w"


def scaled_steps(method, overflows, growth_interval=3, steps=9):
    """Under GradScaler. overflows: step -> (rank, names of tensors whose gradients overflow there)."""
    model = net()
    optimizer, ledger = distributed(model, method), Ledger(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth_interval)
    for step in range(steps):
        torch.manual_seed(10 * step + hvd().rank())
        x = torch.randn(2, D, dtype=torch.float64)
        twin = twin_of(model)
        twin(x).sin().sum().backward()
        rank, names = overflows.get(step, (0, ()))
        optimizer.zero_grad()
        loss = model(x).sin().sum()
        if names and rank == hvd().rank():
            # Only these gradients are infinite: the rows of their layers are.
            for name in names:
                param = dict(model.named_parameters())[name]
                loss = loss + (param.reshape(-1)[0] * float("inf"))
        scaler.scale(loss).backward()
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        skipped = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert skipped == bool(names), (method, step)
        assert len(set(hvd().allgather_object(scaler._found_inf_per_device(optimizer) is not None))) == 1
        scaler.update()
        assert len(set(hvd().allgather_object(scaler.get_scale()))) == 1
        # A bias shares the fate of its weight.
        lost = {n for n, p in model.named_parameters() if not p.grad.isfinite().all()}
        assert lost >= set(names)
        ledger.add_gradients(twin, 1 / 4, except_for=lost)
        if not skipped:
            ledger.add_applied()
        hvd().check_replicas(model)
        if optimizer._dad.plan is not None and not names:
            ledger.assert_balanced(optimizer, f"{method} step {step}")
    return scaler


def check_scaled_losses_that_grow():
    for method in METHODS[:3] + METHODS[4:5]:
        scaler = scaled_steps(method, {}, growth_interval=2)
        assert scaler.get_scale() > 64


def check_an_overflow_on_one_rank_is_skipped_by_all_and_nothing_is_lost():
    # "Of a tensor that overflows nothing is kept; the others get back what was not applied."
    for method in METHODS[:2] + METHODS[4:5]:
        scaled_steps(method, {4: (1, ("0.weight",))})
        scaled_steps(method, {3: (2, ("4.weight", "3.bias")), 4: (0, ("0.bias",)), 6: (3, ("2.weight",))})


def check_the_first_steps_may_overflow():
    for method in METHODS[:2] + METHODS[4:5]:
        scaled_steps(method, {0: (3, ("2.weight",)), 1: (0, ("2.weight",))})


def check_a_checkpoint_continues_with_the_same_bits():
    for method in [*METHODS, "rank_dad:rank=2,residual=rows", "rank_dad:rank=2,error_feedback=False", "edad"]:
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
        assert resumed.plan()[0]["method"] == optimizer.plan()[0]["method"]
        if method in METHODS:
            for name in ledger.total:  # of both parts together
                second.total[name], second.applied[name] = ledger.total[name], ledger.applied[name]
            second.assert_balanced(resumed, method)


def check_a_checkpoint_has_warm_starts_where_nothing_else_is_kept():
    """More rows than columns: directions are found by iteration, from those of the step before."""
    method = "rank_dad:rank=2,error_feedback=False,wire=fp32,rest=none"

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(64, 16) + hvd().rank()).square().mean().backward()
            optimizer.step()

    model = nn.Linear(16, 24)
    optimizer = distributed(model, method)
    train(model, optimizer, range(4))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    keys = saved["dad"]["states"].get("weight", ())
    assert any("warm_start" in key for key in keys) == optimizer._dad.circle.keeps
    train(model, optimizer, range(4, 7))
    other = nn.Linear(16, 24)
    other.load_state_dict(weights)
    resumed = distributed(other, method)
    resumed.load_state_dict(saved)
    train(other, resumed, range(4, 7))
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def check_a_checkpoint_that_only_the_root_has_read():
    """As in scripts that broadcast what rank 0 has loaded: its plan counts, and its residuals."""
    model = net()
    optimizer = distributed(model, METHODS[1])
    run(model, optimizer, Ledger(model), 4)
    saved = copy.deepcopy(optimizer.state_dict())
    other = net()
    resumed = distributed(other, METHODS[1])
    if hvd().rank() == 0:
        resumed.load_state_dict(saved)
    hvd().broadcast_parameters(other.state_dict(), 0)
    hvd().broadcast_optimizer_state(resumed, 0)
    ledger = Ledger(other)
    for name, share in shares_of(resumed).items():
        assert hvd().rank() == 0, "residuals of another rank"
        ledger.total[name] += share.reshape(ledger.total[name].shape)
    run(other, resumed, ledger, 4)
    ledger.assert_balanced(resumed)
    # In the middle of a run too.
    hvd().broadcast_optimizer_state(resumed, 0)
    run(other, resumed, Ledger(other), 3)
    hvd().check_replicas(other)


def check_a_checkpoint_of_another_method():
    for old, new in (
        (METHODS[1], "int8"),
        ("int8", METHODS[0]),
        (METHODS[0], METHODS[2]),
        (METHODS[1], "none"),
        (METHODS[1], "dad"),
    ):
        model = net()
        optimizer, ledger = distributed(model, old), Ledger(model)
        run(model, optimizer, ledger, 5)
        other = net()
        resumed = distributed(other, new)
        resumed.load_state_dict(optimizer.state_dict())
        ledger.model = other
        run(other, resumed, ledger, 4)
        if new != "none":  # what a dense optimizer finds it does not know
            ledger.assert_balanced(resumed, f"{old} -> {new}", kept_something=new != "dad")


def check_ranks_that_join():
    for method in [*METHODS[:3], METHODS[4], "auto", "edad"]:
        model = net()
        optimizer, ledger = distributed(model, method), Ledger(model)
        for epoch in range(3):
            # Every epoch another rank has less.
            steps = 4 if hvd().rank() == epoch else 7
            run(model, optimizer, ledger, steps, seed=epoch)
            hvd().join()
            # What was applied without this rank it has not seen.
            hvd().broadcast_parameters(model.state_dict(), 3)
            applied = {n: t.clone() for n, t in ledger.applied.items()}
            hvd().broadcast_parameters(applied, 3)
            ledger.applied = applied
            keeps = method != "edad" and not (method == "auto" and epoch == 0)
            ledger.assert_balanced(optimizer, f"{method} epoch {epoch}", kept_something=keeps)
        hvd().check_replicas(model)


def check_other_numbers_of_ranks():
    all_ranks = hvd().global_process_set
    some = hvd().add_process_set([0, 1, 2])
    pair = hvd().add_process_set([1, 3])
    for method in [*METHODS, "rank_dad:rank=2,combine=owner,residual=rows"]:
        ledger = Ledger(net())
        saved = None
        for number, place in enumerate((all_ranks, some, pair, all_ranks)):
            everybody = hvd().allgather_object(saved)
            everybody = [one for one in everybody if one is not None]
            if not place.included():
                saved = None
                continue
            model = net()
            optimizer = distributed(model, method, process_set=place)
            if everybody:
                optimizer.load_state_dict(hvd().merge_states(everybody, place.size())[place.rank()])
            # Residuals as rows are cut to so many rows in every step.
            exact = "rows" not in method
            ledger.model = model
            run(model, optimizer, ledger, 7 if number == 0 else 3, seed=number)
            saved = copy.deepcopy(optimizer.state_dict())
            if place is not all_ranks:
                continue
        # Ranks that were outside have not seen what was applied: 1 was in all sets.
        hvd().broadcast_parameters(ledger.applied, 1)
        if exact:
            ledger.assert_balanced(optimizer, method)
    hvd().remove_process_set(some)
    hvd().remove_process_set(pair)


def check_more_ranks_without_merging():
    """A rank goes on with the state of the rank of its number."""
    pair = hvd().add_process_set([0, 1])
    ledger, saved = Ledger(net()), None
    if pair.included():
        optimizer = distributed(ledger.model, METHODS[1], process_set=pair)
        run(ledger.model, optimizer, ledger, 5)
        saved = copy.deepcopy(optimizer.state_dict())
    saved = hvd().allgather_object(saved)[min(hvd().rank(), 1)]
    model = net()
    optimizer = distributed(model, METHODS[1])
    optimizer.load_state_dict(saved)
    ledger.model = model
    run(model, optimizer, ledger, 4)
    hvd().broadcast_parameters(ledger.applied, 0)
    ledger.assert_balanced(optimizer)
    hvd().remove_process_set(pair)


def check_states_that_do_not_belong_together_are_refused():
    model = net()
    optimizer = distributed(model, "int8")
    run(model, optimizer, Ledger(model), 2)
    everybody = hvd().allgather_object(optimizer.state_dict())
    assert [s["dad"]["rank"] for s in hvd().merge_states(everybody[::-1], 4)] == [0, 1, 2, 3]
    for wrong in (everybody[:3], [*everybody[:3], everybody[0]], []):
        with pytest.raises(ValueError, match="states"):
            hvd().merge_states(wrong, 2)
    with pytest.raises(ValueError, match="new_size=0"):
        hvd().merge_states(everybody, 0)
    plain = [{"state": {}, "param_groups": []}] * 4
    assert hvd().merge_states(plain, 2) == plain[:2]


def shared_path():
    """A file that all ranks of this launch see."""
    folder = Path(tempfile.gettempdir())
    return folder / hvd().broadcast_object(f"dad-{uuid.uuid4().hex}.pt")


def total_shares(saved):
    """What is still to be applied, over all ranks."""
    total = {}
    for one in saved:
        states.add_shares(total, states.saved_shares(one))
    return total


def check_one_file_has_the_state_of_all_ranks():
    path = shared_path()
    pair = hvd().add_process_set([1, 3])
    try:
        for method in METHODS:
            model = net()
            optimizer = distributed(model, method)
            ledger = Ledger(model)
            run(model, optimizer, ledger, 7)
            before = optimizer.state_dict()["dad"]
            hvd().save(path, model=model, optimizer=optimizer, epoch=7)
            expected = total_shares(hvd().allgather_object(as_arrays(before)))
            for size in (1, 2, 3, 4, 7):
                _, merged = read(path, size)
                assert len(merged) == size
                found = total_shares(map(from_bytes, merged))
                assert found.keys() == expected.keys() and found, method
                for name, share in found.items():
                    assert share.dtype == np.float64
                    np.testing.assert_allclose(share, expected[name], rtol=1e-12, atol=1e-14)
            # On the same ranks: the same bits.
            other = net()
            resumed = distributed(other, method)
            assert hvd().load(path, model=other, optimizer=resumed) == {"epoch": 7}
            after = resumed.state_dict()["dad"]
            assert as_arrays(after)["states"].keys() == as_arrays(before)["states"].keys()
            run(model, optimizer, ledger, 2, seed=1)
            run(other, resumed, Ledger(other), 2, seed=1)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b), method
            # On fewer ranks nothing is lost.
            if pair.included():
                fewer = net()
                optimizer = distributed(fewer, method, process_set=pair)
                hvd().load(path, model=fewer, optimizer=optimizer)
                mine = total_shares([as_arrays(optimizer.state_dict()["dad"])])
                parts = [torch.from_numpy(mine.get(n, np.zeros_like(v))) for n, v in expected.items()]
                for part, share in zip(parts, expected.values(), strict=True):
                    whole = hvd().allreduce(part, op=hvd().Sum, process_set=pair)
                    np.testing.assert_allclose(whole.numpy(), share, rtol=1e-12, atol=1e-14)
            hvd().barrier()
    finally:
        hvd().remove_process_set(pair)
        path.unlink(missing_ok=True)


def check_a_checkpoint_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_one():
    path = shared_path()
    model = net()
    optimizer = distributed(model, "int8")
    run(model, optimizer, Ledger(model), 2)
    hvd().save(path, model=model, optimizer=optimizer, epoch=1)
    nowhere = path.with_name("no such folder") / "run.pt"
    with pytest.raises(hvd().CheckpointError, match=r"rank 0 failed to write .*no such folder"):
        hvd().save(nowhere, model=model, optimizer=optimizer)
    if hvd().rank() == 2:
        optimizer.state_dict = lambda: 1 / 0
    with pytest.raises(hvd().CheckpointError, match="rank 2 failed to read its state: ZeroDivisionError"):
        hvd().save(path, model=model, optimizer=optimizer, epoch=2)
    if hvd().rank() == 0:
        model.state_dict = lambda: {"unpicklable": lambda: None}
    with pytest.raises(hvd().CheckpointError, match="rank 2 failed"):
        hvd().save(path, model=model, optimizer=optimizer, epoch=3)
    with pytest.raises(hvd().CheckpointError, match="rank 0 failed to write"):
        hvd().save(path, model=model, epoch=4)
    assert hvd().load(path)["epoch"] == 1
    assert not list(path.parent.glob(f".{path.stem}.*")), "a temporary file was left"
    with pytest.raises(hvd().CheckpointError, match="rank 0 failed to read .*no such folder"):
        hvd().load(nowhere)
    hvd().barrier()
    path.unlink(missing_ok=True)


def check_a_state_of_another_rank_is_told():
    model = net()
    optimizer = distributed(model, "int8")
    run(model, optimizer, Ledger(model), 2)
    everybody = hvd().allgather_object(optimizer.state_dict())

    class Warnings(logging.Handler):
        messages: list = []

        def emit(self, record):
            self.messages.append(record.getMessage())

    handler = Warnings()
    logging.getLogger("dad").addHandler(handler)
    try:
        optimizer.load_state_dict(everybody[hvd().rank()])
        assert not handler.messages
        optimizer.load_state_dict(everybody[0])
        said = [one for one in handler.messages if f"rank {hvd().rank()} loads" in one]
        assert len(said) == (hvd().rank() > 0), handler.messages
        assert all("of rank 0" in one and "hvd.save(" in one for one in said), said
    finally:
        logging.getLogger("dad").removeHandler(handler)
