"""Layers that lie above each other with nothing but an activation in between, from what was found of their
gradients: D of the lower one need not travel (edAD)."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dad.tensorflow.factors.nodes import Elementwise, Nodes, handle_in, is_eager
from dad.tensorflow.factors.uses import TRANSPOSED, MatrixUse, Path

if TYPE_CHECKING:
    from dad.tensorflow.factors.find import Found


@dataclass(frozen=True)
class Link:
    """This use is the layer below another, with nothing but an activation in between: D of this one follows
    from D of the other, by the other's weight and the activation, and A of the other from this layer."""

    activation: str  # relu, leaky_relu, tanh, sigmoid, gelu, gelu_tanh, silu
    slope: float  # of leaky_relu
    upper: int  # the variable above, by its place in the list
    upper_use: int


def find_links(nodes: Nodes, variables: Sequence[Any], found: Sequence[Found]) -> None:
    """Sets `link` of the uses that have one."""
    _Links(nodes, variables, found).find()


def scales_of(nodes: Nodes, path: Path) -> tuple[Any, ...]:
    """By what a gradient is multiplied on its way, and how."""
    return tuple((step.kind, nodes.key(step.scalar)) for step in path.steps if step.scalar is not None)


# The op of an activation's gradient: name, op of the activation, and the places of dy and of what it kept.
_ACTIVATIONS = {
    "ReluGrad": ("relu", "Relu", 0, 1),
    "LeakyReluGrad": ("leaky_relu", "LeakyRelu", 0, 1),
    "TanhGrad": ("tanh", "Tanh", 1, 0),
    "SigmoidGrad": ("sigmoid", "Sigmoid", 1, 0),
}


# Where activations are compared. Exact GELU and its approximation differ by 1e-4 and more in between.
_SAMPLES = np.linspace(-5, 5, 81)


def _close(one, other) -> bool:
    return bool(np.all(np.isfinite(one))) and float(np.abs(one - other).max()) < 1e-5


def _gelu(x):
    return 0.5 * x * (1 + _erf(x / np.sqrt(2)))


def _gelu_derivative(x):
    return 0.5 * (1 + _erf(x / np.sqrt(2))) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def _tanh_of(x):
    return np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _gelu_tanh(x):
    return 0.5 * x * (1 + _tanh_of(x))


def _gelu_tanh_derivative(x):
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + _tanh_of(x)) + 0.5 * x * (1 - _tanh_of(x) ** 2) * inner


def _silu(x):
    return x / (1 + np.exp(-x))


def _silu_derivative(x):
    return (1 + x * (1 - 1 / (1 + np.exp(-x)))) / (1 + np.exp(-x))


_erf = np.vectorize(math.erf)
_SMOOTH = {
    "gelu": (_gelu, _gelu_derivative),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_derivative),
    "silu": (_silu, _silu_derivative),
}


