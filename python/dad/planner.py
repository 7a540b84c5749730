"""Which exchange each layer gets, and why: a pure function of what all ranks have seen.

Every rank computes the plan from the same observations, so all have the same one. A full cost model has
its place in `Costs`; today it holds a link rate and a product rate, both measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dad import compression as _methods

# A layer whose A only serves the recursion below it needs one bit per unit for these.
_ONE_BIT = ("relu", "leaky_relu")
_WIRE_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
# Where G comes formed by the framework or from rows: rows beyond this many times the smaller side
# make the product the main work, and the framework's is as good.
_FRAMEWORK_PRODUCT_ROWS = 1.0


@dataclass(frozen=True)
class Link:
    """The layer above, and what stands between."""

    upper: str
    activation: str
    slope: float = 0.0

    def mark(self) -> str:
        return f"leaky_relu={self.slope!r}" if self.activation == "leaky_relu" else self.activation


@dataclass(frozen=True)
class Observation:
    """What one rank saw of one tensor in a step."""

    rows: int = 0
    indexed_rows: int = 0
    samples: int = 0
    dense: bool = False  # some or all of its gradient came formed
    used: bool = True
    bias: str | None = None  # the tensor that rides with it
    link: Link | None = None
    reason: str = ""  # why not (only) as rows


@dataclass(frozen=True)
class Layer:
    """One tensor as a matrix, with what all ranks saw of it."""

    name: str
    out: int
    columns: int  # without the bias
    element_bytes: int
    floating: bool
    method: _methods.Method
    seen: tuple[Observation, ...]  # by rank

    @property
    def size(self) -> int:
        return len(self.seen)

    @property
    def bias(self) -> str | None:
        names = {s.bias for s in self.seen if s.rows}
        return names.pop() if len(names) == 1 else None

    @property
    def link(self) -> Link | None:
        """Only where every rank that has rows saw it."""
        links = {s.link for s in self.seen if s.rows}
        return links.pop() if len(links) == 1 else None

    @property
    def dense(self) -> bool:
        return any(s.dense for s in self.seen) or not any(s.rows or s.indexed_rows for s in self.seen)

    @property
    def rows(self) -> int:
        return max((s.rows + s.indexed_rows for s in self.seen), default=0)

    @property
    def all_rows(self) -> int:
        return sum(s.rows + s.indexed_rows for s in self.seen)

    @property
    def reason(self) -> str:
        return next((s.reason for s in self.seen if s.reason), "")

    @property
    def elements(self) -> int:
        return self.out * (self.columns + (self.bias is not None))

    def text(self, *marks: str) -> str:
        words = [f"{self.out}x{self.columns}", *(["bias"] if self.bias is not None else []), *marks]
        return "layer=" + ":".join(words)


@dataclass(frozen=True)
class Costs:
    """What the planner counts with. Rates are the least over the ranks."""

    size: int
    bytes_per_second: float
    flops_per_second: float

    def dense_bytes(self, layer: Layer) -> float:
        return 2 * (self.size - 1) / self.size * layer.elements * layer.element_bytes

    def seconds(self, num_bytes: float, flops: float) -> float:
        return num_bytes / self.bytes_per_second + flops / self.flops_per_second


@dataclass(frozen=True)
class Choice:
    """What travels as one request. `layers` are names, of a chain from the lowest to the top."""

    kind: str  # dense, factor, low_rank, int8
    layers: tuple[str, ...]
    biases: tuple[str | None, ...]
    text: str  # the method, for the core
    why: str
    num_bytes: float  # predicted, sent by one rank in a step
    seconds: float
    passes: tuple[bool, ...] = ()  # chain: its own gradient goes another way
    capture: str = "off"  # how the layers are captured from now on
    rows: int = 0


@dataclass
class Plan:
    choices: list[Choice] = field(default_factory=list)
    size: int = 1


def make_plan(layers: Sequence[Layer], costs: Costs) -> Plan:
    plan = Plan(size=costs.size)
    by_name = {layer.name: layer for layer in layers}
    folded = _folded(layers)
    done: set[str] = set()
    for chain in _chains([layer for layer in layers if layer.name not in folded], by_name, costs):
        plan.choices.append(chain)
        done.update(name for name, passes in zip(chain.layers, chain.passes, strict=True) if not passes)
        done.update(b for b, p in zip(chain.biases, chain.passes, strict=True) if b is not None and not p)
    in_chain = {
        name
        for choice in plan.choices
        for name, passes in zip(choice.layers, choice.passes, strict=True)
        if passes
    }
    owned = [0.0] * costs.size
    singles: list[Choice] = []
    for layer in layers:
        if layer.name in done or layer.name in folded:
            continue
        choice = _single(layer, by_name, costs)
        if layer.name in in_chain:
            why = f"dense is cheaper ({layer.rows} rows); it hands its delta down the chain"
            choice = replace(choice, why=why, capture="rows_and_dense")
        singles.append(choice)
    # Owners take the largest first, so that the loads come out even.
    order = sorted(range(len(singles)), key=lambda i: (-singles[i].num_bytes, i))
    for i in order:
        if singles[i].kind == "low_rank" and "combine=gather" not in singles[i].text:
            owner = owned.index(min(owned))
            owned[owner] += singles[i].num_bytes
            singles[i] = replace(singles[i], text=singles[i].text.replace("owner=?", f"owner={owner}"))
    plan.choices.extend(singles)
    covered = {
        name
        for choice in plan.choices
        for weight, bias, passes in zip(choice.layers, choice.biases, choice.passes, strict=True)
        if not passes
        for name in (weight, bias)
    }
    for layer in layers:  # a bias whose weight went dense goes dense itself
        if layer.name not in covered:
            plan.choices.append(_single(layer, by_name, costs))
    return plan


def _folded(layers: Sequence[Layer]) -> set[str]:
    """Biases that ride with a weight and have no gradient of their own."""
    riders = {layer.bias for layer in layers if layer.bias is not None and _takes_rows(layer)}
    return {layer.name for layer in layers if layer.name in riders and not _has_own_gradient(layer)}


def _has_own_gradient(layer: Layer) -> bool:
    return any(s.dense for s in layer.seen)


def _takes_rows(layer: Layer) -> bool:
    return not layer.dense and layer.floating and isinstance(layer.method, _FACTOR_METHODS)


_EXACT = (_methods.Dad, _methods.Exact)  # Edad is a Dad
_FACTOR_METHODS = (_methods.Dad, _methods.Exact, _methods.RankDad, _methods.Auto)


# Exact methods


def _chains(layers: Sequence[Layer], by_name: dict[str, Layer], costs: Costs) -> list[Choice]:
    """Chains of edAD: runs of linked layers, cut where that is cheapest."""
    linked = {
        layer.name: layer.link.upper
        for layer in layers
        if layer.link is not None and _may_chain(layer) and _may_chain(by_name.get(layer.link.upper))
    }
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
        layer is not None and _takes_rows(layer) and isinstance(layer.method, _methods.Edad | _methods.Exact)
    )


def _cut(run: list[Layer], costs: Costs) -> list[Choice]:
    """The cheapest way to cut a run into chains and single layers; only the chains are returned."""
    best: list[tuple[float, list[Choice]]] = [(0.0, [])]  # for the layers below
    for end in range(1, len(run) + 1):
        candidates = []
        for begin in range(end):
            seconds, chosen = best[begin]
            if end - begin == 1:
                single = _single(run[begin], {}, costs)
                candidates.append((seconds + single.seconds, chosen))
            else:
                chain = _chain(run[begin:end], costs)
                extra = sum(
                    costs.seconds(costs.dense_bytes(layer), 0.0)
                    for layer, passes in zip(run[begin:end], chain.passes, strict=True)
                    if passes
                )
                if chain.num_bytes > 0:
                    candidates.append((seconds + chain.seconds + extra, [*chosen, chain]))
        best.append(min(candidates, key=lambda candidate: candidate[0]))
    return best[-1][1]


def _chain(run: list[Layer], costs: Costs) -> Choice:
    """A chain that sends the top layer's D. A layer above the lowest may pass D on only."""
    exact = isinstance(run[0].method, _methods.Exact)
    peers = costs.size - 1
    rows = max(layer.rows for layer in run)
    wire = "fp32" if exact else run[0].method.wire
    bits = min(_WIRE_BITS[wire], 8 * run[0].element_bytes)
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
        num_bytes += a_bytes / 32 if goes_dense else a_bytes
        flops += 0.0 if goes_dense else product
        if i > 0:
            flops += product  # D of the layer below
        marks.append([layer.link.mark()] if i + 1 < len(run) and layer.link is not None else [])
    text = f"factor;wire={wire};rows={rows};" + ";".join(
        layer.text(*mark, *(["pass"] if p else [])) for layer, mark, p in zip(run, marks, passes, strict=True)
    )
    return Choice(
        kind="factor",
        layers=tuple(layer.name for layer in run),
        biases=tuple(layer.bias for layer in run),
        text=text,
        why=f"chain of {len(run)}: deltas below {run[-1].name} are recomputed",
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, flops),
        passes=tuple(passes),
        capture="rows",
        rows=rows,
    )


