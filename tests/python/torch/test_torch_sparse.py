"""Sparse methods, qsgd and powersgd through DistributedOptimizer: increments of r and v against gradients of single
samples, replicas, optimizers, plans."""

import copy
import math
import os

import pytest

import dad
from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    torch = None

NUM_RANKS = 3

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


METHODS = [
    "vgc",
    "vgc:alpha=1.5,variance=row,coding=word,error_feedback=True",
    "vgc_strom:tau=1.0",
    "vgc_strom:tau_absolute=0.001,coding=word",
    "strom:tau=1.0",
    "strom:tau_absolute=0.001",
    "topk:ratio=0.02",
    "chunk_topk:chunk=128,k=8",
    "topk:ratio=0.02,error_feedback=False",
    "qsgd",
    "qsgd:bits=1",
    "powersgd:rank=2",
    "powersgd:rank=2,error_feedback=False",
]
NOTHING_SENT = "vgc:alpha=1e30"


# Models


def mlp():
    return nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, groups=2, bias=False),
            nn.ReLU(),
        )
        self.norm = nn.LayerNorm(12 * 9)
        self.head = nn.Linear(12 * 9, 10)

    def forward(self, x):
        return self.head(self.norm(self.body(x).flatten(1)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, x):
        return self.head(self.layer(self.embed(x))).mean(1)


class Recurrent(nn.Module):
    """Weights that are used for each place of a sequence, and tokens that stand for nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=3)
        self.body = nn.GRU(16, 20, batch_first=True)
        self.head = nn.Linear(20, 10)

    def forward(self, x):
        return self.head(self.body(self.embed(x))[0][:, -1])


def batch_of(model, samples, generator, dtype):
    if isinstance(model, Transformer | Recurrent):
        return torch.randint(30, (samples, 6), generator=generator)
    shape = (2, 8, 8) if isinstance(model, Cnn) else (20,)
    return torch.randn(samples, *shape, generator=generator, dtype=dtype)


def labels_of(samples, generator):
    return torch.randint(10, (samples,), generator=generator)


def make(kind, dtype=None):
    torch.manual_seed(3)
    return kind().to(dtype or torch.float32)


def distributed(model, method, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    return hvd().DistributedOptimizer(optimizer, model.named_parameters(), compression=method, **options)


def train(model, optimizer, steps, seed=0, samples=4, passes=1):
    generator = torch.Generator().manual_seed(100 * seed + hvd().rank())
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            x, y = batch_of(model, samples, generator, dtype), labels_of(samples, generator)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hvd().check_replicas(model)
    return losses


# Replicas and optimizers


def check_all_ranks_have_the_same_bits_in_every_step():
    for kind in (mlp, Cnn, Transformer):
        for method in METHODS:
            model = make(kind)
            train(model, distributed(model, method), 4)
            assert all(p.isfinite().all() for p in model.parameters()), (kind, method)


def check_optimizers_of_every_kind():
    def optimizers(params):
        params = list(params)
        yield torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)
        yield torch.optim.Adam(params, lr=1e-3)
        yield torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2)

    for method in ("vgc", "vgc_strom:tau=1.0", "strom:tau=1.0", "topk:ratio=0.1", "qsgd"):
        for number in range(3):
            model = make(mlp)
            optimizer = list(optimizers(model.parameters()))[number]
            losses = train(model, distributed(model, method, optimizer), 5)
            assert all(math.isfinite(loss) for loss in losses), (method, number)


def check_a_model_learns():
    """One batch again and again: the loss falls as with dense gradients, if later."""
    for method in ("none", "vgc", "vgc_strom:tau=1.0", "strom:tau=1.0", "topk:ratio=0.1", "qsgd", "powersgd"):
        model = make(mlp)
        optimizer = distributed(model, method, torch.optim.SGD(model.parameters(), lr=0.2))
        generator = torch.Generator().manual_seed(hvd().rank())
        x, y = batch_of(model, 8, generator, torch.float32), labels_of(8, generator)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        assert loss.item() < 1.0, (method, loss.item())


def check_warm_up_steps_are_dense():
    for method in ("vgc", "strom", "topk", "qsgd", "powersgd", "vgc_strom"):
        model, twin = make(mlp), make(mlp)
        optimizer = distributed(model, f"{method}:warmup_steps=2")
        dense = distributed(twin, "none")
        train(model, optimizer, 2)
        train(twin, dense, 2)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), method
        assert {row["method"] for row in optimizer.plan()} == {"dense"}
        train(model, optimizer, 2)
        assert optimizer.plan()[0]["method"] == method


def check_one_rank_alone_has_its_own_gradient():
    alone = hvd().add_process_set([1])
    for method in METHODS if alone.included() else ():
        model = make(mlp)
        optimizer = distributed(model, method, process_set=alone)
        twin = copy.deepcopy(model)
        x = torch.randn(4, 20)
        for m in (model, twin):
            m(x).sin().sum().backward()
        optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), method
    hvd().remove_process_set(alone)


# Increments of r and v


def gradients_of_samples(model, x, y):
    """By parameter: the gradients of the samples' parts of the mean loss."""
    model = copy.deepcopy(model)
    all_samples = {name: [] for name, _ in model.named_parameters()}
    for z in range(len(x)):
        model.zero_grad(set_to_none=True)
        (F.cross_entropy(model(x[z : z + 1]), y[z : z + 1]) / len(x)).backward()
        for name, p in model.named_parameters():
            all_samples[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(grads) for name, grads in all_samples.items()}


def state_after_one_step(model, method, batches):
    """r and v by tensor; a pass for each batch. Nothing is sent, so v has faded once."""
    optimizer = distributed(model, method, backward_passes_per_step=len(batches))
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    assert all(not p.grad.any() for p in model.parameters()), "nothing is sent"
    return optimizer, by_tensor(optimizer)


def by_tensor(optimizer):
    saved = optimizer.state_dict()["dad"]
    shapes = {slot.name: slot.param.shape for slot in optimizer._dad.slots.values()}
    found = {}
    for choice in optimizer._dad.plan.choices:
        if choice.kind != "sparse":
            continue
        (weight, bias), *_ = choice.own()
        names = [weight] if bias is None else [weight, bias]
        sizes = [shapes[name].numel() for name in names]
        tensors = saved["states"][weight]
        for i, name in enumerate(names):
            r, v = (tensors[key].split(sizes)[i].reshape(shapes[name]) for key in ("residual", "variance"))
            found[name] = (r, v / 0.999)
    return found


def assert_close(a, b, where):
    scale = max(b.abs().max().item(), 1e-300)
    assert (a - b).abs().max().item() <= 1e-11 * scale, f"{where}: {(a - b).abs().max().item() / scale:.1e}"


def check_increments_over_samples_are_those_of_single_samples():
    """Of every tensor: weights, biases, norms, embeddings, attention, an RNN; over one pass and over two."""
    generator = torch.Generator().manual_seed(50 + hvd().rank())
    for kind in (mlp, Cnn, Transformer, Recurrent):
        for passes in (1, 2):
            model = make(kind, torch.float64)
            batches = [
                (batch_of(model, samples, generator, torch.float64), labels_of(samples, generator))
                for samples in (3, 5)[:passes]
            ]
            singles = [gradients_of_samples(model, x, y) for x, y in batches]
            optimizer, found = state_after_one_step(model, NOTHING_SENT, batches)
            assert len(found) >= 0.8 * len(list(model.parameters())), optimizer.plan()
            why = {row["name"]: row["why"] for row in optimizer.plan()}
            for name, (r, v) in found.items():
                grads = torch.cat([of_pass[name] for of_pass in singles])
                assert_close(r, grads.sum(0), f"r of {name}")
                assert "micro-batches" not in why[name], why[name]
                assert_close(v, grads.square().sum(0), f"v of {name}: {why[name]}")


def check_increments_over_rows():
    """variance=row: every token is a sample."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 16)

        def forward(self, x):
            self.x, self.y = x, self.layer(x)
            self.y.retain_grad()
            return self.y.sin().mean(1)

    torch.manual_seed(0)
    model = Tokens().double()
    x, y = torch.randn(3, 7, 24, dtype=torch.float64) + hvd().rank(), torch.tensor([1, 2, 3])
    optimizer, found = state_after_one_step(model, NOTHING_SENT + ",variance=row", [(x, y)])
    assert optimizer.plan()[0]["why"].startswith("variance over 21 rows: 0.02 Mflop more")
    d, a = model.y.grad.flatten(0, 1), x.flatten(0, 1)
    r, v = found["layer.weight"]
    assert_close(r, d.t() @ a, "r")
    assert_close(v, d.square().t() @ a.square(), "v")
    r, v = found["layer.bias"]
    assert_close(r, d.sum(0), "r of the bias")
    assert_close(v, d.square().sum(0), "v of the bias")


class Formed(nn.Module):
    """Parameters whose gradients come formed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(40, 10))
        self.layer = nn.Linear(40, 10)

    def forward(self, x):
        return (x[:, :, None] * self.scale).sin().sum(1) + self.layer(x)


