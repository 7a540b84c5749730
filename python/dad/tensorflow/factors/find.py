"""What gradients are made of: looks at gradient tensors and finds the factors that they are products of.

`find` walks back from a gradient, through ops that only reshape, cast, add or scale, to ops that it knows
(`factor_patterns.py`). Whoever sends the factors and does not read the gradient spares TensorFlow the
product: in a graph an op that nobody reads does not run.

For every variable, *gradients of the uses + rest = the local gradient*. What is not recognised for certain
is rest, with a reason for the user.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dad.tensorflow.factors.links import Link, find_links, scales_of
from dad.tensorflow.factors.nodes import Nodes, Recorder, handle_in, is_eager, unwrap
from dad.tensorflow.factors.patterns import Declined, Patterns
from dad.tensorflow.factors.uses import (
    CONVOLUTION,
    IDENTITY,
    TRANSPOSED,
    ConvolutionUse,
    IndexedUse,
    Layout,
    Path,
    ProductUse,
    SampleUse,
    Step,
    SumUse,
    Use,
    plain_layout,
)
from dad.tensorflow.graph import plain

__all__ = ["Found", "Layout", "Link", "Recorder", "Use", "find"]


@dataclass
class Found:
    """What the gradient of one variable is made of."""

    layout: Layout
    uses: list[Use] = field(default_factory=list)
    rest: list[Any] = field(default_factory=list)  # terms that come formed: tf.Tensor or tf.IndexedSlices
    reason: str = ""  # why there is a rest
    # The variable whose gradient is the sum of the rows of D of all these uses. That one has neither uses nor
    # rest, and `rides_with` says where its gradient is.
    bias: int | None = None
    rides_with: int | None = None
    # For a formed vector and for grouped convolutions: the same gradient by samples.
    sums: list[Use] = field(default_factory=list)
    # The graph has the gradient only. The uses tell the plan how many rows there would be.
    is_formed: bool = False


@plain
def find(gradients: Sequence[Any], variables: Sequence[Any], recorder: Recorder | None = None) -> list[Found]:
    """What each gradient is made of. In eager mode it needs the recorder that listened while gradients were
    computed; links are seen only if it listened in the forward pass, too."""
    nodes = Nodes(recorder)
    variables = [unwrap(variable) for variable in variables]
    walks = [
        _Walk(nodes, gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)
    ]
    summed = {key for walk in walks for key in walk.bias_keys()}
    found = [walk.finish(summed) for walk in walks]
    _pair_biases(walks, found)
    find_links(nodes, variables, found)
    return found


@dataclass
class _Sum:
    """A gradient that is the sum over all axes of `source` but the last ones, of `size` elements."""

    source: tf.Tensor
    size: int
    path: Path


@dataclass
class _Rest:
    tensor: Any
    path: Path
    reason: str


class _Walk:
    """Goes back from the gradient of one variable to what it is made of."""

    def __init__(self, nodes: Nodes, gradient, variable):
        self._nodes = nodes
        self._patterns = Patterns(nodes)
        self._gradient = gradient
        self._variable = variable
        self.sums: list[_Sum] | None = None  # if the gradient is made of nothing else
        self._terms: list[list[Use] | _Sum | _Rest] = []
        if gradient is None:
            return
        if not variable.shape.is_fully_defined():
            return
        if isinstance(gradient, tf.IndexedSlices):
            self._terms = self._of_slices(gradient)
        else:
            self._terms = self._of(gradient, tuple(variable.shape), Path())
        if self._terms and all(isinstance(term, _Sum) for term in self._terms):
            self.sums = self._terms

    def _of_slices(self, slices):
        path, values = Path(), slices.values
        while True:
            node = self._nodes.of(values)
            if node is None:
                break
            below = self._through(node, values, path)
            if below is None:
                break
            values, path = below
        return [self._patterns.indexed(tf.IndexedSlices(values, slices.indices), path, self._variable)]

    def _through(self, node, tensor, path):
        """The tensor before an op that keeps the shape, and the path from there; None for other ops."""
        if node.type in ("Identity", "IdentityN"):
            return node.inputs[node.index], path
        if node.type == "Cast" and tensor.dtype.is_floating and node.inputs[0].dtype.is_floating:
            return node.inputs[0], path.below(Step("cast", dtype=tensor.dtype))
        if node.type in ("Mul", "RealDiv"):
            left, right = node.inputs
            if right.shape.rank == 0:
                kind = "multiply" if node.type == "Mul" else "divide"
                return left, path.below(Step(kind, scalar=right))
            if left.shape.rank == 0 and node.type == "Mul":
                return right, path.below(Step("multiply", scalar=left))
        return None

    def _of(self, tensor, shape, path):
        """The terms of a tensor that is the gradient but for what `path` does to it. A term nobody recognises
        stays together: one rest, as high up as possible."""
        node = self._nodes.of(tensor)
        if node is None:
            return [_Rest(tensor, path, "made by an op that was not recorded")]
        terms = None
        below = self._through(node, tensor, path)
        if below is not None:
            terms = self._of(below[0], shape, below[1])
        elif node.type == "Reshape" or node.type in ("ExpandDims", "Squeeze"):
            terms = self._of(node.inputs[0], self._shape_before(node.inputs[0]), path)
        elif node.type == "Transpose":
            terms = self._of_transpose(tensor, node, shape, path)
        elif node.type == "AddN" or (node.type in ("Add", "AddV2") and self._same_shapes(node.inputs, shape)):
            terms = [term for part in node.inputs for term in self._of(part, shape, path)]
        else:
            try:
                return [self._patterns.uses(tensor, node, shape, path, self._variable)]
            except Declined as declined:
                return [self._sum(node, path) or _Rest(tensor, path, str(declined))]
        if all(isinstance(term, _Rest) for term in terms):
            return [_Rest(tensor, path, _joined(term.reason for term in terms))]
        return terms

    def _of_transpose(self, tensor, node, shape, path):
        permutation = self._nodes.constant(node.inputs[1])
        source = node.inputs[0]
        permutation = None if permutation is None else permutation.tolist()
        if permutation is not None and permutation == sorted(permutation):
            return self._of(source, shape, path)
        if permutation == [1, 0] and shape is not None:
            before = shape[::-1]
            return self._of(source, before, path.below(Step("transpose", shape=before)))
        return [_Rest(tensor, path, "a kernel that is transposed")]

    def _shape_before(self, tensor):
        """The shape of a tensor that is reshaped to the variable's size: one unknown dimension follows."""
        if tensor.shape.rank is None:
            return None
        sizes = list(tensor.shape)
        total = math.prod(self._variable.shape)
        known = math.prod(size for size in sizes if size is not None)
        if sizes.count(None) == 1 and known and total % known == 0:
            sizes[sizes.index(None)] = total // known
        return None if None in sizes else tuple(sizes)

    def _same_shapes(self, tensors, shape):
        """An addition that may broadcast is not the sum of gradients of this shape."""
        return shape is not None and all(
            tensor.shape.is_fully_defined() and tuple(tensor.shape) == shape for tensor in tensors
        )

    def _sum(self, node, path):
        if any(step.kind == "transpose" for step in path.steps):
            return None
        size = math.prod(self._variable.shape)
        source = node.inputs[0] if node.inputs else None
        if node.type == "BiasAddGrad":
            data_format = node.attr("data_format")
            if (
                data_format in (b"NHWC", "NHWC")
                and source.shape.rank is not None
                and source.shape[-1] == size
            ):
                return _Sum(source, size, path)
        if node.type == "Sum" and self._sums_leading(node, size):
            return _Sum(source, size, path)
        return None

    def _sums_leading(self, node, size):
        """Whether a sum keeps the last axes, and these have as many elements as the variable."""
        source = node.inputs[0]
        rank = source.shape.rank
        if rank is None:
            return False
        axes = self._nodes.constant(node.inputs[1])
        if axes is not None:
            leading = sorted(axis % rank for axis in axes.reshape(-1).tolist())
            kept = source.shape[len(leading) :]
            if leading != list(range(len(leading))) or not kept.is_fully_defined():
                return False
            return math.prod(kept) == size
        arguments = self._nodes.of(node.inputs[1])
        if arguments is None or arguments.type != "BroadcastGradientArgs":
            return False
        # What was added was smaller: axes are summed over that it had not, or of which it had one element.
        mine = self._nodes.constant(arguments.inputs[arguments.index])
        if mine is None or math.prod(mine.tolist()) != size or len(mine) > rank:
            return False
        kept = mine.tolist()
        return list(source.shape[rank - len(kept) :]) == kept

    def bias_keys(self):
        """The keys of which this gradient is the sum, if it consists of sums only."""
        if self.sums is None:
            return []
        return [self._nodes.key(self._nodes.base(term.source)) for term in self.sums]

    def sum_key(self):
        terms = [
            (self._nodes.key(self._nodes.base(term.source)), scales_of(self._nodes, term.path))
            for term in self.sums
        ]
        return tuple(sorted(terms, key=repr))

    def delta_key(self, found: Found):
        """The sums that a bias of this variable would have; None if it can have none."""
        if found.rest or not found.uses:
            return None
        terms = []
        for use in found.uses:
            if isinstance(use, ProductUse):
                if use.d_block != use.delta_block or not use.is_view(use.d_block):
                    return None
            elif not isinstance(use, ConvolutionUse):
                return None
            terms.append((self._nodes.key(use.delta), scales_of(self._nodes, use.path)))
        return tuple(sorted(terms, key=repr))

    def finish(self, summed) -> Found:
        is_known = self._variable.shape.is_fully_defined()
        if self._gradient is None:
            return Found(plain_layout(self._variable.shape if is_known else ()), reason="no gradient")
        if not is_known:
            return Found(plain_layout(()), rest=[self._gradient], reason="a variable of unknown shape")
        uses = [use for term in self._terms if isinstance(term, list) for use in term]
        rests = [self._as_rest(term) for term in self._terms if not isinstance(term, list)]
        for use in uses:
            if isinstance(use, ProductUse):
                use.set_delta(self._delta_block(use, summed))
        layout = self._layout(uses)
        fitting = [use for use in uses if self._fits(use, layout)]
        # Another order of the same variable cannot be had from factors: it is formed after all.
        rests += [
            _Rest(use.gradient(), None, "used in ways that need different layouts")
            for use in uses
            if use not in fitting
        ]
        found = Found(layout, fitting)
        if not fitting:
            found.rest = [self._gradient]
        else:
            found.rest = [self._formed(rest) for rest in rests]
        found.reason = _joined(rest.reason for rest in rests)
        if self._variable.shape.rank < 2 and found.reason.startswith("made by the op"):
            found.reason = "a vector, as in a norm, and no bias of a layer"
        found.sums = self._by_samples(found)
        return found

    def _by_samples(self, found: Found) -> list[Use]:
        if self.sums is not None:
            return self._sums_by_samples() if self._variable.shape.rank == 1 else []
        convolutions = [use for use in found.uses if isinstance(use, ConvolutionUse)]
        if convolutions and len(convolutions) == len(found.uses) and not found.rest:
            has_groups = any(use.convolution.groups > 1 for use in convolutions)
            return [use.by_samples(found.layout) for use in convolutions] if has_groups else []
        if len(self._terms) == 1 and isinstance(self._terms[0], _Rest):
            depthwise = self._patterns.depthwise(self._terms[0].tensor)
            if depthwise is not None:
                path, dtype = self._terms[0].path, self._variable.dtype
                return [SampleUse(self._nodes, *depthwise, found.layout, path, dtype)]
        return []

    def _sums_by_samples(self) -> list[Use]:
        """The sums, each over the positions of a sample; none if one of them has no samples."""
        if any(term.source.shape.rank is None or term.source.shape.rank < 2 for term in self.sums):
            return []
        variable = self._variable
        return [
            SumUse(self._nodes, term.source, term.size, term.path, variable.shape, variable.dtype)
            for term in self.sums
        ]

    def _as_rest(self, term):
        if isinstance(term, _Rest):
            return term
        return _Rest(None, None, "a bias on its own") if self.sums is not None else self._sum_as_rest(term)

    def _sum_as_rest(self, term):
        formed = tf.reduce_sum(tf.reshape(term.source, [-1, term.size]), 0)
        return _Rest(formed, term.path, "a sum over positions (a bias or a scale on its own)")

    def _formed(self, rest):
        if rest.path is None or isinstance(rest.tensor, tf.IndexedSlices):
            return rest.tensor
        return rest.path.apply(rest.tensor, rest.path.scalars, self._variable.shape, self._variable.dtype)

    def _delta_block(self, use: ProductUse, summed) -> int:
        """Which operand is the gradient of the layer's output. Both answers give the right product; the right
        one gives the order of torch, and biases."""
        for block in (0, 1):
            if self._nodes.key(self._nodes.base(use.inputs[block])) in summed:
                return block
        operands = use.inputs[:2]
        if is_eager(operands[0]):
            recorded = [self._nodes.of(operand) is not None for operand in operands]
            if recorded[0] != recorded[1]:
                return 0 if recorded[0] else 1
        else:
            meetings = [self._meeting(operand) for operand in operands]
            if meetings[0] != meetings[1]:
                return 1 if meetings[0] < meetings[1] else 0
        return use.variable_blocks[1]

    def _meeting(self, operand) -> float:
        """When the operand is first multiplied with the variable, as a place in the graph. The input of a
        layer is so in the forward pass; the gradient of its output, if at all, in the backward pass."""
        handle = handle_in(operand.graph, self._variable)
        if handle is None:
            return math.inf
        handle, first = self._nodes.key(handle), math.inf
        for consumer in operand.consumers():
            if consumer.type in ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"):
                others = [tensor for tensor in consumer.inputs if tensor is not operand]
                if any(self._nodes.variable_handle(tensor) == handle for tensor in others):
                    first = min(first, consumer._id)
        return first

    def _layout(self, uses) -> Layout:
        shape = tuple(self._variable.shape)
        if not uses:
            return plain_layout(shape)
        if any(isinstance(use, IndexedUse) for use in uses):
            return plain_layout(shape)
        if any(isinstance(use, ConvolutionUse) for use in uses):
            return Layout(shape, shape[-1], math.prod(shape[:-1]), CONVOLUTION)
        # Used in both ways, a weight lies like that of a layer.
        natural = [use for use in uses if isinstance(use, ProductUse)]
        natural.sort(key=lambda use: use.delta_block != use.variable_blocks[1])
        first, second = (natural[0].sizes[block] for block in natural[0].variable_blocks)
        if natural[0].delta_block == natural[0].variable_blocks[1]:
            return Layout(shape, second, first, TRANSPOSED)
        return Layout(shape, first, second, IDENTITY)

    def _fits(self, use, layout) -> bool:
        if isinstance(use, ConvolutionUse):
            return layout.order == CONVOLUTION
        if isinstance(use, IndexedUse):
            return layout.order == IDENTITY
        first, second = (use.sizes[block] for block in use.variable_blocks)
        if layout.order == TRANSPOSED and (first, second) == (layout.columns, layout.out):
            use.d_block = use.variable_blocks[1]
        elif layout.order == IDENTITY and (first, second) == (layout.out, layout.columns):
            use.d_block = use.variable_blocks[0]
        else:
            return False
        return True


def _joined(reasons) -> str:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


def _pair_biases(walks: list[_Walk], found: list[Found]) -> None:
    """Finds the biases whose gradients are the sums of the rows of D."""
    weights = collections.defaultdict(list)
    for index, (walk, one) in enumerate(zip(walks, found, strict=True)):
        key = walk.delta_key(one)
        if key is not None:
            weights[key].append(index)
    for index, walk in enumerate(walks):
        if walk.sums is None:
            continue
        for weight in weights[walk.sum_key()]:
            if found[weight].bias is None and found[weight].layout.out == walk.sums[0].size:
                found[weight].bias = index
                found[index].rides_with = weight
                found[index].rest, found[index].reason = [], ""
                for use in found[weight].uses:
                    use.has_bias = True
                break
