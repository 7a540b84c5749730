"""In which form the gradients of a graph can be sent, by the methods that were asked for.

This is settled before any op is added: factors of a convolution take several ops each, so a graph has them
only where a plan may choose them. Sizes that are not known yet count as one, so nothing is left out that
could pay with some batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dad.methods.compression import Auto, Dad, Exact, RankDad
from dad.methods.planned import looks_at_variance
from dad.tensorflow.factors.find import Found
from dad.tensorflow.factors.uses import ConvolutionUse


def choose_forms(found: Sequence[Found], gradients: Sequence[Any], methods: Sequence[Any]) -> None:
    """Changes `found` to what the graph is to have. Methods are those of the tensors; None: not planned."""
    for one, method in zip(found, methods, strict=True):
        if looks_at_variance(method) and one.sums and one.uses:
            _release_bias(one, found, gradients)
            one.uses = one.sums
    for one, method in zip(found, methods, strict=True):
        if looks_at_variance(method):
            if one.sums and one.rides_with is None:
                one.uses, one.rest, one.reason = one.sums, [], ""
        else:
            one.is_formed = any(
                isinstance(use, ConvolutionUse) and _are_never_sent(use, method, one) for use in one.uses
            )


def _release_bias(one: Found, found: Sequence[Found], gradients: Sequence[Any]) -> None:
    """Rows with indices are those of the weight only."""
    if one.bias is not None:
        bias = found[one.bias]
        bias.rides_with, bias.rest, bias.reason = None, [gradients[one.bias]], "a bias on its own"
        one.bias = None


def _are_never_sent(use: ConvolutionUse, method: Any, one: Found) -> bool:
    """Whether no plan chooses the rows of this use (planner.py), whatever the batch and the ranks are."""
    if isinstance(method, Dad | Exact):
        return not _may_be_smaller(use, method, one)
    by_rank = RankDad() if isinstance(method, Auto) else method
    if isinstance(by_rank, RankDad):
        keeps_dense = by_rank.error_feedback and by_rank.residual == "dense"
        return keeps_dense and use.least_rows() > min(one.layout.out, one.layout.columns)
    return True  # all others take the gradient


def _may_be_smaller(use: ConvolutionUse, method: Any, one: Found) -> bool:
    """Between two ranks, where factors have the best chance: with more of them each sends its rows more
    often than a gradient."""
    value_bytes = use.inputs[0].dtype.size
    if getattr(method, "wire", "fp32") == "bf16":
        value_bytes = min(value_bytes, 2)
    convolution, layout = use.convolution, one.layout
    sent = use.least_rows() * (convolution.columns + convolution.outputs_of_group) * value_bytes
    has_bias = one.bias is not None
    return sent < layout.out * (layout.columns + has_bias) * use.dtype.size
