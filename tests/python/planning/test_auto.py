"""What `auto` and `exact` choose by the costs of a step, and the guard that raises what auto sends."""

import random
import time
from dataclasses import replace

import pytest

import session_checks
from dad.methods.compression import Compression as C
from dad.methods.compression import parse
from dad.planning import auto, planner
from dad.planning.costs import Line
from dad.planning.guard import LEAST_CAPTURED, Guard
from dad.planning.link import Measured, costs_of, line_of
from dad.planning.planner import Costs, Layer, Observation
from dad.planning.table import PlanRows
from dad.planning.text import format_plan
from dad.planning.types import dense_choice
from thread_ranks import FakeTraining, run_on_threads

MBIT = 1e6 / 8
SLOW = Costs(size=4, bytes_per_second=100 * MBIT, flops_per_second=1e11, memory_per_second=5e10)
FAR = replace(SLOW, delay=0.025)


def layer(name="w", out=512, columns=512, rows=32, method=None, size=4, samples=None):
    seen = Observation(rows=rows, samples=samples or rows, row_bytes=4)
    return Layer(name, out, columns, 4, True, method or C.auto(), (seen,) * size)


def model(method, size=4):
    """A perceptron of which all layers fit low rank, and the classes."""
    sizes = [(1024, 784), (1024, 1024), (10, 1024)]
    return [layer(f"l{i}", *of, 32, method, size) for i, of in enumerate(sizes)]


def exposed(method, costs):
    return costs.exposed_seconds(planner.make_plan(model(method, costs.size), costs).choices)


def kinds(plan):
    return [choice.kind for choice in plan.choices]


def test_on_a_slow_line_auto_sends_little_and_on_a_fast_one_what_costs_no_work():
    assert kinds(planner.make_plan(model(C.auto()), SLOW)) == ["low_rank"] * 3
    fast = replace(SLOW, bytes_per_second=1e11, flops_per_second=1e9)
    plan = planner.make_plan(model(C.auto()), fast)
    assert kinds(plan) == ["dense"] * 3 and "dense is faster here" in plan.choices[0].why


def test_what_backward_hides_costs_nothing():
    """At the same rate: with a long backward() a dense gradient is free."""
    costs = replace(SLOW, bytes_per_second=1e9)
    assert "low_rank" in kinds(planner.make_plan(model(C.auto()), costs))
    assert kinds(planner.make_plan(model(C.auto()), replace(costs, backward_seconds=1.0))) == ["dense"] * 3
    # Within a host bytes take a core, so backward() hides none of them where it has them all.
    within = replace(costs, near_part=1.0, shares_cores=True, backward_seconds=1.0)
    assert "low_rank" in kinds(planner.make_plan(model(C.auto()), within))


def test_where_delay_counts_there_is_one_round():
    def rounds(method, costs):
        return max(choice.rounds for choice in planner.make_plan(model(method), costs).choices)

    for method in (C.auto(), C.rank_dad(4), C.chunk_topk()):
        assert rounds(method, FAR) == 1, method
        assert rounds(method, replace(FAR, bytes_per_second=MBIT)) == 2, "bytes cost more than a delay"
    assert rounds(C.rank_dad(4, combine="owner"), FAR) == 2, "it was asked for"


def test_auto_and_exact_are_never_worse_than_the_best_single_method_of_their_class():
    generator = random.Random(3)
    for _ in range(60):
        size = generator.choice([2, 4, 16])
        costs = Costs(
            size=size,
            bytes_per_second=10 ** generator.uniform(5, 10),
            flops_per_second=10 ** generator.uniform(9.5, 12),
            delay=generator.choice([0.0, 0.001, 0.025]),
            memory_per_second=10 ** generator.uniform(9.5, 11),
            backward_seconds=generator.choice([0.0, 0.01, 0.3]),
            shares_cores=generator.choice([False, True]),
        )
        none = costs.exposed_seconds([dense_choice(one, costs, "") for one in model(C.auto(), size)])
        singles = [none, *(exposed(method, costs) for method in (C.rank_dad(4), C.int8(), C.dad()))]
        assert exposed(C.auto(), costs) <= 1.1 * min(singles) + 1e-4, (costs, singles)
        assert exposed(C.auto(), costs) <= 1.03 * none + 1e-9
        exact = exposed(C.exact(), costs)
        assert exact <= 1.1 * min(none, exposed(C.dad(), costs), exposed(C.edad(), costs)) + 1e-4


def test_two_classes_of_pairs():
    everyone = [Measured(0.01, 1e7, 1e11, 1e10, False, 1e-4, 1e9, 1 / 3)] * 4
    costs = costs_of(everyone, 4)
    assert costs.near == Line(1e9, 1e-4) and costs.near_part == pytest.approx(1 / 3)
    assert costs.line_seconds(3e6) == pytest.approx(2e6 / 1e7)  # the far part
    assert costs_of([replace(everyone[0], near_part=1.0)] * 2, 2).is_one_host
    assert costs_of([everyone[0], replace(everyone[0], delay=0.02)], 4).delay == 0.02


def test_a_line_is_a_rate_and_perhaps_a_delay():
    assert line_of("100mbit") == Line(100 * MBIT)
    assert line_of(" 1.5gbit/s , 25ms ") == Line(1500 * MBIT, 0.025)
    for bad in ("fast", "100mbit,25", "1,2,3", "0mbit", "100mbit,x ms"):
        with pytest.raises(ValueError, match="100mbit"):
            line_of(bad)