class _Links:
    """Finds uses that lie above each other with an activation in between. Every step is proven by the
    identity of tensors: a residual, a dropout or a second consumer shows as another op, and ends a chain."""

    def __init__(self, nodes: Nodes, variables, found: list[Found]):
        self._nodes = nodes
        self._variables = variables
        self._found = found
        self._uppers = collections.defaultdict(list)  # the uses by their D
        # What was read from variables: weight and bias of a use, and the weight of one that is above a use.
        self._read_below: dict[int, tuple[Any, Any]] = {}
        self._read_above: dict[tuple[int, int], Any] = {}
        for index, one in enumerate(found):
            for number, use in enumerate(one.uses):
                if self._is_dense(use):
                    self._uppers[self._key(use.inputs[use.d_block])].append((index, number))

    def find(self) -> None:
        for index, one in enumerate(self._found):
            for use in one.uses:
                if self._is_dense(use):
                    use.link = self._link(index, use)
                    if use.link is not None and not self._is_read_once(use):
                        use.link = None

    def _is_read_once(self, use) -> bool:
        """Whether both layers of a link have one weight wherever they were looked at: a variable that is
        written in between has two values."""
        above = self._found[use.link.upper].uses[use.link.upper_use]
        weight, use.bias_read = self._read_below[id(use)]
        for one, read in ((use, weight), (above, self._read_above[id(above), id(use)])):
            if one.weight_read is None:
                one.weight_read = read
            if self._nodes.key(one.weight_read) != self._nodes.key(read):
                return False
        return True

    def _is_dense(self, use) -> bool:
        return (
            isinstance(use, MatrixUse)
            and use.d_block == use.delta_block
            and use.is_view(0)
            and use.is_view(1)
            and all(operand.shape.rank == 2 for operand in use.inputs[:2])
        )

    def _key(self, tensor):
        return self._nodes.key(self._nodes.base(tensor, casts=False))

    def _node(self, tensor):
        """The op behind a tensor, with views of it out of the way."""
        return self._nodes.of(self._nodes.base(tensor, casts=False))

    def _link(self, index, use) -> Link | None:
        gradient = self._node(use.inputs[use.d_block])
        if gradient is None:
            return None
        if gradient.type not in _ACTIVATIONS:
            return self._smooth_link(index, use)
        name, activation, dy, kept = _ACTIVATIONS[gradient.type]
        slope = float(gradient.attr("alpha")) if name == "leaky_relu" else 0.0
        for upper, number in self._above(gradient.inputs[dy], use):
            above = self._found[upper].uses[number]
            output = above.inputs[1 - above.d_block]
            forward = self._node(output)
            if forward is None or forward.type != activation:
                continue
            if name == "leaky_relu":
                is_same = self._key(gradient.inputs[kept]) == self._key(forward.inputs[0])
                is_same = is_same and float(forward.attr("alpha")) == slope
            else:
                is_same = self._key(gradient.inputs[kept]) == self._key(output)
            if is_same and self._is_layer(forward.inputs[0], index, use):
                return Link(name, slope, upper, number)
        return None

    def _above(self, tensor, use) -> list[tuple[int, int]]:
        """The uses of which the tensor is the gradient of the input: D W."""
        product = self._node(tensor)
        if product is None or product.type != "MatMul" or product.attr("transpose_a"):
            return []
        found = [
            (upper, number)
            for upper, number in self._uppers[self._key(product.inputs[0])]
            if self._reads(product.inputs[1], bool(product.attr("transpose_b")), upper, True)
            and self._scales(use) == self._scales(self._found[upper].uses[number])
        ]
        for upper, number in found:
            above = self._found[upper].uses[number]
            weight = self._nodes.variable_value(product.inputs[1])
            self._read_above[id(above), id(use)] = weight
        return found

    def _scales(self, use):
        return scales_of(self._nodes, use.path)

    def _smooth_link(self, index, use) -> Link | None:
        """Activations that are made of several ops, in forward and in backward."""
        gradients, above = [], {}
        for dy in (1.0, -2.5):  # two, to see that the gradient is proportional to dy

            def leaf(tensor, dy=dy):
                if self._is_layer(tensor, index, use):
                    return _SAMPLES
                uppers = self._above(tensor, use)
                if not uppers:
                    return None
                above[self._key(tensor)] = uppers
                return np.full_like(_SAMPLES, dy)

            root = self._nodes.base(use.inputs[use.d_block], casts=False)
            value = Elementwise(self._nodes, leaf).value(root)
            if value is None or len(above) != 1:
                return None
            gradients.append(value / dy)
        (uppers,) = above.values()
        for upper, number in uppers:
            operand = self._found[upper].uses[number].inputs
            output = operand[1 - self._found[upper].uses[number].d_block]
            below = Elementwise(
                self._nodes, lambda tensor: _SAMPLES if self._is_layer(tensor, index, use) else None
            )
            values = below.value(self._nodes.base(output, casts=False))
            for name, (function, derivative) in _SMOOTH.items():
                if values is None or not _close(values, function(_SAMPLES)):
                    continue
                if all(_close(gradient, derivative(_SAMPLES)) for gradient in gradients):
                    return Link(name, 0.0, upper, number)
        return None

    def _is_layer(self, tensor, index, use) -> bool:
        """Whether a tensor is what the layer of a use puts out: A W + b."""
        node = self._node(tensor)
        bias = self._found[index].bias
        bias_value = None
        if bias is not None:
            if node is None or node.type not in ("BiasAdd", "AddV2", "Add"):
                return False
            if self._nodes.variable_handle(node.inputs[1]) != self._handle(tensor, bias):
                return False
            bias_value = self._nodes.variable_value(node.inputs[1])
            node = self._node(node.inputs[0])
        if node is None or node.type != "MatMul" or node.attr("transpose_a"):
            return False
        if self._key(node.inputs[0]) != self._key(use.inputs[1 - use.d_block]):
            return False
        if not self._reads(node.inputs[1], bool(node.attr("transpose_b")), index, False):
            return False
        self._read_below[id(use)] = (self._nodes.variable_value(node.inputs[1]), bias_value)
        return True

    def _reads(self, tensor, transposed, index, as_canonical) -> bool:
        """Whether an operand of a product is the matrix of a variable: canonical, or transposed."""
        read = self._nodes.read_matrix(tensor)
        if read is None or read[0] != self._handle(tensor, index):
            return False
        is_transposed = read[1] != transposed
        return (is_transposed == (self._found[index].layout.order == TRANSPOSED)) == as_canonical

    def _handle(self, tensor, index):
        variable = self._variables[index]
        handle = variable.handle if is_eager(tensor) else handle_in(tensor.graph, variable)
        return None if handle is None else self._nodes.key(handle)
