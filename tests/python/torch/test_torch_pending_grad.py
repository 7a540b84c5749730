"""Whoever uses .grad between backward() and step() gets the reduced gradient."""

import copy
import gc
import io
import warnings

import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_
    from torch.utils.checkpoint import checkpoint

    from factor_util import D
except ImportError:
    torch = None

NUM_RANKS = 3

EXACT = ("none", "exact", "dad", "edad")
LOSSY = (
    "fp16",
    "bf16",
    "int8",
    "rank_dad:rank=2",
    "powersgd",
    "vgc",
    "vgc_strom",
    "strom",
    "topk",
    "chunk_topk",
    "qsgd",
    "auto",
)

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


class Net(nn.Module if torch else object):
    """Two heads on a trunk, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.first, self.second, self.unused = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x, heads=(0, 1)):
        x = self.trunk(x)
        return sum((self.first, self.second)[head](x) for head in heads)


def net():
    torch.manual_seed(1)
    return Net().double()


def batches(step):
    """Of all ranks, in rank order."""
    generator = torch.Generator().manual_seed(step)
    return [
        3 * torch.randn(2, D, generator=generator, dtype=torch.float64) + rank for rank in range(NUM_RANKS)
    ]


def loss_of(model, batch, heads=(0, 1)):
    return model(batch, heads).sin().sum()


def distributed(model, compression="none", optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    return hvd().DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )


def assert_close(model, twin, what):
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{what} {n}: {text}"
        )


# What users do between backward() and step(); each returns what it has seen.


def clip_norm(model):
    return clip_grad_norm_(model.parameters(), 0.01)


def clip_value(model):
    clip_grad_value_(model.parameters(), 0.001)


def clip_by_hand(model):
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(min(1.0, 0.01 / norm))
    return torch.tensor(norm)


def replace(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.sign() * 0.001


def log(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).sum()


USES = (clip_norm, clip_value, clip_by_hand, replace, log)


def heads_of(rank, step):
    """Ranks differ in what they use from the third step on."""
    return (0, 1) if step < 2 else ((rank + step) % 2,)


def check_every_use_equals_one_process_on_the_joined_batch():
    rank = hvd().rank()
    for compression in (*EXACT, *LOSSY):
        for use in USES:
            model = net()
            optimizer = distributed(model, compression)
            twin = copy.deepcopy(model)
            alone = torch.optim.SGD(twin.parameters(), lr=1e-2)
            for step in range(5):
                x = batches(step)
                optimizer.zero_grad()
                loss_of(model, x[rank], heads_of(rank, step)).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    seen = use(model)
                    optimizer.step()
                hvd().check_replicas(model)
                if seen is not None:
                    everyone = hvd().allgather(seen.reshape(1), name="seen")
                    assert torch.equal(everyone, everyone[:1].expand(NUM_RANKS)), (compression, use, everyone)
                if compression not in EXACT:
                    continue
                alone.zero_grad()
                total = sum(loss_of(twin, x[r], heads_of(r, step)) for r in range(NUM_RANKS))
                (total / NUM_RANKS).backward()
                expected = use(twin)
                alone.step()
                if seen is not None:
                    torch.testing.assert_close(seen, expected)
                assert_close(model, twin, f"{compression} {use.__name__} step {step}")


def check_ranks_that_read_different_gradients():
    """A task per rank, with a head of its own. In the first step it is not known whether there will be other
    backward() calls, so the ranks wait for each other until their patience ends."""
    from dad.torch import gradient_sync

    model = net()
    optimizer = distributed(model)
    task = hvd().rank() % 2
    head = (model.first, model.second)[task]
    patience, gradient_sync._PATIENCE_SECONDS = gradient_sync._PATIENCE_SECONDS, 0.5
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batches(step)[hvd().rank()], (task,)).backward()
        seen = clip_grad_norm_(head.parameters(), 1e9)
        optimizer.step()
        everyone = hvd().allgather(seen.reshape(1), name="seen")
        torch.testing.assert_close(everyone[0], everyone[2])
        hvd().check_replicas(model)
        gradient_sync._PATIENCE_SECONDS = patience


def check_a_logger_on_one_rank():
    for compression in ("none", "dad", "rank_dad:rank=2"):
        model = net()
        optimizer = distributed(model, compression)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batches(step)[hvd().rank()], heads_of(hvd().rank(), step)).backward()
            if hvd().rank() == 1:
                log(model)
            optimizer.step()
            hvd().check_replicas(model)


def check_it_waits_for_nobody_who_does_not_look():
    """Ranks that use different parameters may talk to each other before step(), as in Horovod."""
    model = net()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        if hvd().rank() != step:  # one that has no batch
            loss_of(model, batches(step)[hvd().rank()], (hvd().rank() % 2,)).backward()
        hvd().allreduce(torch.ones(3), name="loss")
        optimizer.step()
        hvd().check_replicas(model)


def check_one_rank_may_look_before_a_collective():
    """As scripts do that log gradient norms on rank 0 and average the loss before step(). All ranks use all
    parameters here: those that a rank does not use are sent in step()."""
    model = torch.nn.Linear(D, 3).double()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batches(step)[hvd().rank()]).sin().sum().backward()
        if hvd().rank() == 0:
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        hvd().allreduce(torch.ones(3), name="loss")
        optimizer.step()
        hvd().check_replicas(model)


def check_one_rank_may_look_before_a_collective_whatever_ranks_have_used():
    """Ranks send some gradients in step() only: what they have not used, and all of a step that is observed."""
    collectives = (
        lambda: hvd().allreduce(torch.ones(3), name="loss"),
        lambda: hvd().allgather_object("loss"),
        lambda: hvd().barrier(),
        lambda: hvd().synchronize(hvd().allreduce_async(torch.ones(3), name="later")),
    )
    for compression in ("none", "rank_dad:rank=2", "auto"):
        model = net()
        optimizer = distributed(model, compression)
        for step, collective in enumerate((*collectives, collectives[0])):
            optimizer.zero_grad()
            loss_of(model, batches(step)[hvd().rank()], heads_of(hvd().rank(), step)).backward()
            if hvd().rank() == step % 2:
                log(model)
            collective()
            optimizer.step()
            hvd().check_replicas(model)


def check_a_reader_is_told_which_collective_others_wait_in():
    from dad.torch import readers

    model = net()
    optimizer = distributed(model)
    patience, readers.PATIENCE_SECONDS = readers.PATIENCE_SECONDS, 0.3
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or hvd().rank() == 0:  # else the others do not know that a step has begun
            loss_of(model, batches(step)[hvd().rank()]).backward()
        if step == 2 and hvd().rank() == 0:
            with pytest.raises(hvd().MismatchError, match=r'ranks 1, 2 waits? for this rank in "loss"'):
                log(model)
        hvd().allreduce(torch.ones(3), name="loss")
        if step == 2 and hvd().rank() == 0:
            with pytest.raises(hvd().MismatchError, match="optimizer.synchronize"):
                optimizer.step()
        else:
            optimizer.step()
        if step == 2:
            hvd().broadcast_parameters(model.state_dict(), root_rank=1)
    hvd().check_replicas(model)
    readers.PATIENCE_SECONDS = patience


def check_unscaling_and_clipping():
    rank = hvd().rank()
    model = net()
    optimizer = distributed(model)
    twin = copy.deepcopy(model)
    alone = torch.optim.SGD(twin.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(4):
        x = batches(step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x[rank], heads_of(rank, step))).backward()
        scaler.unscale_(optimizer)
        clip_norm(model)
        scaler.step(optimizer)
        scaler.update()
        alone.zero_grad()
        (sum(loss_of(twin, x[r], heads_of(r, step)) for r in range(NUM_RANKS)) / NUM_RANKS).backward()
        clip_norm(twin)
        alone.step()
        assert_close(model, twin, f"step {step}")


def check_accumulation():
    """The gradient stays local until the last pass. Heads get fewer passes than the trunk."""
    rank = hvd().rank()
    for compression in EXACT:
        model = net()
        optimizer = distributed(model, compression, backward_passes_per_step=2)
        twin = copy.deepcopy(model)
        alone = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(4):
            x = batches(step)
            optimizer.zero_grad()
            loss_of(model, x[rank], (0,)).backward()
            if compression == "none":
                local = torch.autograd.grad(loss_of(model, x[rank], (0,)), model.first.weight)[0]
                torch.testing.assert_close(model.first.weight.grad, local)
            loss_of(model, x[rank], (1,)).backward()
            clip_by_hand(model)
            optimizer.step()
            alone.zero_grad()
            total = sum(loss_of(twin, batch, (0,)) + loss_of(twin, batch, (1,)) for batch in x)
            (total / NUM_RANKS).backward()
            clip_by_hand(twin)
            alone.step()
            assert_close(model, twin, f"{compression} step {step}")


def check_closures():
    for make in (
        lambda params: torch.optim.SGD(params, lr=1e-2),
        lambda params: torch.optim.LBFGS(params, max_iter=3, lr=0.1),
    ):
        for compression in EXACT:
            model = net()
            optimizer = distributed(model, compression, make(model.parameters()))
            twin = copy.deepcopy(model)
            alone = make(twin.parameters())
            for step in range(3):
                x = batches(step)

                def closure(model=model, optimizer=optimizer, x=x):
                    optimizer.zero_grad()
                    loss = loss_of(model, x[hvd().rank()])
                    loss.backward()
                    clip_norm(model)
                    return loss

                def joined(twin=twin, alone=alone, x=x):
                    alone.zero_grad()
                    loss = sum(loss_of(twin, batch) for batch in x) / NUM_RANKS
                    loss.backward()
                    clip_norm(twin)
                    return loss

                optimizer.step(closure)
                alone.step(joined)
                assert_close(model, twin, f"{compression} step {step}")


def check_several_backward_calls_over_different_parameters():
    """Reading complete gradients between them is fine; reading one that is still to come is refused."""
    model = nn.ModuleDict({"actor": nn.Linear(D, 1), "critic": nn.Linear(D, 1)}).double()
    hvd().broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distributed(model)
    x = batches(0)

    def means(part):
        loss = sum(part(batch).sin().sum() for batch in x) / NUM_RANKS
        return torch.autograd.grad(loss, list(part.parameters()))

    for _ in range(3):
        expected = [means(model["actor"]), means(model["critic"])]
        optimizer.zero_grad()
        for part, wanted in zip(model.values(), expected, strict=True):
            part(x[hvd().rank()]).sin().sum().backward()
            for param, grad in zip(part.parameters(), wanted, strict=True):
                torch.testing.assert_close(param.grad, grad)
        optimizer.step()

    optimizer.zero_grad()
    model["actor"](x[0]).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(AssertionError, match=r"critic.*after the last backward"):
        model["critic"](x[0]).sum().backward()
    optimizer.step()
    hvd().check_replicas(model)


def check_a_step_left_out_because_of_its_norm():
    for compression in ("none", "dad", "rank_dad:rank=2"):
        model = net()
        optimizer = distributed(model, compression)
        for step in range(4):
            loss = loss_of(model, batches(step)[hvd().rank()])
            if step == 2 and hvd().rank() == 1:
                loss = loss * float("inf")
            loss.backward()
            before = copy.deepcopy(model.state_dict())
            if clip_norm(model).isfinite():
                optimizer.step()
            optimizer.zero_grad()
            is_same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert is_same == (step == 2), (compression, step)
            hvd().check_replicas(model)


def check_horovods_recipe_and_step_without_synchronizing():
    model = net()
    optimizer = distributed(model)
    for recipe in (True, False, True):
        optimizer.zero_grad()
        loss_of(model, batches(0)[hvd().rank()]).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if recipe:
                optimizer.synchronize()
            clip_norm(model)
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd().check_replicas(model)


def check_nested_backward_passes():
    """Reentrant checkpointing runs a backward pass within a node of another."""
    rank = hvd().rank()
    for compression in EXACT:
        model = net()
        optimizer = distributed(model, compression)
        twin = copy.deepcopy(model)
        alone = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(4):
            x = [batch.requires_grad_() for batch in batches(step)]
            optimizer.zero_grad()
            hidden = checkpoint(model.trunk, x[rank], use_reentrant=True)
            out = model.first(hidden) + checkpoint(model.second, hidden, use_reentrant=True)
            out.sin().sum().backward()
            clip_by_hand(model)
            optimizer.step()
            alone.zero_grad()
            (sum(loss_of(twin, batch) for batch in x) / NUM_RANKS).backward()
            clip_by_hand(twin)
            alone.step()
            assert_close(model, twin, f"{compression} step {step}")


def check_compiled_code():
    torch._dynamo.reset()

    def scale(params):
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.5)

    compiled = torch.compile(scale, backend="eager")
    for compiled_autograd in (False, True):
        model = net()
        del model.unused  # compiled autograd has no end of a pass: all parameters have to be used
        optimizer = distributed(model)
        twin = copy.deepcopy(model)
        alone = torch.optim.SGD(twin.parameters(), lr=1e-2)

        @torch.compile(backend="eager")
        def backward(x, model=model):
            model(x).sin().sum().backward()

        for step in range(4):
            x = batches(step)
            optimizer.zero_grad()
            with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
                backward(x[hvd().rank()])
            compiled(list(model.parameters()))
            optimizer.step()
            alone.zero_grad()
            (sum(twin(batch).sin().sum() for batch in x) / NUM_RANKS).backward()
            scale(list(twin.parameters()))
            alone.step()
            assert_close(model, twin, f"compiled autograd {compiled_autograd}, step {step}")


def check_parameters_remain_what_they_are():
    model = net()
    optimizer = distributed(model)
    loss_of(model, batches(0)[hvd().rank()]).backward()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.first, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for module in (copied, loaded):
        assert all(type(param) is nn.Parameter for param in module.parameters())
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    optimizer.step()
    assert all(type(param) is nn.Parameter for param in model.parameters())

    loss_of(model, batches(0)[hvd().rank()]).backward()
    hvd().barrier()
    del optimizer
    gc.collect()
    assert all(type(param) is nn.Parameter for param in model.parameters())


def check_backward_to_a_part_of_the_parameters():
    rank = hvd().rank()
    for compression in EXACT:
        model = net()
        optimizer = distributed(model, compression)
        twin = copy.deepcopy(model)
        alone = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(4):
            x = batches(step)
            optimizer.zero_grad()
            loss = loss_of(model, x[rank])
            parts = (model.trunk, model.first) if step % 2 else (model.first,)
            loss.backward(inputs=[p for part in parts for p in part.parameters()], retain_graph=True)
            if step == 3:
                loss.backward(inputs=list(model.second.parameters()))
            clip_by_hand(model)
            optimizer.step()
            alone.zero_grad()
            parts = [twin.first, *([twin.trunk] if step % 2 else []), *([twin.second] if step == 3 else [])]
            total = sum(loss_of(twin, batch) for batch in x) / NUM_RANKS
            total.backward(inputs=[p for part in parts for p in part.parameters()])
            clip_by_hand(twin)
            alone.step()
            assert_close(model, twin, f"{compression} step {step}")


def check_ranks_that_have_joined():
    for compression in ("none", "dad", "rank_dad:rank=2"):
        model = net()
        optimizer = distributed(model, compression)
        for step in range(2 + hvd().rank()):
            optimizer.zero_grad()
            loss_of(model, batches(step)[hvd().rank()]).backward()
            clip_norm(model)
            optimizer.step()
        last = hvd().join()
        assert last == NUM_RANKS - 1
        hvd().broadcast_parameters(model.state_dict(), root_rank=last)
        optimizer.zero_grad()
        loss_of(model, batches(9)[hvd().rank()]).backward()
        clip_norm(model)
        optimizer.step()
        hvd().check_replicas(model)


def check_a_rank_that_leaves():
    model = net()
    optimizer = distributed(model)
    if hvd().rank() != 1:
        loss_of(model, batches(0)[0]).backward()
        with pytest.raises(hvd().HorovodInternalError, match="rank 1"):
            clip_norm(model)
        with pytest.raises(hvd().HorovodInternalError, match="rank 1"):
            optimizer.step()
    hvd().shutdown()
    hvd().init()
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batches(step)[hvd().rank()]).backward()
        clip_norm(model)
        optimizer.step()
        hvd().check_replicas(model)


def check_what_goes_wrong_is_raised_to_the_reader_and_by_step():
    model = net()
    optimizer = distributed(model)
    options = {"op": hvd().Sum} if hvd().rank() == 1 else {}
    other = distributed(copy.deepcopy(model), **options)
    for wrong in (other, optimizer):
        params = [param for group in wrong.param_groups for param in group["params"]]
        for step in range(2):
            wrong.zero_grad()
            x = batches(step)[hvd().rank()]
            sum(100 * (param * x.sum()).sum() for param in params).backward()
            if wrong is other:
                with pytest.raises(hvd().HorovodInternalError, match=r"op|reduce|Sum"):
                    clip_grad_norm_(params, 1.0)
                with pytest.raises(hvd().HorovodInternalError):
                    wrong.step()
            else:
                clip_grad_norm_(params, 1.0)
                wrong.step()
    hvd().check_replicas(model)
