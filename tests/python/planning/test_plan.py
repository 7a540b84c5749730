"""The planner, a pure function; and dad.plan(), its dry run in one process."""

import random
from dataclasses import replace

import pytest

import dad
from dad.methods.compression import Compression as C
from dad.planning import planner
from dad.planning.planner import Costs, Layer, Link, Observation
from dad.planning.types import ANY_ROWS

SLOW = Costs(size=4, bytes_per_second=1e7, flops_per_second=1e10)


def layer(name, out=64, columns=64, rows=2, method=None, size=4, **seen):
    observation = Observation(rows=rows, samples=rows, row_bytes=4, **seen)
    return Layer(name, out, columns, 4, True, method or C.edad(), (observation,) * size)


def bias(name, out=64, method=None, size=4, **seen):
    return Layer(name, out, 1, 4, True, method or C.edad(), (Observation(used=False, **seen),) * size)


def made(layers, costs=SLOW):
    plan = planner.make_plan(layers, costs)
    sent = [(name, choice) for choice in plan.choices for pair in choice.own() for name in pair if name]
    assert sorted(name for name, _ in sent) == sorted(one.name for one in layers), "each is sent once"
    return dict(sent)


def test_linked_layers_are_a_chain_and_biases_ride():
    layers = [
        layer("a", bias="a.b", link=Link("b", "relu")),
        bias("a.b"),
        layer("b", bias="b.b"),
        bias("b.b"),
    ]
    plan = made(layers)
    assert (
        plan["a"] is plan["b.b"] and plan["a"].layers == ("a", "b") and planner.describe(plan["a"]) == "edad"
    )
    plan = made([planner.replace(one, method=C.dad()) for one in layers])
    assert plan["a"] is plan["a.b"] and plan["a"] is not plan["b"]


def test_a_layer_that_two_others_lead_to_is_in_one_chain():
    link = Link("top", "relu")
    plan = made([layer("a", link=link), layer("b", link=link), layer("top")])
    assert plan["a"].layers == ("a", "top") and plan["b"].layers == ("b",)


def test_a_bias_goes_alone_if_it_is_used_elsewhere_or_has_another_method():
    assert made([layer("w", bias="b"), bias("b", dense=True)])["b"].kind == "dense"
    assert made([layer("w", bias="b"), bias("b", method=C.int8(bucket=8))])["b"].kind == "int8"
    # Its weight is formed, and takes it along.
    method = C.rank_dad(2)
    plan = made([layer("w", bias="b", method=method, dense=True), bias("b", method=method)])
    assert plan["b"] is plan["w"] and plan["w"].capture == "off"
    # Its weight goes where nothing rides.
    method = C.rank_dad(2, wire="fp32")
    plan = made([layer("w", 4, 4, bias="b", method=method), bias("b", 4, method=method)])
    assert plan["w"].kind == "int8" and plan["b"].why == "the bias of w, on its own"
    # One of several dimensions has no rows of its own, either.
    for method, kind in ((C.dad(), "dense"), (C.rank_dad(2, wire="fp32"), "int8")):
        heads = planner.replace(bias("b", 4, method=method), columns=4)
        plan = made([layer("w", 4, 4, rows=500, bias="b", method=method), heads])
        assert plan["b"].kind == kind and plan["b"].num_bytes > 0


def test_what_no_rank_has_used_costs_nothing_until_it_is():
    unused = Layer("w", 64, 64, 4, True, C.dad(), (Observation(used=False),) * 4)
    choice = made([unused])["w"]
    assert choice.kind == "factor" and choice.num_bytes == 0 and choice.most_rows == 0
    assert made([planner.replace(unused, method=C.rank_dad(2))])["w"].most_rows == 0


def test_what_does_not_fit_is_told():
    for method in (C.dad(), C.rank_dad(2), C.int8()):
        assert "sparse" in made([layer("w", method=method, sparse=True)])["w"].why
        not_floating = planner.replace(layer("w", method=method), floating=False)
        assert made([not_floating])["w"].fallback
    choice = made([layer("w", method=C.dad(), dense=True, reason="a fused kernel")])["w"]
    assert choice.fallback and choice.why == "a fused kernel"
    choice = made([layer("w", rows=500, method=C.dad())])["w"]
    assert choice.fallback and "dense takes" in choice.why
    assert not made([layer("w", rows=500, method=C.exact())])["w"].fallback


def test_one_rank_sends_nothing_by_a_method():
    alone = Costs(size=1, bytes_per_second=1e7, flops_per_second=1e10)
    for method in (C.dad(), C.rank_dad(2), C.int8(), C.auto(), C.exact()):
        assert made([layer("w", method=method, size=1)], alone)["w"].kind == "dense"


