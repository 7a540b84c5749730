"""Choices for methods that send some of a gradient's elements.

Nobody knows beforehand how many elements will be sent: the bytes of a plan are a guess, except for topk. The
core sends nothing for a tensor whose share came out larger than dense, and the plan after that sends it
dense.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dad.methods import compression as _methods
from dad.planning.costs import Costs
from dad.planning.types import ANY_ROWS, Choice, Layer, dense_choice

Threshold = _methods.VgcStrom | _methods.Strom
Sparse = _methods.Vgc | _methods.TopK | Threshold
_VARIANCE = (_methods.Vgc, _methods.VgcStrom)
# The part of the elements that is expected to be sent.
_GUESS = {"vgc": 0.05, "vgc_strom": 0.01, "strom": 0.01}
# The head of a share: its length and flags; for each tensor, e_max or tau, a count and Rice's k.
_SHARE_HEAD = 8 + 1
_TENSOR_HEAD = {"vgc": 2 + 2, "vgc_strom": 4 + 2, "strom": 4 + 2, "topk": 2}


def sparse(layer: Layer, method: Sparse, costs: Costs) -> Choice:
    """vgc, vgc_strom, strom or topk for a layer; dense if that is smaller."""
    if layer.too_large:
        return dense_choice(layer, costs, "its sparse form was larger than dense", fallback=True)
    counts = [layer.out * layer.columns, *([layer.out] if layer.bias is not None else [])]
    num_bytes = (costs.size - 1) * (
        _SHARE_HEAD + sum(_tensor_bytes(method, count, layer.element_bytes) for count in counts)
    )
    dense_bytes = costs.dense_bytes(layer)
    if num_bytes >= dense_bytes:
        why = f"its sparse form would take {num_bytes:.0f} bytes, dense takes {dense_bytes:.0f}"
        return dense_choice(layer, costs, why, fallback=True)
    by_variance = isinstance(method, _methods.Vgc | _methods.VgcStrom)
    form, source, flops = "", "", 0.0
    if isinstance(method, _methods.Vgc | _methods.VgcStrom):
        form, source, flops = _variance(layer, method)
    why = source if layer.used else "not used yet"
    if flops:
        why += f": {flops / 1e6:.2f} Mflop more, {1e3 * flops / costs.flops_per_second:.2f} ms"
    if not by_variance:
        why = "of the formed gradient"
    elif layer.used and layer.dense:
        why += f"; formed: {layer.reason}"
    # A vector without rows may be a bias whose weight has them; those rows do not describe it.
    as_rows = by_variance and (layer.columns > 1 or _has_rows(layer))
    return Choice(
        kind="sparse",
        layers=(layer.name,),
        biases=(layer.bias,),
        text=";".join(["sparse", *_options(method, form), layer.text()]),
        why=why,
        num_bytes=num_bytes,
        flops=flops,
        seconds=costs.seconds(num_bytes, flops),
        capture="samples" if as_rows else "off",
        rows=layer.rows,
        # If a rank of a host does not exchange, nobody learns that it wants a new plan.
        most_rows=ANY_ROWS if layer.used or costs.hosts else 0,
    )


def chunked(layer: Layer, method: _methods.ChunkTopK, costs: Costs) -> Choice:
    """chunk_topk for a tensor; dense if that is smaller. With two ranks an owner would send as much as both
    send each other, one round later; with more ranks it sends less. For an embedding, only rows that a step
    has looked up take part."""
    combine = method.combine
    if combine == "auto":
        combine = "gather" if costs.size == 2 or costs.one_round else "owner"
    by_rows = not costs.hosts and _is_embedding(layer)
    rows = min(layer.out, max(s.indexed_rows for s in layer.seen)) if by_rows else layer.out
    count = rows * layer.columns
    copies = costs.size - 1 if combine == "gather" else 2 * (costs.size - 1) / costs.size
    num_bytes = copies * _chunks_bytes(method, count)
    dense = dense_choice(layer, costs, "", fallback=True)
    if num_bytes >= dense.num_bytes:
        why = f"chunk_topk would take {num_bytes:.0f} bytes, dense takes {dense.num_bytes:.0f}"
        return replace(dense, why=why)
    words = [
        "chunk_topk",
        f"chunk={method.chunk}",
        f"k={method.k}",
        f"bits={method.bits}",
        f"decay={float(method.decay)!r}",
        f"combine={combine}",
    ]
    if combine == "owner":  # few chunks get their owners in turn, as the planner spreads owners
        words.append("first=?" if layer.out * layer.columns <= costs.size * method.chunk else "first=0")
    if by_rows:
        words = ["chunk_topk_rows", *words[1:], layer.text()]
    number = -(-count // method.chunk)
    of = f"of each of {number} chunks" if number > 1 else f"of {count} elements"
    of += f", of {rows} rows that were looked up" if by_rows else ""
    return Choice(
        kind=words[0],
        layers=(layer.name,),
        biases=(None,),
        text=";".join(words),
        why=f"the {min(method.k, count)} largest {of}, {combine}",
        num_bytes=num_bytes,
        rounds=1 if combine == "gather" else 2,
        seconds=costs.seconds(num_bytes, 0.0),
        capture="rows" if by_rows else "off",
        rows=layer.rows,
    )


def _is_embedding(layer: Layer) -> bool:
    """Whether every rank that used it did so only by looking rows up."""
    looked_up = any(s.indexed_rows for s in layer.seen)
    return looked_up and layer.columns > 1 and not any(s.rows or s.dense for s in layer.seen)


def _chunks_bytes(method: _methods.ChunkTopK, count: int) -> float:
    """The size of a share: its head with count, Rice's k and levels, and a scale and elements per chunk."""
    chunks, last = divmod(count, method.chunk)
    sizes = [(chunks, method.chunk), (1, last)]
    head = float(_SHARE_HEAD + 2 + 2 * 2 ** (method.bits - 1))
    elements = 0.0
    for number, size in sizes:
        sent = min(method.k, size)
        if number and sent:
            bits = rice_bits(sent / size) + method.bits
            elements += number * (2 + sent * bits / 8)
    return head + elements


