"""What `auto` chooses from for a layer.

Its lossy methods form a ladder: low rank, each rung with twice the rank, then 8 bits for each element. A
layer begins on the first rung, and every time the guard (guard.py) finds that too little of its gradient gets
through, it moves one rung up. Dense and exact factors fit anywhere. The cheapest of what is left is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning.costs import Costs
from dad.planning.exact import exact
from dad.planning.lossy import low_rank, quantised
from dad.planning.types import Choice, Layer, dense_choice

_RANK = 4
# Tokens give gradients of higher rank than samples do, so they start at this part of the smaller side. A
# transformer 256 wide lost 0.052 nats with rank 16 (benchmarks/accuracy_text.py).
_PART_TOKENS = 8
_MOST_RANK = 32  # the most to begin with, for tokens
# The ladder of ranks ends at this part of the smaller side: beyond it, 8 bits per element are as cheap.
_HALF = 2
# A candidate that changes the gradient less is preferred if it costs at most this factor more time.
_MARGIN = 1.03
# The ranks that are tried in turn until a budget is met; None: the ranks of the ladder.
CAPS = (None, 16, 8, 4, 2, 1)


def first_rank(layer: Layer) -> int:
    """The rank of the lowest rung."""
    tokens = any(s.samples and s.rows + s.indexed_rows > s.samples for s in layer.seen)
    part = min(layer.out, layer.columns) // _PART_TOKENS if tokens else 0
    return min(max(part, _RANK), _MOST_RANK)


def ranks(layer: Layer) -> list[int]:
    """The ranks of the rungs."""
    ladder = [first_rank(layer)]
    while 2 * ladder[-1] <= min(layer.out, layer.columns) // _HALF:
        ladder.append(2 * ladder[-1])
    return ladder


def choose(layer: Layer, costs: Costs, cap: int | None) -> Choice:
    """The cheapest in this trial of a plan.

    Args:
        cap: the highest rank that is allowed; None: the ladder decides.
    """
    candidates = list(_candidates(layer, costs, cap))
    least = min(choice.seconds for choice in candidates)
    chosen = next(choice for choice in candidates if choice.seconds <= _MARGIN * least)
    why = chosen.why + (f"; {layer.raised}" if layer.raised else "")
    return replace(chosen, why=why, fallback=False)


def _candidates(layer: Layer, costs: Costs, cap: int | None) -> Iterator[Choice]:
    """Candidates, beginning with those that change the gradient least."""
    dense = dense_choice(layer, costs, "dense is faster here")
    yield dense
    if not layer.dense and layer.used:
        by_factors = exact(replace(layer, method=_methods.Exact()), costs)
        if by_factors.kind == "factor":
            yield by_factors
    ladder = ranks(layer)
    # A budget takes precedence over the guard.
    strength = layer.strength if cap is None else 0
    if strength >= len(ladder):
        by_int8 = quantised(layer, _methods.Int8(), costs, "8 bits for each element")
        if by_int8.kind == "int8":
            yield by_int8
        return
    rank = ladder[strength] if cap is None else min(ladder[0], cap)
    for combine in ("gather",) if costs.one_round else ("owner", "gather"):
        method = _methods.RankDad(rank=rank, combine=combine, wire="int4")
        choice = low_rank(layer, method, costs)
        if choice.kind != "dense":
            yield choice
