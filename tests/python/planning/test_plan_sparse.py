"""What the planner chooses for sparse methods, qsgd and powersgd, and the words in which it says why."""

import pytest

import dad
from dad.methods.compression import Compression as C
from dad.planning import planner
from dad.planning.planner import Costs, Layer, Observation
from dad.planning.sparse import rice_bits

COSTS = Costs(size=4, bytes_per_second=1e7, flops_per_second=1e10, seed=5)


def layer(name="w", out=64, columns=64, method=None, seen=None, size=4, **observed):
    observation = Observation(**{"rows": 8, "samples": 8, "row_bytes": 4, **observed})
    return Layer(name, out, columns, 4, True, method or C.vgc(), seen or (observation,) * size)


def choose(*layers, costs=COSTS):
    plan = planner.make_plan(list(layers), costs)
    assert planner.Plan.from_dict(plan.as_dict()) == plan
    return {name: choice for choice in plan.choices for pair in choice.own() for name in pair if name}


def test_texts_have_all_that_an_exchange_depends_on():
    for method, text in (
        (C.vgc(), "sparse;rule=vgc;alpha=1.0;zeta=0.999;variance=row;coding=rice;feedback=0;layer=64x64"),
        (
            C.vgc(alpha=2, variance="sample", coding="word", error_feedback=True),
            "sparse;rule=vgc;alpha=2.0;zeta=0.999;variance=sample;coding=word;feedback=1;layer=64x64",
        ),
        (
            C.vgc_strom(tau_absolute=0.5),
            "sparse;rule=vgc_strom;alpha=1.0;zeta=0.999;variance=row;tau=4.0;tau_absolute=0.5;coding=rice;layer=64x64",
        ),
        (C.strom(tau=2), "sparse;rule=strom;tau=2.0;coding=rice;layer=64x64"),
        (C.topk(), "sparse;rule=topk;ratio=0.01;feedback=1;layer=64x64"),
        (C.qsgd(bits=2), "qsgd;bits=2;seed=5"),
    ):
        choice = choose(layer(method=method))["w"]
        assert choice.text == text
        assert planner.describe(choice) == method.name
    text = choose(layer(method=C.powersgd(rank=2, error_feedback=False)))["w"].text
    assert text.startswith("low_rank;rank=2;") and ";combine=power;owner=0;wire=fp32;feedback=none;" in text


def test_a_bias_rides_where_the_gradient_comes_as_factors():
    bias = Layer("b", 64, 1, 4, True, C.vgc(), (Observation(used=False),) * 4)
    chosen = choose(layer(bias="b"), bias)
    assert chosen["w"] is chosen["b"] and chosen["w"].option("layer") == "64x64:bias"
    for method in (C.strom(), C.topk(ratio=0.1), C.qsgd(), C.powersgd()):
        chosen = choose(layer(bias="b", method=method), planner.replace(bias, method=method))
        assert chosen["w"] is not chosen["b"] and "bias" not in chosen["w"].text
        assert chosen["w"].capture == chosen["b"].capture == "off"
    # Alone it must not claim the rows of its weight.
    chosen = choose(
        layer(bias="b"), planner.replace(bias, seen=(Observation(dense=True, reason="two uses"),) * 4)
    )
    assert chosen["b"].capture == "off" and chosen["w"].capture == "samples"


def test_the_variance_is_over_samples_where_they_have_several_rows():
    def of(method=None, **observed):
        choice = choose(layer(method=method, **observed))["w"]
        return choice.option("variance"), choice.why, choice.flops

    elements = 64 * 64
    assert of() == ("row", "variance over 8 rows: 0.07 Mflop more, 0.01 ms", 2 * 8 * elements)
    form, why, flops = of(rows=8 * 9)
    assert (form, flops) == ("sample", 2 * 8 * elements)
    assert why == "variance over 8 samples of 9 rows: 0.07 Mflop more, 0.01 ms"
    assert of(C.vgc(variance="row"), rows=8 * 9)[::2] == ("row", 2 * 72 * elements)
    assert of(C.vgc_strom(variance="sample"))[0] == "sample"
    form, why, flops = of(rows=0, indexed_rows=40)
    assert form == "sample" and why.startswith("variance over 8 samples of 5 rows") and flops == 2 * 40 * 64
    norm = choose(layer(columns=1, sums=True))["w"]
    assert norm.why.startswith("variance over 8 samples, per-sample sums") and norm.capture == "samples"


