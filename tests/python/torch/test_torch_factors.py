"""dad, edad and exact give the dense mean, for every type of layer, and replicas stay bit-equal."""

import copy

import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn

    import factor_util as fu
    from factor_util import Case, D, assert_exact, compare, tokens, vectors
except ImportError:
    torch = None

NUM_RANKS = 4

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


def check_linear():
    assert_exact(Case(lambda: nn.Linear(D, D), vectors(D)))
    assert_exact(Case(lambda: nn.Linear(D, D, bias=False), vectors(2, 1, D)))


def check_linear_without_leading_dimensions():
    def each(model, x):
        return torch.stack([model(row) for row in x])

    assert_exact(Case(lambda: nn.Linear(D, D), vectors(D), run=each, runs_empty=False))


def check_convolutions():
    assert_exact(Case(lambda: nn.Conv1d(16, D, 5, stride=2, padding=1), vectors(16, 5)))
    assert_exact(Case(lambda: nn.Conv2d(16, D, 3, dilation=2), vectors(16, 6, 5)))
    assert_exact(Case(lambda: nn.Conv3d(8, D, 2, bias=False), vectors(8, 2, 3, 3)))


def check_grouped_convolutions():
    assert_exact(Case(lambda: nn.Conv2d(2 * D, 2 * D, 2, groups=2), vectors(2 * D, 2, 2)))
    # One channel each: factors cost more.
    assert_exact(Case(lambda: nn.Conv1d(D, D, 3, groups=D), vectors(D, 4), factors=[]))


def check_embeddings():
    assert_exact(Case(lambda: nn.Embedding(2 * D, D, padding_idx=3), tokens(2 * D, 4)))
    for mode in ("sum", "mean"):
        assert_exact(
            Case(lambda mode=mode: nn.EmbeddingBag(2 * D, D, mode=mode), tokens(2 * D, 4), runs_empty=False)
        )
    by_freq = Case(lambda: nn.Embedding(2 * D, D, scale_grad_by_freq=True), tokens(2 * D, 4), factors=[])
    assert_exact(by_freq)
    optimizer = compare(by_freq, hvd().Compression.dad())
    assert "scale_grad_by_freq" in optimizer.plan()[0]["why"]


def check_attention():
    assert_exact(Case(fu.Attention, vectors(3, D)))

    def two(samples, generator, dtype):
        return *vectors(2, D)(samples, generator, dtype), *vectors(3, D)(samples, generator, dtype)

    assert_exact(Case(fu.Attention, two))

    def other_sizes(samples, generator, dtype):
        return *vectors(2, D)(samples, generator, dtype), *vectors(3, 2 * D)(samples, generator, dtype)

    assert_exact(Case(lambda: fu.Attention(kdim=2 * D, vdim=2 * D), other_sizes))


def check_recurrent_modules():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        # Some are fused kernels: those go dense, and the plan says so.
        case = Case(lambda kind=kind: fu.Recurrent(kind), vectors(2, D), runs_empty=False)
        with fu.slow_link():
            for method in fu.methods().values():
                for dtype in fu.TOLERANCE:
                    compare(case, method, dtype, expect_factors=False)
                    optimizer = compare(case, method, dtype, [1, 3, 0, 2], expect_factors=False)
                    assert all(row["why"] for row in optimizer.plan())


def check_cells():
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        case = Case(lambda kind=kind: fu.Cell(kind), vectors(2, D), runs_empty=False)
        case.factors = ["cell.weight_ih", "cell.weight_hh"]
        assert_exact(case)


def check_transformer_layers():
    encoder = Case(
        lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True), vectors(3, D)
    )
    assert_exact(encoder)
    gelu = {"dropout": 0.0, "batch_first": True, "activation": "gelu", "norm_first": True}
    assert_exact(Case(lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, **gelu), vectors(3, D)))
    assert_exact(Case(fu.Decoder, vectors(3, D)))


def check_tied_weights():
    assert_exact(Case(fu.Tied, tokens(D, 3)))


def check_a_module_used_twice():
    assert_exact(Case(fu.Twice, vectors(D)))


def check_frozen():
    assert_exact(Case(lambda: fu.frozen("weight"), vectors(D), factors=["2.weight"]))
    assert_exact(Case(lambda: fu.frozen("bias"), vectors(D), factors=["0.weight", "2.weight"]))


def check_used_outside_of_its_module():
    case = Case(fu.Outside, vectors(D), factors=["b.weight", "c.weight"])
    assert_exact(case)