def check_micro_batches_are_samples_of_what_comes_formed():
    for passes in (1, 3):
        torch.manual_seed(0)
        model = Formed().double()
        generator = torch.Generator().manual_seed(hvd().rank())
        batches = [
            (torch.randn(4, 40, generator=generator, dtype=torch.float64), labels_of(4, generator))
            for _ in range(passes)
        ]
        grads = []
        for x, y in batches:
            twin = copy.deepcopy(model)
            F.cross_entropy(twin(x), y).backward()
            grads.append(twin.scale.grad)
        optimizer, found = state_after_one_step(model, NOTHING_SENT, batches)
        r, v = found["scale"]
        assert_close(r, sum(grads), f"r, {passes} passes")
        assert_close(v, sum(g.square() for g in grads), f"v, {passes} passes")
        why = {row["name"]: row["why"] for row in optimizer.plan()}
        assert "micro-batches" in why["scale"] and "rows" in why["layer.weight"], why
        assert (f"{passes} backward passes" if passes > 1 else "the step itself") in why["scale"], why
        # The next steps count the same way.
        first = {name: v.clone() for name, (_, v) in found.items()}
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        for name, (_, v) in by_tensor(optimizer).items():
            assert_close(v, 1.999 * first[name], f"v of {name} after two steps")


