"""What every method would send for a model, and how long a step would take: the tables of `dad plan`.

Everything is computed from one step of one process; all ranks are assumed to see the same.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dad.methods import compression as _methods
from dad.methods.planned import looks_at_variance
from dad.planning import planner
from dad.planning.costs import Costs, Line
from dad.planning.session import PlannedTensor, layers_of
from dad.planning.text import common, format_bytes, grouped, without_numbers
from dad.planning.types import Choice, Observation

# In this order: nothing is lost, bits are, the rest.
METHODS = (
    *("none", "exact", "dad", "edad"),
    *("fp16", "bf16", "int8", "qsgd"),
    *("auto", "rank_dad", "powersgd", "vgc", "vgc_strom", "strom", "topk", "chunk_topk"),
)
_LOSES_NOTHING = ("none", "exact", "dad", "edad")
_CASTS = {"fp16": 2, "bf16": 2}
# No method is recommended if communication is less than this part of a step, or if a method gains less.
_PAYS = 0.1
_MOST_WIDTH = 200


@dataclass(frozen=True)
class Result:
    """One method. by_layer: for each layer, in the order of the model, the bytes that a rank sends in a step
    and the seconds they take on their own, without the delay of the line."""

    method: str
    by_layer: dict[str, tuple[float, float]]
    exchange_seconds: float

    @property
    def num_bytes(self) -> float:
        return sum(num_bytes for num_bytes, _ in self.by_layer.values())


@dataclass(frozen=True)
class Comparison:
    """All methods for one model on one line.

    compute_seconds: what a step takes without communication; None if it was not measured.
    asked: the method that the script asks for, as a spec; empty if none.
    """

    size: int
    line: Line
    compute_seconds: float | None
    results: tuple[Result, ...]
    asked: str = ""

    def result(self, method: str) -> Result:
        return next(result for result in self.results if result.method == method)

    def step_seconds(self, result: Result) -> float:
        return (self.compute_seconds or 0.0) + result.exchange_seconds

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Heading, totals, layers and the recommendation. width: of lines; None: the terminal's."""
        parts = [self.heading(), self.totals(), self.layers(width), self.recommendation()]
        return "\n\n".join(parts)

    def heading(self) -> str:
        return (
            f"{self.size} ranks on {line_text(self.line)}; per rank and step, predicted from one step of one "
            "process"
        )

    def totals(self) -> str:
        """A line for each method."""
        dense = self.results[0]
        header = ["method", "bytes", "fewer", "exchange", "step", "faster", "gradients"]
        rows = []
        for result in self.results:
            step = self.step_seconds(result)
            rows.append(
                [
                    result.method + (" *" if result.method == self.asked.partition(":")[0] else ""),
                    format_bytes(result.num_bytes),
                    _times(dense.num_bytes, result.num_bytes),
                    _ms(result.exchange_seconds),
                    _ms(step) if self.compute_seconds is not None else "",
                    _times(self.step_seconds(dense), step) if self.compute_seconds is not None else "",
                    _what_is_lost(result.method),
                ]
            )
        text = _table(header, rows)
        if self.compute_seconds is not None:
            text += f"\nstep: {_ms(self.compute_seconds)} measured here, and the exchange"
        if self.asked:
            text += f"\n* what the script asks for: {self.asked}"
        return text

    def layers(self, width: int | None = None) -> str:
        """Bytes, and then times, of each layer by each method, in blocks that fit the terminal."""
        lines = fold_layers(self.results)
        most = width or min(shutil.get_terminal_size((100, 24)).columns, _MOST_WIDTH)
        texts = [
            [(name, [format_bytes(one) for one, _ in columns]) for name, columns in lines],
            [(name, [f"{1e3 * one:.3g}" for _, one in columns]) for name, columns in lines],
        ]
        blocks = []
        for heading, cells in zip(("layer: bytes", "layer: ms"), texts, strict=True):
            blocks += self._blocks(heading, cells, most)
        return "\n\n".join(blocks)

    def _blocks(self, heading: str, lines: Sequence[tuple[str, list[str]]], most: int) -> list[str]:
        names = max([len(heading), *(len(name) for name, _ in lines)])
        widths = [max(len(result.method), 7) + 2 for result in self.results]
        blocks, begin = [], 0
        while begin < len(widths):
            end, used = begin, names
            while end < len(widths) and (end == begin or used + widths[end] <= most):
                used += widths[end]
                end += 1
            header = [heading, *(result.method for result in self.results[begin:end])]
            blocks.append(_table(header, [[name, *cells[begin:end]] for name, cells in lines]))
            begin = end
        return blocks

    def recommendation(self) -> str:
        """One or two sentences: the method to begin with, and what it gains."""
        dense, exact, auto = (self.result(method) for method in ("none", "exact", "auto"))
        if self.size == 1:
            return "Recommendation: nothing, since one rank sends nothing."
        if self.compute_seconds is None:
            return f"Recommendation: {_option('auto')}, or {_option('exact')} to lose nothing."
        before = self.step_seconds(dense)
        if dense.exchange_seconds < _PAYS * before:
            part = 100 * dense.exchange_seconds / before
            return (
                f"Recommendation: no compression. The exchange of dense gradients is {part:.2g} % of a step "
                f"({_ms(before)})."
            )
        gains = {one.method: before / self.step_seconds(one) for one in (exact, auto)}
        if gains["exact"] >= (1 - _PAYS) * gains["auto"] and gains["exact"] > 1 + _PAYS:
            best, also = exact, ""
        elif gains["auto"] > 1 + _PAYS:
            best = auto
            also = (
                f" If no gradient may change: {_option('exact')}, {_gain(gains['exact'])}."
                if gains["exact"] > 1 + _PAYS / 2
                else " No method that leaves gradients as they are is faster than dense."
            )
        else:
            return (
                f"Recommendation: local steps (dadrun --local-steps 8). No method makes a step of "
                f"{_ms(before)} more than {100 * _PAYS:.0f} % faster."
            )
        text = (
            f"Recommendation: {_option(best.method)}. It sends {format_bytes(best.num_bytes)} instead of "
            f"{format_bytes(dense.num_bytes)}, and a step takes {_ms(self.step_seconds(best))} instead of "
            f"{_ms(before)}: {_gain(gains[best.method])}.{also}"
        )
        if best.exchange_seconds > 0.5 * self.step_seconds(best):
            text += " Most of that is still the exchange: dadrun --local-steps 8 does it less often."
        return text


