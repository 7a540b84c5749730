"""Which exchange each layer gets, and why: a pure function of what all ranks have seen.

Every rank computes the plan from the same observations, so all have the same one. A full cost model has
its place in `Costs`; today it holds a link rate and a product rate, both measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning.sparse import chunked, sparse
from dad.planning.types import ANY_ROWS, Choice, Costs, Layer, Link, Observation, Plan
from dad.planning.types import dense_choice as _dense

__all__ = ["Choice", "Costs", "Layer", "Link", "Observation", "Plan", "describe", "is_exact", "make_plan"]

# A layer whose A only serves the recursion below it needs one bit per unit for these.
_ONE_BIT = ("relu", "leaky_relu")
_WIRE_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
# Where G comes formed by the framework or from rows: rows beyond this many times the smaller side
# make the product the main work, and the framework's is as good.
_FRAMEWORK_PRODUCT_ROWS = 1.0
# More rows than planned by this factor ask for a new plan.
_ROWS_SLACK = 1.25


def make_plan(layers: Sequence[Layer], costs: Costs) -> Plan:
    layers = [_with_fitting_bias(layer, {other.name: other for other in layers}) for layer in layers]
    autos = {layer.name: layer.method for layer in layers if isinstance(layer.method, _methods.Auto)}
    budgets = {method.budget for method in autos.values() if method.budget is not None}
    for most_rank in _AUTO_RANKS:
        plan = _plan_with_rank(layers, costs, most_rank)
        spent = sum(choice.num_bytes for choice in plan.choices if not autos.keys().isdisjoint(choice.layers))
        if not budgets or spent <= min(budgets):
            return plan
    over = f"; over the budget of {min(budgets)} bytes: {spent:.0f} are the least"
    return replace(
        plan,
        choices=[
            replace(choice, why=choice.why + over) if not autos.keys().isdisjoint(choice.layers) else choice
            for choice in plan.choices
        ],
    )


def _with_fitting_bias(layer: Layer, by_name: dict[str, Layer]) -> Layer:
    """A bias that is used elsewhere too, or that is to go another way, does not ride with its weight."""
    bias = by_name.get(layer.bias) if layer.bias is not None else None
    rides = bias is not None and bias.method == layer.method and isinstance(layer.method, _BY_FACTORS)
    fits = rides and bias is not None and not any(s.dense for s in bias.seen)
    if layer.bias is None or fits:
        return layer
    return replace(layer, seen=tuple(replace(s, bias=None) for s in layer.seen))


def _plan_with_rank(layers: Sequence[Layer], costs: Costs, most_rank: int) -> Plan:
    by_name = {layer.name: layer for layer in layers}
    riders = {layer.bias: layer.name for layer in layers if layer.bias is not None}
    weights = [layer for layer in layers if layer.name not in riders]
    chains = _chains(weights, by_name, costs) if costs.size > 1 else []
    in_chain = {name for choice in chains for name in choice.layers}
    done = {name for choice in chains for name, _ in choice.own()}
    singles = []
    for layer in weights:
        if layer.name in done:
            continue
        if layer.name in in_chain:
            why = f"dense is cheaper ({layer.rows} rows); it hands its delta down the chain"
            singles.append(replace(_dense(layer, costs, why), capture="rows_and_dense"))
        else:
            singles.append(_single(layer, costs, most_rank))
    choices = [*chains, *_with_owners(singles, costs)]
    covered = {bias for choice in choices for _, bias in choice.own()}
    for bias, weight in riders.items():  # its weight went a way on which nothing rides
        if bias not in covered:
            layer = by_name[bias]
            # Also one of several dimensions, as Keras' attention has, is no matrix.
            vector = replace(layer, out=layer.out * layer.columns, columns=1)
            choice = _single(vector, costs, most_rank)
            why = f"the bias of {weight}, on its own"
            why += f"; {choice.why}" if choice.kind == "sparse" else ""
            choices.append(replace(choice, why=why, fallback=False))
    # edad was chosen by bytes; what it takes is told all the same.
    choices = [replace(c, seconds=costs.seconds(c.num_bytes, c.flops)) for c in choices]
    if costs.hosts:
        choices = [replace(choice, why=choice.why + _way_between_hosts(choice, costs)) for choice in choices]
    return Plan(choices, costs.size)


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
        if "=?" in singles[i].text:  # owner, or first of chunk_topk
            owner = owned.index(min(owned))
            owned[owner] += singles[i].num_bytes
            singles[i] = replace(singles[i], text=singles[i].text.replace("=?", f"={owner}"))
    return singles


def _takes_rows(layer: Layer) -> bool:
    return not layer.dense and not layer.sparse and layer.floating


_EXACT = (_methods.Dad, _methods.Exact)  # Edad is a Dad
_BY_FACTORS = (*_EXACT, _methods.RankDad, _methods.Vgc, _methods.VgcStrom, _methods.Auto)
_SPARSE = (_methods.Vgc, _methods.VgcStrom, _methods.Strom, _methods.TopK)


def is_exact(method: _methods.Method) -> bool:
    return isinstance(method, _EXACT)


# Exact methods


def _chains(layers: Sequence[Layer], by_name: dict[str, Layer], costs: Costs) -> list[Choice]:
    """Chains of edAD: runs of linked layers, cut where that is cheapest."""
    lower: dict[str, str] = {}  # one for each upper: ranks may have come to it from different layers
    for layer in layers:
        if layer.link is not None and _may_chain(layer) and _may_chain(by_name.get(layer.link.upper)):
            lower.setdefault(layer.link.upper, layer.name)
    linked = {name: upper for upper, name in lower.items()}
    uppers = set(linked.values())
    choices = []
    # edad was asked for by name: what counts is bytes.
    by_bytes = replace(costs, flops_per_second=float("inf"))
    for layer in layers:
        if layer.name not in linked or layer.name in uppers:
            continue
        run = [layer]
        while run[-1].name in linked:
            run.append(by_name[linked[run[-1].name]])
        choices.extend(_cut(run, costs if isinstance(layer.method, _methods.Exact) else by_bytes))
    return choices


def _may_chain(layer: Layer | None) -> bool:
    return (
        layer is not None
        and _takes_rows(layer)
        and not any(s.indexed_rows for s in layer.seen)
        and isinstance(layer.method, _methods.Edad | _methods.Exact)
    )


def _cut(run: list[Layer], costs: Costs) -> list[Choice]:
    """The cheapest way to cut a run into chains and single layers; only the chains are returned."""
    best: list[tuple[float, list[Choice]]] = [(0.0, [])]  # for the layers below
    for end in range(1, len(run) + 1):
        candidates = []
        for begin in range(end):
            seconds, chosen = best[begin]
            if end - begin == 1:
                single = _exact(run[begin], costs)
                candidates.append((seconds + single.seconds, chosen))
            else:
                chain = _chain(run[begin:end], costs)
                extra = sum(
                    costs.seconds(costs.dense_bytes(layer), 0.0)
                    for layer, passes in zip(run[begin:end], chain.passes, strict=True)
                    if passes
                )
                if not all(chain.passes):
                    candidates.append((seconds + chain.seconds + extra, [*chosen, chain]))
        best.append(min(candidates, key=lambda candidate: candidate[0]))
    return best[-1][1]


def _chain(run: list[Layer], costs: Costs) -> Choice:
    """A chain that sends the top layer's D. A layer above the lowest may pass D on only."""
    method = run[0].method
    peers = costs.factor_copies
    rows = max(layer.rows for layer in run)
    wire = method.wire if isinstance(method, _methods.Dad) else "fp32"
    bits = max(layer.row_bits(wire) for layer in run)
    passes = []
    num_bytes = peers * rows * run[-1].out * bits / 8
    flops = 0.0
    marks = []
    for i, layer in enumerate(run):
        a_bytes = peers * rows * layer.columns * bits / 8
        product = 2.0 * layer.all_rows * layer.columns * layer.out
        below = run[i - 1].link if i > 0 else None
        passable = below is not None and below.activation in _ONE_BIT
        goes_dense = passable and costs.seconds(costs.dense_bytes(layer), 0.0) < costs.seconds(
            a_bytes, product
        )
        passes.append(bool(goes_dense))
        num_bytes += a_bytes / bits if goes_dense else a_bytes
        flops += 0.0 if goes_dense else product
        if i > 0:
            flops += product  # D of the layer below
        marks.append([layer.link.mark()] if i + 1 < len(run) and layer.link is not None else [])
    text = f"factor;wire={wire};rows={rows};" + ";".join(
        layer.text(*mark, *(["pass"] if p else [])) for layer, mark, p in zip(run, marks, passes, strict=True)
    )
    dense_bytes = sum(costs.dense_bytes(layer) for layer, p in zip(run, passes, strict=True) if not p)
    return Choice(
        kind="factor",
        layers=tuple(layer.name for layer in run),
        biases=tuple(layer.bias for layer in run),
        text=text,
        why=f"chain of {len(run)}: deltas below {run[-1].name} are recomputed",
        num_bytes=num_bytes,
        flops=flops,
        seconds=costs.seconds(num_bytes, flops),
        passes=tuple(passes),
        capture="rows",
        rows=rows,
        most_rows=_most_rows(rows, num_bytes, dense_bytes),
    )