def test_no_method_sends_more_than_dense():
    generator = random.Random(1)
    for _ in range(300):
        costs = Costs(generator.choice([2, 3, 4, 8, 32]), 10 ** generator.uniform(5, 10), 1e10)
        method = generator.choice(
            [C.dad(), C.edad(), C.exact(), C.rank_dad(generator.randint(1, 64)), C.int8(), C.auto()]
        )
        layers = [
            layer(
                f"l{i}",
                generator.choice([1, 3, 64, 500]),
                generator.choice([1, 3, 64, 500]),
                generator.randint(0, 200),
                method,
                costs.size,
                link=Link(f"l{i + 1}", "relu") if generator.random() < 0.5 and i < 4 else None,
                dense=generator.random() < 0.1,
            )
            for i in range(5)
        ]
        for a, b in zip(layers, layers[1:], strict=False):  # a link joins layers that fit
            if a.link is not None:
                layers[layers.index(a)] = planner.replace(a, out=b.columns)
        plan = planner.make_plan(layers, costs)
        dense = sum(costs.dense_bytes(one) for one in layers)
        assert sum(choice.num_bytes for choice in plan.choices) <= 1.001 * dense
        assert planner.Plan.from_dict(plan.as_dict()) == plan


def test_owners_have_even_loads():
    plan = made([layer(f"l{i}", 64 * (i + 1), 512, method=C.rank_dad(2)) for i in range(16)])
    loads = [0.0] * 4
    for choice in plan.values():
        loads[int(choice.option("owner"))] += choice.num_bytes
    assert max(loads) < 1.2 * min(loads)


def test_gather_between_many_ranks_is_not_more_than_dense():
    method = C.rank_dad(60, combine="gather", wire="fp32")
    wide = {size: layer("w", 512, 512, method=method, size=size) for size in (8, 16)}
    plans = {size: made([one], planner.replace(SLOW, size=size))["w"] for size, one in wide.items()}
    assert plans[8].kind == "low_rank"
    assert plans[16].kind == "int8" and "3686.4 kB, dense takes 1966.1 kB" in plans[16].why
    assert plans[16].num_bytes < SLOW.dense_bytes(wide[16])


def test_a_budget_is_met_where_a_lower_rank_can():
    tokens = [
        Layer(f"l{i}", 256, 256, 4, True, C.auto(), (Observation(rows=64, samples=2, row_bytes=4),) * 4)
        for i in range(3)
    ]

    def spent(budget):
        layers = [planner.replace(one, method=C.auto(budget=budget)) for one in tokens]
        plan = planner.make_plan(layers, SLOW)
        return sum(choice.num_bytes for choice in plan.choices), plan.choices[0].option("rank")

    free, rank = spent(None)
    assert rank == "32"
    assert spent(int(free) + 1) == (free, "32")
    assert spent(int(free / 2) + 1)[0] <= free / 2 + 1
    least, rank = spent(1)  # it cannot be met: as little as there is
    assert rank == "1"
    (choice,) = made([planner.replace(tokens[0], method=C.auto(budget=1))]).values()
    assert choice.why.endswith(f"over the budget of 1 bytes: {least / 3:.0f} are the least")


def test_exact_weighs_the_product_of_all_rows():
    slow_link = Costs(4, 1e5, 1e10)
    fast_link = Costs(4, 1e11, 1e9)
    big = layer("w", 512, 512, 32, C.exact())
    assert made([big], slow_link)["w"].kind == "factor"
    choice = made([big], fast_link)["w"]
    assert choice.kind == "dense" and "takes longer" in choice.why


# The dry run.


def model():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64))


def test_rows_of_a_group_have_the_outputs_of_that_group():
    """96 rows, 2 of each of 48 groups."""
    grouped = layer("a", out=384, columns=54, rows=96, method=C.dad(), size=2, row_outputs=8)
    choice = made([grouped], replace(SLOW, size=2))["a"]
    assert (choice.kind, choice.num_bytes, choice.why) == ("factor", 96 * (54 + 8) * 4, "96 rows of 54+8")
    whole = layer("a", out=384, columns=54, rows=96, method=C.dad(), size=2)
    assert made([whole], replace(SLOW, size=2))["a"].kind == "dense"