def _has_rows(layer: Layer) -> bool:
    return any(s.rows or s.indexed_rows for s in layer.seen)


def _options(method: Sparse, form: str) -> list[str]:
    words = [f"rule={method.name}"]
    if isinstance(method, _VARIANCE):
        words += [f"alpha={float(method.alpha)!r}", f"zeta={float(method.zeta)!r}", f"variance={form}"]
    if isinstance(method, Threshold):
        words.append(f"tau={float(method.tau)!r}")
        if method.tau_absolute is not None:
            words.append(f"tau_absolute={float(method.tau_absolute)!r}")
    if isinstance(method, _methods.TopK):
        words.append(f"ratio={float(method.ratio)!r}")
    else:
        words.append(f"coding={method.coding}")
    if isinstance(method, _methods.Vgc | _methods.TopK):
        words.append(f"feedback={int(method.error_feedback)}")
    return words


def _variance(layer: Layer, method: _methods.Vgc | _methods.VgcStrom) -> tuple[str, str, float]:
    """Whether the variance is over rows or samples; that in words; the cost beyond forming the gradient."""
    form = method.variance
    if not _has_rows(layer):
        passes = max(s.passes for s in layer.seen)
        source = (
            f"variance over micro-batches, {passes} backward passes"
            if passes > 1
            else "variance over micro-batches, with one backward pass the step itself"
        )
        return "row" if form == "auto" else form, source, 0.0
    if form == "auto":
        # Its squares, one product per sample and element, cost at most as much as the gradient.
        several = any(s.samples and s.rows + s.indexed_rows >= 2 * s.samples for s in layer.seen)
        form = "sample" if several else "row"
    samples = max(s.samples for s in layer.seen)
    elements = layer.out * layer.columns
    if any(s.sums for s in layer.seen):
        return form, f"variance over {samples} samples, per-sample sums", 2.0 * samples * elements
    if form == "sample":
        source = f"variance over {samples} samples of {layer.rows / max(1, samples):.4g} rows"
        # The samples of an embedding have no elements other than those of their rows.
        indexed = max(s.indexed_rows for s in layer.seen)
        dense_samples = samples if any(s.rows for s in layer.seen) else 0
        return form, source, 2.0 * dense_samples * elements + 2.0 * indexed * layer.columns
    flops = max(2.0 * s.rows * elements + 2.0 * s.indexed_rows * layer.columns for s in layer.seen)
    return form, f"variance over {layer.rows} rows", flops


def _tensor_bytes(method: Sparse, count: int, element_bytes: int) -> float:
    """The size of one tensor in a share."""
    ratio = method.ratio if isinstance(method, _methods.TopK) else _GUESS[method.name]
    sent = math.ceil(ratio * count)
    if not sent:
        return _TENSOR_HEAD[method.name]
    if isinstance(method, _methods.TopK):
        bits = rice_bits(sent / count) + 8 * max(4, element_bytes)
    elif method.coding == "word":
        bits = 32.0
    else:
        alone = isinstance(method, Threshold) and method.tau_absolute is not None  # the sign
        bits = rice_bits(sent / count) + (1 if alone else 4)
    return _TENSOR_HEAD[method.name] + sent * bits / 8


def rice_bits(part: float) -> float:
    """The size of a gap in Rice code if this part of all elements is sent, at random places."""
    gap = 1.0 / part - 1.0
    return min(k + 1 + gap / float(2**k) for k in range(32))
