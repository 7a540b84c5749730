"""Which gradients share an op of a graph.

To run an op takes TensorFlow longer than a small tensor takes the core. An op starts when its last gradient
is there, so that large ones have one each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dad.tensorflow.ops import resource

# Of gradients that share an op: what the core puts into one batch unless it is told otherwise (fusion_bytes),
# so that none waits for another that would not have gone with it anyway.
OP_BYTES = 1 << 21


def bytes_of(variable: Any) -> int:
    """The size of its gradient; 0 if its shape is not known."""
    tensor = resource(variable)
    if not tensor.shape.is_fully_defined():
        return 0
    return math.prod(tensor.shape) * tensor.dtype.base_dtype.size


def small_together(things: Sequence[int], sizes: Sequence[int], most: int = OP_BYTES) -> list[list[int]]:
    """Neighbours share an op until they have so many bytes. From the end, where backward begins. A size of 0
    is not known."""
    ops: list[list[int]] = []
    bytes_of_last = most
    for thing, size in zip(reversed(things), reversed(sizes), strict=True):
        bytes_of_this = size or most
        if bytes_of_last + bytes_of_this > most:
            ops.append([])
            bytes_of_last = 0
        ops[-1].append(thing)
        bytes_of_last += bytes_of_this
    return ops