def _most_rows(rows: int, num_bytes: float, dense_bytes: float) -> int:
    """Up to which factors are what was planned for, and less than dense."""
    pays = rows * dense_bytes / num_bytes if num_bytes else 0.0
    return max(rows, int(min(_ROWS_SLACK * rows, pays)))


def _single(layer: Layer, costs: Costs, most_rank: int) -> Choice:
    if not layer.floating:
        return _dense(layer, costs, "its type is not floating", fallback=True)
    if layer.sparse:
        return replace(_dense(layer, costs, "its gradient is sparse", fallback=True), sparse=True)
    if costs.size == 1:
        return _dense(layer, costs, "there is one rank")
    if isinstance(layer.method, _EXACT):
        return _exact(layer, costs)
    if isinstance(layer.method, _methods.RankDad):
        return _low_rank(layer, layer.method, costs)
    if isinstance(layer.method, _methods.Auto):
        return replace(_low_rank(layer, _auto_rank_dad(layer, most_rank), costs), fallback=False)
    if isinstance(layer.method, _methods.Quantiser):
        return _quantised(layer, layer.method, costs, "asked for")
    if isinstance(layer.method, _methods.ChunkTopK):
        return chunked(layer, layer.method, costs)
    if isinstance(layer.method, _methods.PowerSgd):
        return _power_sgd(layer, layer.method, costs)
    if isinstance(layer.method, _SPARSE):
        return sparse(layer, layer.method, costs)
    raise TypeError(f'"{layer.name}": there is no plan for {layer.method!r}')


