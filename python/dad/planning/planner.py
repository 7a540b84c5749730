"""Which exchange each layer gets, and why: a pure function of what all ranks have observed.

Every rank computes the plan from the same observations, so all have the same plan. `exact`, `auto` and
options that are "auto" leave choices to the planner. It then tries several plans that weigh the line
differently against the work, since backward() may hide either of them (costs.py), and takes the plan that
lengthens a step the least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning import auto
from dad.planning.costs import Costs, Line
from dad.planning.exact import chains, exact
from dad.planning.lossy import low_rank, power_sgd, quantised
from dad.planning.sparse import chunked, sparse
from dad.planning.types import Choice, Layer, Link, Observation, Plan
from dad.planning.types import dense_choice as _dense

__all__ = [
    "Choice",
    "Costs",
    "Layer",
    "Line",
    "Link",
    "Observation",
    "Plan",
    "describe",
    "is_exact",
    "make_plan",
    "weighs_costs",
]

# What a second of the line counts in trials of a plan, if one of work counts 1. The last is for budgets:
# bytes alone count.
_LINE_PRICES = (0.0, 0.25, 0.5, 1.0, 1e6)
# A plan within this factor of the fastest is preferred if it was tried earlier: less work, fewer changes.
_AS_GOOD = 1.02
# From this delay on, a round is noticeable in a step, and saving one is worth more bytes.
_LONG_DELAY = 1e-3


def make_plan(layers: Sequence[Layer], costs: Costs) -> Plan:
    layers = [_with_fitting_bias(layer, {other.name: other for other in layers}) for layer in layers]
    autos = {layer.name: layer.method for layer in layers if isinstance(layer.method, _methods.Auto)}
    budgets = {method.budget for method in autos.values() if method.budget is not None}

    def spent(plan: Plan) -> float:
        return sum(choice.num_bytes for choice in plan.choices if not autos.keys().isdisjoint(choice.layers))

    for cap in auto.CAPS if budgets else auto.CAPS[:1]:
        plans = [_plan_by(layers, trial, cap, costs) for trial in _trials(layers, costs)]
        allowed = [plan for plan in plans if not budgets or spent(plan) <= min(budgets)]
        if allowed:
            seconds = [costs.exposed_seconds(plan.choices) for plan in allowed]
            as_good = (one <= _AS_GOOD * min(seconds) for one in seconds)
            return next(plan for plan, is_as_good in zip(allowed, as_good, strict=True) if is_as_good)
    plan = min(plans, key=spent)
    over = f"; over the budget of {min(budgets)} bytes: {spent(plan):.0f} are the least"
    return replace(
        plan,
        choices=[
            replace(choice, why=choice.why + over) if not autos.keys().isdisjoint(choice.layers) else choice
            for choice in plan.choices
        ],
    )


def weighs_costs(method: _methods.Method, size: int) -> bool:
    """Whether the costs decide what `size` ranks send by this method. Two ranks need no owner anyway."""
    return isinstance(method, _WEIGHED) or (size > 2 and getattr(method, "combine", "") == "auto")


def _trials(layers: Sequence[Layer], costs: Costs) -> Iterator[Costs]:
    """The costs as the trials of a plan weigh them. If there is nothing to choose, there is one trial."""
    weighed = any(isinstance(layer.method, _WEIGHED) for layer in layers)
    by_delay = costs.delay >= _LONG_DELAY and any(weighs_costs(layer.method, costs.size) for layer in layers)
    for price, one_round in itertools.product(
        _LINE_PRICES if weighed else (1.0,), (False, True) if by_delay else (False,)
    ):
        yield replace(costs, line_price=price, one_round=one_round)


def _with_fitting_bias(layer: Layer, by_name: dict[str, Layer]) -> Layer:
    """Detaches a bias from its weight if it is used elsewhere too, or is to be sent another way."""
    bias = by_name.get(layer.bias) if layer.bias is not None else None
    rides = bias is not None and bias.method == layer.method and isinstance(layer.method, _BY_FACTORS)
    fits = rides and bias is not None and not any(s.dense for s in bias.seen)
    if layer.bias is None or fits:
        return layer
    return replace(layer, seen=tuple(replace(s, bias=None) for s in layer.seen))


def _plan_by(layers: Sequence[Layer], trial: Costs, cap: int | None, costs: Costs) -> Plan:
    """The plan of a trial. Its times use `costs`, which are unweighted."""
    by_name = {layer.name: layer for layer in layers}
    riders = {layer.bias: layer.name for layer in layers if layer.bias is not None}
    weights = [layer for layer in layers if layer.name not in riders]
    in_chains = chains(weights, by_name, trial) if costs.size > 1 else []
    in_chain = {name for choice in in_chains for name in choice.layers}
    done = {name for choice in in_chains for name, _ in choice.own()}
    singles = []
    for layer in weights:
        if layer.name in done:
            continue
        if layer.name in in_chain:
            why = f"dense is cheaper ({layer.rows} rows); it hands its delta down the chain"
            singles.append(replace(_dense(layer, costs, why), capture="rows_and_dense"))
        else:
            singles.append(_single(layer, trial, cap))
    choices = [*in_chains, *_with_owners(singles, costs)]
    covered = {bias for choice in choices for _, bias in choice.own()}
    for bias, weight in riders.items():  # its weight is sent in a way that carries no bias
        if bias not in covered:
            layer = by_name[bias]
            # A tensor of several dimensions, such as Keras' attention has, is also no matrix.
            vector = replace(layer, out=layer.out * layer.columns, columns=1)
            choice = _single(vector, trial, cap)
            why = f"the bias of {weight}, on its own"
            why += f"; {choice.why}" if choice.kind == "sparse" else ""
            choices.append(replace(choice, why=why, fallback=False))
    # It was chosen by the weights of the trial, and edad by bytes; the predicted time is recorded anyway.
    choices = [replace(c, seconds=costs.seconds(c.num_bytes, c.flops, c.memory)) for c in choices]
    if costs.hosts:
        choices = [replace(choice, why=choice.why + _way_between_hosts(choice, costs)) for choice in choices]
    return Plan(choices, costs.size, costs.exposed_seconds(choices))


def _way_between_hosts(choice: Choice, costs: Costs) -> str:
    if choice.sparse:
        return ""
    if choice.row.exchanges_rows:
        return "; between all ranks, since rows of a host cannot be added up"
    return f"; between {costs.size} hosts, after a sum inside each"


def _with_owners(singles: list[Choice], costs: Costs) -> list[Choice]:
    """Owners take the largest first, so that the loads come out even."""
    owned = [0.0] * costs.size
    for i in sorted(range(len(singles)), key=lambda i: (-singles[i].num_bytes, i)):
        if "=?" in singles[i].text:  # owner, or first rank of chunk_topk
            owner = owned.index(min(owned))
            owned[owner] += singles[i].num_bytes
            singles[i] = replace(singles[i], text=singles[i].text.replace("=?", f"={owner}"))
    return singles


_EXACT = (_methods.Dad, _methods.Exact)  # Edad is a Dad
_BY_FACTORS = (*_EXACT, _methods.RankDad, _methods.Vgc, _methods.VgcStrom, _methods.Auto)
_WEIGHED = (_methods.Exact, _methods.Auto)
_SPARSE = (_methods.Vgc, _methods.VgcStrom, _methods.Strom, _methods.TopK)


def is_exact(method: _methods.Method) -> bool:
    return isinstance(method, _EXACT)


def _single(layer: Layer, costs: Costs, cap: int | None) -> Choice:
    if not layer.floating:
        return _dense(layer, costs, "its type is not floating", fallback=True)
    if layer.sparse:
        return replace(_dense(layer, costs, "its gradient is sparse", fallback=True), sparse=True)
    if costs.size == 1:
        return _dense(layer, costs, "there is one rank")
    if isinstance(layer.method, _EXACT):
        return exact(layer, costs)
    if isinstance(layer.method, _methods.RankDad):
        return low_rank(layer, layer.method, costs)
    if isinstance(layer.method, _methods.Auto):
        return auto.choose(layer, costs, cap)
    if isinstance(layer.method, _methods.Quantiser):
        return quantised(layer, layer.method, costs, "asked for")
    if isinstance(layer.method, _methods.ChunkTopK):
        return chunked(layer, layer.method, costs)
    if isinstance(layer.method, _methods.PowerSgd):
        return power_sgd(layer, layer.method, costs)
    if isinstance(layer.method, _SPARSE):
        return sparse(layer, layer.method, costs)
    raise TypeError(f'"{layer.name}": there is no plan for {layer.method!r}')


def describe(choice: Choice) -> str:
    """The method in the user's notation."""
    return choice.row.label_of(choice)