def check_weight_norm():
    # The weight is computed: its two parts have no factors.
    case = Case(
        lambda: nn.Sequential(fu.weight_norm(nn.Linear(D, D)), nn.ReLU(), nn.Linear(D, D)), vectors(D)
    )
    case.factors = ["2.weight"]
    assert_exact(case)


def check_norms_and_dropout_between_layers():
    def model():
        return nn.Sequential(
            nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)
        )

    assert_exact(Case(model, vectors(D), factors=["0.weight", "3.weight", "5.weight"]))

    def same_dropout(model, x):
        torch.manual_seed(3)
        return model(x)

    def dropout():
        return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.5), nn.Linear(D, D))

    assert_exact(Case(dropout, vectors(D), run=same_dropout))


def check_chains():
    for activation in fu.ACTIVATIONS.values():
        assert_exact(Case(lambda activation=activation: fu.Chain(activation), vectors(D)), steps=2)
    edad = compare(Case(lambda: fu.Chain(nn.GELU), vectors(D)), hvd().Compression.edad())
    assert {row["method"] for row in edad.plan()} == {"edad"}


def check_a_layer_that_only_hands_its_delta_down():
    """Its own gradient is cheaper dense, that of the layer below is not."""

    def model():
        return nn.Sequential(
            nn.Linear(4 * D, D), nn.ReLU(), nn.Linear(D, 6), nn.LeakyReLU(0.1), nn.Linear(6, 4 * D)
        )

    case = Case(model, vectors(4 * D))
    rows = {"rows": [10, 9, 0, 10], "expect_factors": False}
    for dtype in fu.TOLERANCE:
        optimizer = compare(case, hvd().Compression.edad(), dtype, **rows)
    plan = {row["name"]: row for row in optimizer.plan()}
    assert plan["0.weight"]["method"] == "edad", plan
    assert plan["2.weight"]["method"] == "dense" and "hands its delta down" in plan["2.weight"]["why"], plan


def check_a_hundred_steps():
    with fu.slow_link():
        dad, edad, exact = fu.methods().values()
        case = Case(lambda: fu.Chain(nn.ReLU), vectors(D))
        uneven = {"rows": [3, 1, 0, 2], "steps": 100, "expect_factors": False}
        compare(case, dad, torch.float32, **uneven)
        compare(case, edad, torch.float64, **uneven)
        compare(case, exact, torch.float32, **uneven)
        case = Case(lambda: nn.TransformerEncoderLayer(D, 4, D, dropout=0.0, batch_first=True), vectors(2, D))
        compare(case, hvd().Compression.edad(), torch.float32, steps=100)


def check_one_to_four_ranks_by_process_sets():
    case = Case(lambda: fu.Chain(nn.ReLU), vectors(D))
    for size in (1, 2, 3):
        some = hvd().add_process_set(list(range(size)))
        if hvd().rank() < size:
            for method in fu.methods().values():
                for rows in ([2] * size, [1, 0, 3][:size]):
                    compare(case, method, rows=rows, process_set=some, expect_factors=False)
        hvd().remove_process_set(some)


def check_no_rank_has_rows():
    case = Case(lambda: fu.Chain(nn.ReLU), vectors(D))
    optimizer = compare(case, hvd().Compression.dad(), rows=[0, 0, 0, 0], expect_factors=False)
    # Nothing was seen: a step costs a few bytes until something is.
    assert {row["why"] for row in optimizer.plan() if len(row["shape"]) > 1} == {"not used yet"}


def lossy():
    c = hvd().Compression
    return [
        c.rank_dad(2, combine="gather"),
        c.rank_dad(2, combine="owner", wire="fp32"),
        c.rank_dad(2, combine="owner", wire="bf16", rest="none"),
        c.rank_dad(2, combine="power"),
        c.rank_dad(2, combine="gather", error_feedback=False, wire="int8"),
        c.rank_dad(2, combine="owner", error_feedback=False),
        c.rank_dad(2, combine="power", error_feedback=False),
        c.rank_dad(2, residual="rows"),
        c.rank_dad(4, energy=0.5, tol=0.1, iterations=2),
        c.int8(),
        c.int8(bucket=64, error_feedback=False),
        c.auto(),
        c.dad(wire="bf16"),
        c.edad(wire="bf16"),
    ]