def _single(layer: Layer, by_name: dict[str, Layer], costs: Costs) -> Choice:
    if not layer.floating:
        return _dense(layer, costs, "its type is not floating")
    if isinstance(layer.method, _EXACT):
        return _exact(layer, costs)
    if isinstance(layer.method, _methods.RankDad):
        return _low_rank(layer, layer.method, costs)
    if isinstance(layer.method, _methods.Auto):
        return _low_rank(layer, auto_rank_dad(layer), costs)
    if isinstance(layer.method, _methods.Int8):
        return _int8(layer, layer.method, costs, "asked for")
    return _dense(layer, costs, "asked for")


def _dense(layer: Layer, costs: Costs, why: str) -> Choice:
    num_bytes = costs.dense_bytes(layer)
    return Choice(
        kind="dense",
        layers=(layer.name,),
        biases=(None,),
        text="none",
        why=why,
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, 0.0),
        passes=(False,),
        rows=layer.rows,
    )


def _exact(layer: Layer, costs: Costs) -> Choice:
    if layer.dense:
        return _dense(layer, costs, layer.reason or "its gradient came from an op without factors")
    wire = getattr(layer.method, "wire", "fp32")
    bits = min(_WIRE_BITS[wire], 8 * layer.element_bytes)
    values = max((s.rows for s in layer.seen), default=0) * (layer.columns + layer.out)
    values += max((s.indexed_rows for s in layer.seen), default=0) * (layer.columns + 1)
    num_bytes = (costs.size - 1) * values * bits / 8
    flops = 2.0 * layer.all_rows * layer.columns * layer.out if any(s.rows for s in layer.seen) else 0.0
    dense = _dense(layer, costs, f"{layer.rows} rows would take {num_bytes / 1e3:.0f} kB, dense takes less")
    if num_bytes >= dense.num_bytes:
        return dense
    seconds = costs.seconds(num_bytes, flops)
    if isinstance(layer.method, _methods.Exact) and seconds >= dense.seconds + costs.seconds(
        0.0, flops / costs.size
    ):
        return replace(
            dense, why=f"faster here: the product of all ranks' {layer.all_rows} rows takes longer"
        )
    return Choice(
        kind="factor",
        layers=(layer.name,),
        biases=(layer.bias,),
        text=f"factor;wire={wire};rows={layer.rows};{layer.text()}",
        why=f"{layer.rows} rows of {layer.columns}+{layer.out}",
        num_bytes=num_bytes,
        seconds=seconds,
        passes=(False,),
        capture="rows",
        rows=layer.rows,
    )