def test_what_comes_formed_takes_micro_batches_for_samples():
    formed = {"rows": 0, "samples": 0, "dense": True, "reason": "a fused kernel"}
    choice = choose(layer(**formed))["w"]
    expected = "variance over micro-batches, with one backward pass the step itself; formed: a fused kernel"
    assert choice.why == expected and choice.flops == 0
    choice = choose(layer(**formed, passes=4))["w"]
    assert choice.why == "variance over micro-batches, 4 backward passes; formed: a fused kernel"


def test_what_no_rank_has_used_asks_for_a_plan_when_it_is():
    choice = choose(layer(seen=(Observation(used=False),) * 4))["w"]
    assert choice.kind == "sparse" and choice.why == "not used yet" and choice.most_rows == 0


def test_nothing_is_planned_that_takes_more_than_dense():
    for method in (
        C.vgc(),
        C.vgc_strom(),
        C.strom(),
        C.topk(),
        C.topk(ratio=1.0),
        C.qsgd(bits=8),
        C.powersgd(64),
    ):
        for out, columns in ((1, 1), (3, 2), (8, 1), (64, 64), (300, 500)):
            for size in (2, 4, 32, 200):
                one = layer(out=out, columns=columns, method=method, size=size)
                costs = Costs(size, 1e7, 1e10)
                choice = choose(one, costs=costs)["w"]
                assert choice.num_bytes <= costs.dense_bytes(one)
                assert (choice.kind == "dense") == choice.fallback and choice.why
    choice = choose(layer(out=3, columns=2))["w"]
    assert choice.why == "its sparse form would take 42 bytes, dense takes 36"


def test_what_was_larger_than_dense_on_a_rank_stays_dense():
    seen = [Observation(rows=8, samples=8, row_bytes=4, too_large=rank == 2) for rank in range(4)]
    for method in (C.vgc(), C.strom(), C.topk()):
        choice = choose(layer(method=method, seen=tuple(seen)))["w"]
        assert (choice.kind, choice.why) == ("dense", "its sparse form was larger than dense")
        assert choice.fallback


def test_the_bytes_of_topk_are_known_beforehand():
    choice = choose(layer(out=1000, columns=1000, method=C.topk(ratio=0.01)))["w"]
    per_element = choice.num_bytes / 3 / 10000
    assert 4 + 0.9 < per_element < 4 + 1.2  # a gap of 99 on average
    assert rice_bits(1.0) == 1.0 and rice_bits(0.5) == 2.0 and 7 < rice_bits(0.02) < 7.6


def test_chunks_go_to_owners_where_that_is_less():
    method = C.chunk_topk()
    for size, combine in ((2, "gather"), (3, "owner"), (64, "owner")):
        choice = choose(
            layer(out=1024, columns=1024, method=method, size=size), costs=Costs(size, 1e7, 1e10)
        )["w"]
        text = f"chunk_topk;chunk=4096;k=64;bits=2;decay=1.0;combine={combine}"
        assert choice.kind == "chunk_topk" and choice.text == text + (";first=0" if size > 2 else "")
        assert planner.describe(choice) == "chunk_topk" and choice.capture == "off"
        assert choice.why == f"the 64 largest of each of 256 chunks, {combine}"
    # The only chunk of a small tensor is served by each rank in turn.
    small = choose(*(layer(name=f"b{i}", out=500, columns=1, method=method) for i in range(4)))
    assert {choice.option("first") for choice in small.values()} == {"0", "1", "2", "3"}
    asked = choose(layer(out=1024, columns=1024, method=C.chunk_topk(combine="gather", decay=0.5)))["w"]
    assert asked.text.endswith("decay=0.5;combine=gather")


def test_chunks_of_an_embedding_are_those_of_rows_that_were_looked_up():
    looked_up = {"rows": 0, "indexed_rows": 40, "samples": 8}
    embedding = layer(out=5000, columns=64, method=C.chunk_topk(), **looked_up)
    choice = choose(embedding)["w"]
    assert choice.kind == "chunk_topk_rows" and choice.capture == "rows"
    assert (
        choice.text.endswith("combine=owner;first=0;layer=5000x64")
        and planner.describe(choice) == "chunk_topk"
    )
    assert choice.why == "the 64 largest of 2560 elements, of 40 rows that were looked up, owner"
    assert choice.num_bytes < choose(layer(out=5000, columns=64, method=C.chunk_topk()))["w"].num_bytes / 50
    # A tied head uses every row; a host adds up formed gradients.
    for tied in ({"rows": 8, "indexed_rows": 40}, {"rows": 0, "indexed_rows": 40, "dense": True}):
        assert choose(layer(out=5000, columns=64, method=C.chunk_topk(), **tied))["w"].kind == "chunk_topk"
    between_hosts = Costs(size=2, bytes_per_second=1e7, flops_per_second=1e10, hosts=(2, 2))
    assert choose(embedding, costs=between_hosts)["w"].kind == "chunk_topk"