def _exact(layer: Layer, costs: Costs) -> Choice:
    planned = isinstance(layer.method, _methods.Exact)
    wire = getattr(layer.method, "wire", "fp32")
    if layer.dense and (layer.used or layer.columns == 1):
        return _dense(layer, costs, layer.reason, fallback=not planned)
    values = max((s.rows for s in layer.seen), default=0) * (layer.columns + layer.row_outputs)
    num_bytes = values * layer.row_bits(wire) / 8
    indexed = max((s.indexed_rows for s in layer.seen), default=0)
    num_bytes += indexed * (4 + layer.columns * layer.row_bits(wire) / 8)
    num_bytes *= costs.factor_copies
    product = 2.0 * layer.all_rows * layer.columns * layer.row_outputs
    flops = product if any(s.rows for s in layer.seen) else 0.0
    dense_bytes = costs.dense_bytes(layer)
    if num_bytes >= dense_bytes:
        why = f"{layer.rows} rows would take {num_bytes / 1e3:.1f} kB, dense takes {dense_bytes / 1e3:.1f} kB"
        return _dense(layer, costs, why, fallback=not planned)
    seconds = costs.seconds(num_bytes, flops)
    if planned and seconds >= costs.seconds(dense_bytes, flops / costs.num_ranks):
        return _dense(
            layer, costs, f"faster here: the product of all ranks' {layer.all_rows} rows takes longer"
        )
    why = f"{layer.rows} rows of {layer.columns}+{layer.row_outputs}" if layer.used else "not used yet"
    return Choice(
        kind="factor",
        layers=(layer.name,),
        biases=(layer.bias,),
        text=f"factor;wire={wire};rows={layer.rows};{layer.text()}",
        why=why,
        num_bytes=num_bytes,
        flops=flops,
        seconds=seconds,
        capture="rows",
        rows=layer.rows,
        most_rows=_most_rows(layer.rows, num_bytes, dense_bytes),
    )


# Lossy methods

_AUTO_RANK = 4
# Tokens give gradients of higher rank than samples do: this part of the smaller side. A transformer 256 wide
# lost 0.052 nats with rank 16 (benchmarks/accuracy_text.py).
_AUTO_PART_TOKENS = 8
# Tried in turn until a budget is met; the first is the most that tokens get.
_AUTO_RANKS = (32, 16, 8, 4, 2, 1)


def _auto_rank_dad(layer: Layer, most_rank: int) -> _methods.RankDad:
    tokens = any(s.samples and s.rows + s.indexed_rows > s.samples for s in layer.seen)
    by_side = min(layer.out, layer.columns) // _AUTO_PART_TOKENS if tokens else 0
    rank = min(max(by_side, _AUTO_RANK), most_rank)
    return _methods.RankDad(rank=rank, combine="owner", wire="int4")


def _low_rank(layer: Layer, method: _methods.RankDad, costs: Costs) -> Choice:
    if layer.out <= 1 or layer.columns <= 1:
        return _rest(layer, method, costs, "has no second dimension")
    columns = layer.columns + (layer.bias is not None)
    rank = min(method.rank, layer.out, columns)
    if rank * (layer.out + columns) * _value_bits(layer, method) >= 8 * layer.elements:
        return _rest(layer, method, costs, f"too small for rank {method.rank}")
    choice = _by_rank(layer, method, costs)
    dense_bytes = costs.dense_bytes(layer)
    if choice.num_bytes >= dense_bytes:  # gather, whose bytes grow with the number of ranks
        sizes = f"would take {choice.num_bytes / 1e3:.1f} kB, dense takes {dense_bytes / 1e3:.1f} kB"
        return _rest(layer, method, costs, f"rank {method.rank} from each of {costs.size} ranks {sizes}")
    return choice