# Lossy methods

# Tokens give gradients of higher rank than samples do.
_AUTO_RANK = 4
_AUTO_RANK_TOKENS = 16


def auto_rank_dad(layer: Layer) -> _methods.RankDad:
    tokens = any(s.samples and s.rows + s.indexed_rows > s.samples for s in layer.seen)
    return _methods.RankDad(rank=_AUTO_RANK_TOKENS if tokens else _AUTO_RANK, combine="owner", wire="int4")


def _low_rank(layer: Layer, method: _methods.RankDad, costs: Costs) -> Choice:
    rank = min(method.rank, layer.out, layer.columns + (layer.bias is not None))
    columns = layer.columns + (layer.bias is not None)
    wire = "fp32" if method.combine == "power" else method.wire
    bits = _WIRE_BITS[wire] if wire != "fp32" else 8 * max(4, layer.element_bytes)
    if layer.out <= 1 or layer.columns <= 1:
        return _rest(layer, method, costs, "has no second dimension")
    if rank * (layer.out + columns) * bits >= 8 * layer.elements:
        return _rest(layer, method, costs, f"too small for rank {method.rank}")
    combine = method.combine
    if combine == "auto":
        combine = "gather" if costs.size == 2 else "owner"
    feedback = method.residual if method.error_feedback else "none"
    if feedback == "rows" and (layer.dense or any(s.indexed_rows for s in layer.seen)):
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
    rows_pay = not layer.dense and (
        feedback != "dense" or layer.rows <= _FRAMEWORK_PRODUCT_ROWS * min(layer.out, layer.columns)
    )
    flops = 8.0 * rank * layer.out * columns
    why = f"rank {rank} of {layer.out}x{columns}, {combine}"
    if layer.dense:
        why += f"; of the formed gradient: {layer.reason or 'it came from an op without factors'}"
    return Choice(
        kind="low_rank",
        layers=(layer.name,),
        biases=(layer.bias,),
        text=";".join(words),
        why=why,
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, flops),
        passes=(False,),
        capture="rows" if rows_pay else "off",
        rows=layer.rows,
    )


def _rest(layer: Layer, method: _methods.RankDad, costs: Costs, why: str) -> Choice:
    if method.rest == "none":
        return _dense(layer, costs, f"{why}; rest=none")
    return _int8(layer, _methods.Int8(), costs, f"{why}: rest=int8")


def _int8(layer: Layer, method: _methods.Int8, costs: Costs, why: str) -> Choice:
    elements = layer.out * layer.columns
    buckets = -(-elements // method.bucket)
    num_bytes = 2 * (costs.size - 1) / costs.size * (elements + 4 * buckets + costs.size)
    dense = _dense(layer, costs, f"{why}; too small to quantise")
    if num_bytes >= dense.num_bytes:
        return dense
    return Choice(
        kind="int8",
        layers=(layer.name,),
        biases=(None,),
        text=f"int8;bucket={method.bucket};feedback={int(method.error_feedback)}",
        why=why,
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, 0.0),
        passes=(False,),
        rows=layer.rows,
    )


def describe(choice: Choice) -> str:
    """The method as a user knows it."""
    if choice.kind == "factor":
        return "edad" if len(choice.layers) > 1 else "dad"
    return {"low_rank": "rank_dad"}.get(choice.kind, choice.kind)


def predicted(plan: Plan) -> dict[str, Any]:
    """Totals of a step."""
    return {
        "bytes": sum(choice.num_bytes for choice in plan.choices),
        "seconds": sum(choice.seconds for choice in plan.choices),
    }
