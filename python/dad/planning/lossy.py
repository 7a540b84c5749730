"""Choices for lossy methods that take any matrix or tensor: low rank, and quantisers."""

from __future__ import annotations

from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning.costs import DIRECT_BYTES, Costs
from dad.planning.types import ANY_ROWS, Choice, Layer
from dad.planning.types import dense_choice as _dense

_WIRE_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
# For gradients that the framework forms, or that come from rows: with more rows than this many times the
# smaller side, the product dominates, and the framework computes it as well.
_FRAMEWORK_PRODUCT_ROWS = 1.0
# Floating operations per element and direction: the two products of a subspace iteration, subtracting what
# was sent, and forming the result. With gather there is one more for each rank's directions, with an owner
# the same once more on it. Besides, the residual and the result are read and written (bytes per element).
_FLOPS_OF_ITERATION = 6.0
_FLOPS_OF_RESULT = 2.0
_MEMORY_OF_RESIDUAL = 24.0
# The cost of coding one element, in floating operations of a product that take as long.
_CODING_FLOPS = {"int8": 290.0, "qsgd": 1000.0}


def low_rank(layer: Layer, method: _methods.RankDad, costs: Costs) -> Choice:
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
        combine = "gather" if costs.size == 2 or costs.one_round else "owner"
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
    # The dense residual takes the gradient in either form. With many rows, their product is most of the work,
    # and the framework's is as fast.
    rows_that_pay = (
        int(_FRAMEWORK_PRODUCT_ROWS * min(layer.out, layer.columns)) if feedback == "dense" else ANY_ROWS
    )
    # The ranks of a host add up formed gradients.
    as_rows = not costs.hosts and (not layer.dense or not layer.used) and layer.rows <= rows_that_pay
    per_direction = _FLOPS_OF_ITERATION + _FLOPS_OF_RESULT * costs.size
    if combine != "gather":
        per_direction = _FLOPS_OF_ITERATION + _FLOPS_OF_RESULT * 2
        per_direction += (_FLOPS_OF_ITERATION + _FLOPS_OF_RESULT * costs.size) / costs.size
    flops = per_direction * rank * layer.out * columns
    memory = _MEMORY_OF_RESIDUAL * layer.out * columns
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
        memory=memory,
        rounds={"gather": 1, "owner": 2, "power": 4}[combine],
        seconds=costs.seconds(num_bytes, flops, memory),
        capture="rows" if as_rows else "off",
        rows=layer.rows,
        most_rows=ANY_ROWS if costs.hosts else rows_that_pay if layer.used else 0,
    )


def power_sgd(layer: Layer, method: _methods.PowerSgd, costs: Costs) -> Choice:
    """For the formed gradient and for matrices only, as in the paper (arXiv:1905.13727)."""
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
    if costs.one_round and layer.out * layer.columns * layer.element_bytes <= DIRECT_BYTES:
        return _dense(layer, costs, f"{why}; small enough to take one delay only", fallback=True)
    return replace(quantised(layer, _methods.Int8(), costs, f"{why}: rest=int8"), fallback=True)


def quantised(layer: Layer, method: _methods.Quantiser, costs: Costs, why: str) -> Choice:
    num_bytes = method.bytes_sent(layer.out * layer.columns, costs.size)
    dense = _dense(layer, costs, why, fallback=True)
    if num_bytes >= dense.num_bytes:
        why += f"; {method.name} would take {num_bytes:.0f} bytes, dense takes {dense.num_bytes:.0f}"
        return replace(dense, why=why)
    text = method.core_text(costs.seed)
    flops = _CODING_FLOPS.get(method.name, 0.0) * layer.out * layer.columns
    return Choice(
        kind=text.partition(";")[0],
        layers=(layer.name,),
        biases=(None,),
        text=text,
        why=why,
        num_bytes=num_bytes,
        flops=flops,
        rounds=1 if method.name == "qsgd" else 2,
        seconds=costs.seconds(num_bytes, flops),
        rows=layer.rows,
    )