def compare(
    tensors: Sequence[PlannedTensor],
    seen: dict[str, Observation],
    size: int,
    line: Line,
    flops_per_second: float,
    compute_seconds: float | None,
    methods: Sequence[str] = METHODS,
    asked: str = "",
) -> Comparison:
    """Compares methods.

    Args:
        tensors: of the model, in its order.
        seen: what a method that looks at the variance observed of them: no method sees more.
        size: the number of ranks.
        line: what a rank can send.
        flops_per_second: of products on this machine.
        compute_seconds: what a step takes without communication; None if that is not known.
        methods: names, or specs with options. Dense, exact and auto are always there.
        asked: what the script asks for.
    """
    wanted = dict.fromkeys(["none", "exact", "auto", *methods])
    specs = sorted(wanted, key=lambda spec: METHODS.index(spec) if spec in METHODS else len(METHODS))
    costs = Costs(
        size=size,
        bytes_per_second=line.bytes_per_second,
        flops_per_second=flops_per_second,
        delay=line.delay,
        seed=_methods.seed_from_environment(),
    )
    results = [_result(spec, tensors, seen, costs, line) for spec in specs]
    return Comparison(size, line, compute_seconds, tuple(results), asked)


def _result(
    spec: str, tensors: Sequence[PlannedTensor], seen: dict[str, Observation], costs: Costs, line: Line
) -> Result:
    compression = _methods.resolve(spec)
    by_name = {tensor.name: tensor for tensor in tensors}
    by_layer = {layer_of(name): (0.0, 0.0) for name in by_name}

    def add(name: str, num_bytes: float, seconds: float) -> None:
        before = by_layer[layer_of(name)]
        by_layer[layer_of(name)] = (before[0] + num_bytes, before[1] + seconds)

    layers = []
    for layer in layers_of(tensors, [seen] * costs.size):
        method = _method_for(compression, layer.name)
        if isinstance(method, _methods.Lossy | _methods.Dad | _methods.Exact):
            narrow = tuple(_without_samples(one, method) for one in layer.seen[:1]) * costs.size
            layers.append(replace(layer, method=method, seen=narrow))
            continue
        cast = _CASTS.get(getattr(method, "name", "")) if layer.floating else None
        count = math.prod(by_name[layer.name].shape) * (cast or layer.element_bytes)
        num_bytes = 2 * (costs.size - 1) / costs.size * count
        add(layer.name, num_bytes, costs.seconds(num_bytes, 0.0))
    choices = planner.make_plan(layers, costs).choices
    for choice in choices:
        add(_first(choice), choice.num_bytes, choice.seconds)
    seconds = sum(one for _, one in by_layer.values())
    if any(num_bytes for num_bytes, _ in by_layer.values()):
        # Tensors overlap each other. Tensors without a plan go to owners and back.
        rounds = [choice.rounds for choice in choices if choice.num_bytes]
        seconds += line.delay * max([*rounds, *([2] if len(layers) < len(tensors) else [])])
    return Result(spec, by_layer, seconds)