def test_a_plan_for_a_thousand_ranks_takes_little_time():
    layers = [layer(f"l{i}", 1024, 1024, 64, C.auto(), 1024, samples=8) for i in range(100)]
    start = time.process_time()
    plan = planner.make_plan(layers, replace(FAR, size=1024))
    assert time.process_time() - start < 10
    assert len(plan.choices) == 100 and plan.exposed_seconds > 0.025


def test_the_table_shows_what_a_step_takes_beside_what_it_took():
    rows = PlanRows([], 12.5, 13.25)
    assert "12.50" in format_plan(rows) and "13.25" in format_plan(rows)
    assert "14.00" in format_plan(rows, 14.0)


# The ladder and the guard


def test_a_layer_climbs_from_low_rank_to_8_bits():
    tokens = layer(out=256, columns=256, rows=64, samples=2)
    assert auto.ranks(tokens) == [32, 64, 128] and auto.ranks(layer(out=256, columns=256)) == [
        4,
        8,
        16,
        32,
        64,
        128,
    ]
    methods = []
    for strength in range(4):
        (choice,) = planner.make_plan([replace(tokens, strength=strength, raised="why")], SLOW).choices
        methods.append(choice.option("rank") or choice.kind)
        assert strength == 0 or choice.why.endswith("; why")
    assert methods == ["32", "64", "128", "int8"]


def review(captured, guard=None, method=None, **of_layer):
    guard = guard or Guard()
    one = layer(method=method, **of_layer)
    plan = planner.make_plan([replace(one, strength=guard.strengths.get("w", 0))], SLOW)
    return guard, guard.review([one], plan.choices, captured)


def test_the_guard_raises_what_lets_too_little_through_on_any_rank():
    assert review([{"w": LEAST_CAPTURED}] * 4)[1] == []
    assert review([{}] * 4)[1] == [], "nothing was measured"
    guard, raised = review([{"w": 0.9}, {"w": 0.9 * LEAST_CAPTURED}, {}, {"w": 0.9}])
    assert raised == ["w"] and guard.strengths == {"w": 1}
    assert "4 directions sent 22 % of what waited, of 25 % that are needed" in guard.reasons["w"]
    assert review([{"w": 0.1 * LEAST_CAPTURED}] * 4)[0].strengths == {"w": 4}, "far below: several rungs"


def test_the_guard_ends_at_8_bits_and_leaves_alone_what_was_asked_for():
    guard = Guard()
    for _ in range(20):
        review([{"w": 0.01}] * 4, guard, rows=2000)
    top = replace(layer(rows=2000), strength=guard.strengths["w"])
    assert kinds(planner.make_plan([top], SLOW)) == ["int8"]
    assert review([{"w": 0.01}] * 4, method=C.rank_dad(1))[1] == []
    assert review([{"w": 0.01}] * 4, method=C.auto(budget=10**9))[1] == [], "a budget counts more"


def test_ranks_raise_together_in_the_step_after_a_review():
    def work(ranks, job):
        train = FakeTraining(ranks, parse("auto"), session_checks.SHAPES)
        ranks.captured = dict.fromkeys(session_checks.SHAPES, 0.05 if ranks.rank == 1 else 0.9)
        made = []
        for _ in range(5 + 20 + 3):
            train.step()
            made.append(train.plans_made)
        ranks.captured = dict.fromkeys(session_checks.SHAPES, 0.9)
        saved = train.save()
        again = FakeTraining(ranks, parse("auto"), session_checks.SHAPES)
        again.load(saved)
        assert again.save()["guard"] == saved["guard"] != {}
        assert made[24] == 1 and made[26] == 2, made
        for _ in range(60):
            train.step()
        assert train.plans_made == 2, "nothing is at risk any more"
        return [(choice.text, choice.why) for choice in train.choices]

    results = run_on_threads(3, work)
    assert all(one == results[0] for one in results)
    assert any("raised, since" in why for _, why in results[0])


def test_the_guard_also_watches_a_plan_from_a_checkpoint():
    def work(ranks, job):
        train = FakeTraining(ranks, parse("auto"), session_checks.SHAPES)
        for _ in range(8):
            train.step()
        saved = train.save()
        again = FakeTraining(ranks, parse("auto"), session_checks.SHAPES)
        again.load(saved)
        for _ in range(30):
            again.step()
        assert again.plans_made == 0, "nothing was at risk"
        ranks.captured = dict.fromkeys(session_checks.SHAPES, 0.1)
        for _ in range(30):
            again.step()
        return again.plans_made, any("raised, since" in choice.why for choice in again.choices)

    # One plan to know what the layers are, and one after the review that followed.
    assert run_on_threads(2, work) == [(2, True)] * 2


def test_another_plan_has_to_be_clearly_faster():
    """A plan follows what the line has become, and does not change for a little."""

    def work(ranks, job):
        train = FakeTraining(ranks, parse("exact"), {"a": (512, 512), "b": (512, 512)})
        train.rows = 32
        train.step()
        first = [choice.kind for choice in train.choices]
        costs = train.session._costs
        train.session._costs = replace(costs, flops_per_second=0.9 * costs.flops_per_second)
        for _ in range(25):
            train.step()
        assert train.plans_made == 1
        train.session._costs = replace(costs, bytes_per_second=1e12, flops_per_second=1e7)
        for _ in range(25):
            train.step()
        assert train.plans_made == 2
        return first, [choice.kind for choice in train.choices]

    assert run_on_threads(3, work) == [(["factor"] * 2, ["dense"] * 2)] * 3