def check_replicas_are_bit_equal_after_every_step_of_lossy_methods():
    rows = [3, 1, 0, 2]
    for method in lossy():
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Embedding(D, D), nn.Flatten(), nn.Linear(2 * D, D), nn.ReLU(), nn.Linear(D, D)
            )
            model = model.to(dtype)
            optimizer = hvd().DistributedOptimizer(
                torch.optim.Adam(model.parameters()), model.named_parameters(), compression=method
            )
            generator = torch.Generator().manual_seed(hvd().rank())
            for _ in range(8):
                optimizer.zero_grad()
                x = torch.randint(D, (rows[hvd().rank()], 2), generator=generator)
                model(x).square().sum().backward()
                optimizer.step()
                hvd().check_replicas(model)
                assert all(p.grad.isfinite().all() for p in model.parameters())


def check_rank_dad_of_full_rank_is_exact():
    """Without feedback, nothing rounded: the truncated SVD of full rank is the gradient."""
    case = Case(lambda: nn.Linear(4 * D, 4 * D), vectors(4 * D))
    # A rank has 2 rows, all together 8.
    for combine, rank in (("gather", 2), ("owner", 8)):
        method = hvd().Compression.rank_dad(rank, combine=combine, wire="fp32", error_feedback=False)
        optimizer = compare(case, method, torch.float64, steps=4, expect_factors=False)
        assert {row["method"] for row in optimizer.plan()} == {"rank_dad"}
        assert hvd().stats()["tensors"]["weight"]["effective"] == 8


def fixed_gradient(method, rows, scales=None):
    """Ten steps of one gradient, which rank 0 has: what all apply in the end, the gradient, the effective rank."""
    torch.manual_seed(1)
    layer = nn.Linear(4 * D, 3 * D).double()
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.0), layer.named_parameters(), compression=method
    )
    x = torch.randn(rows, 4 * D, dtype=torch.float64)
    weights = torch.randn(rows, 3 * D, dtype=torch.float64)
    if scales is not None:
        weights *= torch.tensor(scales, dtype=torch.float64)[:, None]
    for _ in range(10):
        optimizer.zero_grad()
        if hvd().rank() == 0:
            (layer(x) * weights).sum().backward()
        optimizer.step()
    applied = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1) * hvd().size()
    gradient = weights.T @ torch.cat([x, torch.ones(rows, 1, dtype=torch.float64)], 1)
    return applied, gradient, hvd().stats()["tensors"]["weight"]["effective"]


def check_low_rank_keeps_the_energy_of_the_best_directions():
    for rows in (8, 2 * D):  # by QR, and by iteration from the step before
        for combine in ("gather", "owner"):
            method = hvd().Compression.rank_dad(4, combine=combine, wire="fp32", error_feedback=False)
            applied, gradient, _ = fixed_gradient(method, rows)
            best = torch.linalg.svdvals(gradient)[:4].square().sum()
            kept = gradient.square().sum() - (gradient - applied).square().sum()
            assert kept >= 0.98 * best, (rows, combine, float(kept / best))


def check_the_effective_rank_follows_the_gradient():
    scales = [1.0, 0.5, 1e-3, 1e-3, 1e-4, 1e-4]
    for options, expected in (({}, 4), ({"tol": 0.1}, 2), ({"energy": 0.5}, 1), ({"energy": 0.99}, 2)):
        method = hvd().Compression.rank_dad(4, combine="owner", wire="fp32", error_feedback=False, **options)
        assert fixed_gradient(method, 6, scales)[2] == expected, options


def check_the_weight_gradient_is_never_formed():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    for method in (
        hvd().Compression.dad(),
        hvd().Compression.edad(),
        hvd().Compression.rank_dad(2, error_feedback=False),
    ):
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=method
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, D)).sum().backward()
            # Without waiting for the exchange, as any other reader of .grad would.
            assert all(torch.Tensor.grad.__get__(p) is None for p in model.parameters())
            optimizer.step()
            assert all(p.grad is not None for p in model.parameters())


def check_rows_that_grow():
    """The plan follows; factors never cost more than dense for long."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), compression="dad"
    )
    dense_bytes = 2 * 3 / 4 * 64 * 64 * 4
    for rows, method in ((2, "dad"), (4, "dad"), (40, "dense"), (2, "dense")):
        for step in range(4):
            before = hvd().stats()["wire_bytes_sent"]
            expected = 0
            x = torch.randn(rows, 64)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.synchronize()
            sent = hvd().stats()["wire_bytes_sent"] - before
            with optimizer.skip_synchronize():
                optimizer.step()
            del expected
            if step == 3:
                assert sent < 1.1 * dense_bytes, (rows, sent)
        assert optimizer.plan()[0]["method"] == method, rows
    hvd().check_replicas(model)


class Branches(nn.Module if torch else object):
    """A step uses one or the other, and sometimes goes round the activation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, which):
        if which == "skip":
            return self.out(x + torch.relu(self.a(x)))
        if which == "part":
            h = torch.relu(self.a(x))
            return nn.functional.linear(h, self.out.weight[:10], self.out.bias[:10]) + self.out(h)[:, :10]
        return self.out(torch.relu(getattr(self, which)(x)))