def _value_bits(layer: Layer, method: _methods.RankDad) -> int:
    wire = "fp32" if method.combine == "power" else method.wire
    return _WIRE_BITS[wire] if wire != "fp32" else 8 * max(4, layer.element_bytes)


def _by_rank(layer: Layer, method: _methods.RankDad, costs: Costs) -> Choice:
    columns = layer.columns + (layer.bias is not None)
    rank = min(method.rank, layer.out, columns)
    wire = "fp32" if method.combine == "power" else method.wire
    bits = _value_bits(layer, method)
    combine = method.combine
    if combine == "auto":
        combine = "gather" if costs.size == 2 else "owner"
    feedback = method.residual if method.error_feedback else "none"
    if feedback == "rows" and (costs.hosts or layer.dense or any(s.indexed_rows for s in layer.seen)):
        feedback = "dense"  # there are no rows to keep
    num_bytes = rank * (layer.out + columns) * bits / 8 * (costs.size - 1)
    num_bytes *= {"gather": 1.0, "owner": 2 / costs.size, "power": 2 / costs.size}[combine]
    words = [
        "low_rank",
        f"rank={method.rank}",
        f"tol={method.tol!r}",
        f"energy={method.energy or 0.0!r}",
        f"iterations={method.iterations}",
        f"combine={combine}",
        "owner=?" if combine != "gather" else "owner=0",
        f"wire={wire}",
        f"feedback={feedback}",
        layer.text(),
    ]
    # The dense residual takes the gradient in either form; with many rows their product is most of the
    # work, and the framework's is as fast.
    rows_that_pay = (
        int(_FRAMEWORK_PRODUCT_ROWS * min(layer.out, layer.columns)) if feedback == "dense" else ANY_ROWS
    )
    # A host adds up formed gradients.
    as_rows = not costs.hosts and (not layer.dense or not layer.used) and layer.rows <= rows_that_pay
    flops = 8.0 * rank * layer.out * columns
    why = f"rank {rank} of {layer.out}x{columns}, {combine}"
    if not layer.used:
        why += "; not used yet"
    elif layer.dense:
        why += f"; of the formed gradient: {layer.reason}"
    return Choice(
        kind="low_rank",
        layers=(layer.name,),
        biases=(layer.bias,),
        text=";".join(words),
        why=why,
        num_bytes=num_bytes,
        flops=flops,
        seconds=costs.seconds(num_bytes, flops),
        capture="rows" if as_rows else "off",
        rows=layer.rows,
        most_rows=ANY_ROWS if costs.hosts else rows_that_pay if layer.used else 0,
    )


def _power_sgd(layer: Layer, method: _methods.PowerSgd, costs: Costs) -> Choice:
    """Takes the formed gradient, and matrices only, as in the paper (arXiv:1905.13727)."""
    if layer.out <= 1 or layer.columns <= 1:
        return _dense(layer, costs, "has no second dimension", fallback=True)
    by_power = _methods.RankDad(rank=method.rank, combine="power", error_feedback=method.error_feedback)
    choice = _by_rank(layer, by_power, costs)
    if method.rank >= min(layer.out, layer.columns) or choice.num_bytes >= costs.dense_bytes(layer):
        return _dense(layer, costs, f"too small for rank {method.rank}", fallback=True)
    why = f"rank {method.rank} of {layer.out}x{layer.columns}"
    return replace(choice, why=why, capture="off", most_rows=ANY_ROWS, label="powersgd")


def _rest(layer: Layer, method: _methods.RankDad, costs: Costs, why: str) -> Choice:
    if method.rest == "none":
        return _dense(layer, costs, f"{why}; rest=none", fallback=True)
    return replace(_quantised(layer, _methods.Int8(), costs, f"{why}: rest=int8"), fallback=True)


def _quantised(layer: Layer, method: _methods.Quantiser, costs: Costs, why: str) -> Choice:
    num_bytes = method.bytes_sent(layer.out * layer.columns, costs.size)
    dense = _dense(layer, costs, why, fallback=True)
    if num_bytes >= dense.num_bytes:
        why += f"; {method.name} would take {num_bytes:.0f} bytes, dense takes {dense.num_bytes:.0f}"
        return replace(dense, why=why)
    text = method.core_text(costs.seed)
    return Choice(
        kind=text.partition(";")[0],
        layers=(layer.name,),
        biases=(None,),
        text=text,
        why=why,
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, 0.0),
        rows=layer.rows,
    )


def describe(choice: Choice) -> str:
    """The method as a user knows it."""
    return choice.row.label_of(choice)