def check_scaled_losses_give_the_same_increments():
    model, scaled = make(Cnn, torch.float64), make(Cnn, torch.float64)
    generator = torch.Generator().manual_seed(hvd().rank())
    x, y = batch_of(model, 4, generator, torch.float64), labels_of(4, generator)
    _, expected = state_after_one_step(model, NOTHING_SENT, [(x, y)])
    optimizer = distributed(scaled, NOTHING_SENT)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(scaled(x), y)).backward()
    scaler.unscale_(optimizer)
    for name, (r, v) in by_tensor(optimizer).items():
        assert_close(r, expected[name][0], f"r of {name}")
        assert_close(v, expected[name][1], f"v of {name}")


# Plans


def check_plans_say_what_is_sent_and_why():
    model = make(Cnn)
    optimizer = distributed(model, "vgc")
    train(model, optimizer, 3)
    rows = {row["name"]: row for row in optimizer.plan()}
    assert (
        rows["body.0.weight"]["method"] == "vgc" and rows["body.0.bias"]["why"] == "rides with body.0.weight"
    )
    assert rows["body.0.weight"]["why"].startswith("variance over 4 samples of 64 rows: "), rows[
        "body.0.weight"
    ]
    assert "Mflop more" in rows["body.0.weight"]["why"] and " ms" in rows["body.0.weight"]["why"]
    assert rows["head.weight"]["why"].startswith("variance over 4 rows: ")
    assert "per-sample sums" in rows["norm.weight"]["why"], rows["norm.weight"]
    assert rows["head.weight"]["why"].endswith(" % sent in the last step")
    assert 0 <= dad.stats()["tensors"]["head.weight"]["effective"] <= 1

    for method, text in (("strom", "of the formed gradient"), ("topk", "of the formed gradient")):
        model = make(mlp)
        optimizer = distributed(model, method)
        train(model, optimizer, 2)
        rows = {row["name"]: row for row in optimizer.plan()}
        assert rows["0.weight"]["method"] == method and text in rows["0.weight"]["why"]
        choices = {choice.layers[0]: choice for choice in optimizer._dad.plan.choices}
        assert choices["0.bias"].option("layer") == "48x1" or choices["0.bias"].kind == "dense"

    model = make(mlp)
    optimizer = distributed(model, "powersgd:rank=2")
    train(model, optimizer, 2)
    methods = {row["name"]: row["method"] for row in optimizer.plan()}
    assert methods["0.weight"] == "powersgd" and methods["0.bias"] == "dense", methods