def follow(choose, methods, steps=8, used=("a", "b", "out")):
    """Each rank chooses what to run in a step."""
    for method in methods:
        for dtype in fu.TOLERANCE:
            torch.manual_seed(0)
            model = Branches().to(dtype)
            optimizer = hvd().DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-2), model.named_parameters(), compression=method
            )
            for step in range(steps):
                x = torch.randn(2, D, dtype=dtype) + hvd().rank()
                twin = copy.deepcopy(model)
                optimizer.zero_grad()
                twin.zero_grad()
                which = choose(step, hvd().rank())
                if which:
                    twin(x, which).sin().sum().backward()
                    model(x, which).sin().sum().backward()
                expected = fu.mean(fu.gradients(twin), twin, hvd().global_process_set)
                optimizer.synchronize()
                fu.assert_equal_gradients(model, expected, fu.TOLERANCE[dtype], f"{method} {step}")
                with optimizer.skip_synchronize():
                    optimizer.step()
                hvd().check_replicas(model)


def check_a_chain_that_breaks_on_one_rank():
    for other in ("skip", "part"):
        follow(
            lambda step, rank, other=other: other if rank == 1 and step in (3, 4) else "a",
            fu.methods().values(),
        )


def check_graphs_that_change():
    from dad.torch import gradient_sync

    gradient_sync._AGREEMENT_SECONDS = 0.1  # one rank has no batch in the first step
    follow(lambda step, rank: "ab"[step % 2], fu.methods().values())
    follow(lambda step, rank: "ab"[(step // 2 + rank) % 2], fu.methods().values())
    follow(lambda step, rank: ["a", "b", "skip", None][(step + rank) % 4], fu.methods().values(), steps=12)


def check_layers_that_are_unused_at_first():
    follow(lambda step, rank: "a" if step < 4 else "b", fu.methods().values(), steps=10)


def check_plans_settle():
    """A graph that changes all the time does not make a new plan all the time."""
    for method in ("dad", "edad", "rank_dad:rank=2", "auto"):
        model = Branches()
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-2), model.named_parameters(), compression=method
        )
        plans = []
        for step in range(24):
            optimizer.zero_grad()
            rows = (1, 3, 2 * D)[step // 2 % 3]
            model(torch.randn(rows, D), ["a", "b", "skip"][step % 3]).sum().backward()
            optimizer.step()
            plans.append(optimizer._dad.plan)
        assert len({id(plan) for plan in plans[-8:]}) == 1, method


def check_a_dry_run_predicts_the_plan():
    import dad

    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2 * D))
    x = torch.randn(2, D)
    for method in ("none", "fp16", "dad", "edad", "rank_dad:rank=2", "int8", "auto"):
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), compression=method
        )
        for _ in range(7):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        dry = dad.plan(model, x, size=4, compression=method)
        same = ("name", "shape", "rows", "method", "why")
        for row, predicted in zip(optimizer.plan(), dry, strict=True):
            if method not in ("none", "fp16"):
                assert [row[key] for key in same] == [predicted[key] for key in same], method
            assert row["method"] == predicted["method"] and predicted["measured_ms"] is None


def check_bytes_of_an_mlp():
    """Sent by a rank in a step, on average over ranks and steps, from the first step on; dense: 11.2 MB."""
    for method, most in (("dad", 2.0e6), ("edad", 1.2e6), ("rank_dad:rank=4", 20e3)):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        optimizer = hvd().DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=method
        )
        generator = torch.Generator().manual_seed(hvd().rank())
        hvd().reset_stats()
        for _ in range(30):
            x = torch.rand(32, 784, generator=generator)
            y = torch.randint(10, (32,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        sent = hvd().stats()["wire_bytes_sent"] / 30
        mean = hvd().allreduce(torch.tensor(float(sent))).item()
        assert mean <= most, f"{method}: {mean:.0f} bytes"
        assert hvd().stats()["ratio"] > 5
        # The plan says what is sent, within the head of messages.
        planned = sum(row["bytes"] for row in optimizer.plan())
        assert 0.5 * sent < planned < 1.5 * sent, (method, planned, sent)