def test_a_dry_run_gives_the_table_and_leaves_the_model_alone():
    net = model()
    import torch

    from dad.torch._load import _torch as ops

    x = torch.randn(3, 64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_numbers = torch.get_rng_state()
    rows = dad.plan(net, x, size=8, link="100mbit", compression="dad")
    assert [row["name"] for row in rows] == [name for name, _ in net.named_parameters()]
    assert [row["method"] for row in rows] == ["dad", "dad", "dense", "dense", "dad", "dad"]
    assert rows[0]["rows"] == 3 and rows[0]["bytes"] == 7 * 3 * 128 * 4 and rows[0]["predicted_ms"] > 0
    assert all(row["measured_ms"] is row["measured_bytes"] is None and row["why"] for row in rows)
    assert dad.format_plan(rows).startswith("plan: ") and " predicted; 4 by dad, 2 dense" in dad.format_plan(
        rows
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert torch.equal(torch.get_rng_state(), random_numbers)
    with pytest.raises(ValueError, match="not tracked"):
        ops.capture_count(net[0].weight)


def test_a_dry_run_takes_the_method_from_the_environment_or_auto(monkeypatch):
    net = model()
    import torch

    x = torch.randn(3, 64)
    assert dad.plan(net, x)[0]["method"] == "rank_dad"
    monkeypatch.setenv("DAD_COMPRESSION", "int8")
    assert dad.plan(net, x)[0]["method"] == "int8"
    assert dad.plan(net, x, compression=C.none)[0]["method"] == "dense"


def test_slower_links_and_more_ranks_change_what_exact_does():
    net = model()
    import torch

    x = torch.randn(4, 64)

    def methods(**arguments):
        return [row["method"] for row in dad.plan(net, x, compression="exact", **arguments)][::4]

    assert methods(size=4, link="1mbit") == ["dad", "dad"]
    assert methods(size=4, link="1000gbit") == ["dense", "dense"]
    assert methods(size=64, link="1mbit") == ["dense", "dense"]
    assert methods(size=1) == ["dense", "dense"]


def test_a_dry_run_of_models_with_other_inputs_and_outputs():
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.kind = kind

        def forward(self, x, scale=1.0):
            y = self.layer(x) * scale
            return {"tuple": (None, y), "dict": {"y": y}, "loss": {"loss": y.sum()}, "text": "y"}[self.kind]

    x = torch.randn(2, 64)
    for kind in ("tuple", "dict", "loss"):
        for batch in (x, (x, 2.0), {"x": x, "scale": 2.0}):
            assert dad.plan(Model(kind), batch, size=2, compression="dad")[0]["method"] == "dad"
    with pytest.raises(ValueError, match="loss="):
        dad.plan(Model("text"), x)
    rows = dad.plan(Model("tuple"), x, compression="dad", loss=lambda output: output[1].square().sum())
    assert rows[0]["method"] == "dad"


def test_misuse_of_a_dry_run():
    net = model()
    for arguments in ({"size": 0}, {"size": 2.5}, {"link": "fast"}, {"link": "0mbit"}, {"link": "1.2.3mbit"}):
        with pytest.raises(ValueError, match="is not possible"):
            dad.plan(net, None, **arguments)


def test_between_hosts_a_method_counts_hosts_and_factors_count_ranks():
    costs = Costs(size=2, bytes_per_second=1e7, flops_per_second=1e10, hosts=(3, 1))
    assert costs.num_ranks == 4 and costs.factor_copies == 3  # three ranks of a host, to one of the other
    plan = made(
        [layer("w", 512, 256, rows=1, method=C.dad()), layer("v", 512, 256, method=C.rank_dad(2))], costs
    )
    assert plan["w"].kind == "factor" and plan["w"].num_bytes == 3 * (512 + 256) * 4
    assert plan["w"].why.endswith("between all ranks, since rows of a host cannot be added up")
    # A host's sum has no rows, and two hosts need no owner.
    assert plan["v"].capture == "off" and plan["v"].option("combine") == "gather"
    assert plan["v"].why.endswith("between 2 hosts, after a sum inside each")
    rows = C.rank_dad(2, residual="rows")
    assert made([layer("v", 512, 256, method=rows)], costs)["v"].option("feedback") == "dense"
    # Nobody hears a rank that does not lead ask for a new plan.
    late = planner.replace(layer("x", method=C.vgc(), rows=0), seen=(Observation(used=False),) * 4)
    assert made([late], costs)["x"].most_rows == ANY_ROWS
    dense = made([layer("w", 16, 16, rows=8, method=C.dad())], costs)["w"]
    assert dense.kind == "dense" and "dense takes 1.0 kB" in dense.why  # as much as the tensor: two hosts