def check_mixtures():
    c = hvd().Compression
    mixed = c.per_layer(
        {"0.*": c.rank_dad(2), "2.weight": c.vgc(), "2.bias": c.int8(bucket=8), "*": c.topk(0.1)}
    )
    model = make(mlp)
    optimizer = distributed(model, mixed)
    train(model, optimizer, 5)
    methods = {row["name"]: row["method"] for row in optimizer.plan()}
    assert methods["0.weight"] == methods["0.bias"] == "rank_dad", methods
    assert methods["2.weight"] == "vgc" and methods["2.bias"] == "int8" and methods["4.weight"] == "topk", (
        methods
    )


def check_tensors_too_small_go_dense_with_the_reason():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = distributed(model, "vgc")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    for row in optimizer.plan():
        assert row["method"] == "dense", row
    assert "its sparse form would take" in optimizer.plan()[0]["why"]


def check_layers_that_are_used_late_or_on_some_ranks():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)

        def forward(self, x, late):
            return self.b(self.a(x)) if late else self.a(x)

    kept = ("vgc", "strom:tau=1.0", "topk:ratio=0.1", "qsgd", "powersgd:rank=2", "rank_dad:rank=2")
    # A bias that begins to ride changes the shape of what the core has, also where that is no gradient.
    lost = [f"{method},error_feedback=False" for method in kept if "=" in method and "tau" not in method]
    for method in (*kept, *lost):
        torch.manual_seed(0)
        model = Late()
        optimizer = distributed(model, method)
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 20), step > 2 and (hvd().rank() + step) % 2 == 0).square().sum().backward()
            optimizer.step()
            hvd().check_replicas(model)


def check_half_precision_models():
    for dtype in (torch.bfloat16, torch.float16):
        for method in ("vgc", "vgc_strom:tau=1.0", "strom:tau=1.0", "topk", "qsgd", "powersgd:rank=2"):
            model = make(mlp, dtype)
            train(model, distributed(model, method, backward_passes_per_step=2), 2, passes=2)
            assert all(p.isfinite().all() for p in model.parameters()), (method, dtype)
            model = make(Cnn)
            with torch.autocast("cpu", dtype):
                train(model, distributed(model, method), 3)
            assert all(p.isfinite().all() for p in model.parameters()), (method, dtype)


def check_seeds_repeat_a_run():
    def weights(seed):
        os.environ["DAD_SEED"] = seed
        try:
            model = make(mlp)
            train(model, distributed(model, "qsgd:bits=2"), 3)
        finally:
            del os.environ["DAD_SEED"]
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights("7"), weights("7"))
    assert not torch.equal(weights("7"), weights("8"))