def _method_for(compression: Any, name: str) -> Any:
    return compression.method_for(name) if isinstance(compression, _methods.PerLayer) else compression


def _without_samples(one: Observation, method: Any) -> Observation:
    """The same step for another method: only variance methods look at the samples of a norm layer."""
    if one.sums and not looks_at_variance(method):
        return replace(one, rows=0, indexed_rows=0, dense=True, sums=False)
    return one


def asked_for(compression: Any) -> str:
    """The spec of what a script asks for; empty if it is a class of its own."""
    return compression.spec() if isinstance(compression, _methods.Method) else ""


def _first(choice: Choice) -> str:
    return next((name for name, _ in choice.own()), choice.layers[0])


def layer_of(name: str) -> str:
    """The layer of a tensor: `fc1` of `fc1.weight`, `dense/kernel` belongs to `dense`."""
    for mark in ("/", "."):
        head, found, _ = name.rpartition(mark)
        if found and head:
            return head
    return name


def fold_layers(results: Sequence[Result]) -> list[tuple[str, list[tuple[float, float]]]]:
    """(name, bytes and seconds by each method). Layers whose names differ only in a number share one line,
    which adds up all of them."""
    columns = {name: [result.by_layer[name] for result in results] for name in results[0].by_layer}

    def key(name: str) -> tuple[object, ...]:
        return without_numbers(name), tuple(num_bytes for num_bytes, _ in columns[name])

    lines = []
    for names in grouped(list(columns), key):
        name = names[0] if len(names) == 1 else f"{common(names)} ×{len(names)}"
        together = zip(*(columns[one] for one in names), strict=True)
        lines.append((name, [(sum(b for b, _ in column), sum(s for _, s in column)) for column in together]))
    return lines


def line_text(line: Line) -> str:
    rate, unit = 8 * line.bytes_per_second, 0
    while rate >= 1000 and unit < 4:
        rate, unit = rate / 1000, unit + 1
    text = f"{rate:g} {('', 'k', 'M', 'G', 'T')[unit]}bit/s"
    return f"{text} with {1e3 * line.delay:g} ms each way" if line.delay else text


def _what_is_lost(spec: str) -> str:
    name = spec.partition(":")[0]
    if name in _LOSES_NOTHING:
        return "as they are"
    return "rounded" if name in ("fp16", "bf16", "int8", "qsgd") else "lossy"


def _option(method: str) -> str:
    return f"dadrun --compression {method}"


def _gain(gain: float) -> str:
    return f"{gain:.3g} times faster"


def _times(before: float, now: float) -> str:
    return f"{before / now:.3g}x" if now else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Rows(list[dict[str, Any]]):
    """What dad.plan() returns: the rows of one method. Printed, it compares all methods."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        compared: Callable[[], Comparison],
        exposed_seconds: float | None = None,
    ) -> None:
        super().__init__(rows)
        # What communication adds to a step; in the total of format_plan().
        self.predicted_ms = None if exposed_seconds is None else 1e3 * exposed_seconds
        self._compare = compared
        self._comparison: Comparison | None = None

    @property
    def comparison(self) -> Comparison:
        """All methods. Computed on first access, by another forward and backward pass."""
        if self._comparison is None:
            self._comparison = self._compare()
        return self._comparison

    def __str__(self) -> str:
        return str(self.comparison)
