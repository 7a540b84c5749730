"""Choices for exact methods: factors of single layers, and chains of them (edAD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning.costs import Costs
from dad.planning.types import Choice, Layer
from dad.planning.types import dense_choice as _dense

# With these activations, a layer whose A only serves the recursion below it needs one bit per unit.
_ONE_BIT = ("relu", "leaky_relu")
# A new plan is wanted when there are more rows than planned by this factor.
_ROWS_SLACK = 1.25


def chains(layers: Sequence[Layer], by_name: dict[str, Layer], costs: Costs) -> list[Choice]:
    """Chains of edAD: runs of linked layers, cut where that is cheapest."""
    lower: dict[str, str] = {}  # one per upper: ranks may have reached it from different layers
    for layer in layers:
        if layer.link is not None and _may_chain(layer) and _may_chain(by_name.get(layer.link.upper)):
            lower.setdefault(layer.link.upper, layer.name)
    linked = {name: upper for upper, name in lower.items()}
    uppers = set(linked.values())
    choices = []
    # edad was requested by name, so only bytes count.
    by_bytes = replace(costs, flops_per_second=float("inf"), line_price=1.0)
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
        and not layer.dense
        and not layer.sparse
        and layer.floating
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
                single = exact(run[begin], costs)
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
    """The most rows for which this choice still holds, and is smaller than dense."""
    pays = rows * dense_bytes / num_bytes if num_bytes else 0.0
    return max(rows, int(min(_ROWS_SLACK * rows, pays)))


def exact(layer: Layer, costs: Costs) -> Choice:
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