def test_the_bytes_of_chunks_are_known_beforehand():
    choice = choose(layer(out=1024, columns=1024, method=C.chunk_topk(combine="gather")))["w"]
    per_element = 8 * choice.num_bytes / 3 / (256 * 64)
    assert 2 + 7.5 < per_element < 2 + 8.5  # a sign and a level, a gap of 63 on average, a part of a scale
    for out, columns in ((1, 1), (3, 2), (8, 1), (63, 1), (64, 64), (300, 500)):
        for size in (2, 4, 32, 200):
            for method in (C.chunk_topk(), C.chunk_topk(combine="gather"), C.chunk_topk(k=4096, bits=8)):
                one = layer(out=out, columns=columns, method=method, size=size)
                costs = Costs(size, 1e7, 1e10)
                choice = choose(one, costs=costs)["w"]
                assert choice.num_bytes <= costs.dense_bytes(one)
                assert (choice.kind == "dense") == choice.fallback and choice.why
    assert choose(layer(out=3, columns=1, method=C.chunk_topk()))["w"].kind == "dense"


def test_one_rank_and_other_types_are_dense():
    alone = Costs(1, 1e7, 1e10)
    for method in (C.vgc(), C.vgc_strom(), C.strom(), C.topk(), C.qsgd(), C.powersgd()):
        assert choose(layer(method=method, size=1), costs=alone)["w"].kind == "dense"
        assert choose(planner.replace(layer(method=method), floating=False))["w"].fallback
        assert "sparse" in choose(layer(method=method, sparse=True))["w"].why


def test_powersgd_takes_matrices():
    method = C.powersgd(rank=4)
    assert choose(layer(columns=1, method=method))["w"].why == "has no second dimension"
    assert choose(layer(out=4, method=method))["w"].why == "too small for rank 4"
    choice = choose(layer(method=method, dense=True, reason="a fused kernel"))["w"]
    assert choice.why == "rank 4 of 64x64" and choice.capture == "off"
    assert choice.num_bytes == 2 * 3 / 4 * 4 * 128 * 4


def test_a_dry_run_tells_where_the_variance_comes_from():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Conv1d(4, 16, 3), nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(16 * 6, 32))
    rows = dad.plan(model, torch.randn(5, 4, 8), compression="vgc", size=2)
    why = {row["name"]: row["why"] for row in rows}
    assert why["0.weight"].startswith("variance over 5 samples of 6 rows: ")
    assert why["0.bias"] == "rides with 0.weight"
    assert why["1.weight"].startswith("variance over 5 samples, per-sample sums")
    assert why["3.weight"].startswith("variance over 5 rows: ")


def test_ranges():
    for method, option, value in (
        (C.strom, "tau", 0.0),
        (C.vgc_strom, "tau_absolute", 0.0),
        (C.vgc, "alpha", -1.0),
        (C.vgc, "variance", "column"),
        (C.topk, "ratio", 0.0),
        (C.qsgd, "bits", 0),
        (C.chunk_topk, "chunk", 0),
        (C.chunk_topk, "chunk", 2**24 + 1),
        (C.chunk_topk, "k", 4097),
        (C.chunk_topk, "bits", 9),
        (C.chunk_topk, "decay", 1.5),
        (C.chunk_topk, "combine", "power"),
        (C.chunk_topk, "on", "weights"),
        (C.powersgd, "rank", 256),
    ):
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            method(**{option: value})


def test_seeds(monkeypatch):
    from dad.methods.compression import seed_from_environment

    assert seed_from_environment() == 0
    monkeypatch.setenv("DAD_SEED", "12")
    assert seed_from_environment() == 12
    for wrong in ("-1", "x", str(2**63)):
        monkeypatch.setenv("DAD_SEED", wrong)
        with pytest.raises(ValueError, match="DAD_SEED"):
            seed_from_environment()
