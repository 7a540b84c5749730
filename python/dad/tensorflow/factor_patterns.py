"""Ops whose result is a product of factors: what they read, and how factors are made of it.

A row of A and the same row of D are one position of one sample; the gradient is the sum of their outer
products. `Layout` says how a variable lies against the order that all frameworks share on the wire.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from dad.tensorflow.gradient_nodes import Node, Nodes
from dad.tensorflow.graph import plain

TRANSPOSED, IDENTITY, CONVOLUTION = "transposed", "identity", "convolution"


@dataclass(frozen=True)
class Layout:
    """A variable against its canonical matrix `out × columns`, which is torch's `weight.reshape(out, -1)`."""

    shape: tuple[int, ...]
    out: int
    columns: int
    order: str = IDENTITY

    @property
    def is_transposed(self) -> bool:
        """Whether the variable is, in memory, the matrix [columns, out]."""
        return self.order == TRANSPOSED or (self.order == CONVOLUTION and math.prod(self.shape[:-2]) == 1)

    @plain
    def to_wire(self, tensor) -> tf.Tensor:
        if self.is_transposed:
            return tf.transpose(tf.reshape(tensor, [self.columns, self.out]))
        if self.order == CONVOLUTION:
            positions = tf.reshape(tensor, [-1, self.shape[-2], self.out])
            return tf.reshape(tf.transpose(positions, [2, 1, 0]), [self.out, self.columns])
        return tf.reshape(tensor, [self.out, self.columns])

    @plain
    def from_wire(self, tensor) -> tf.Tensor:
        if self.is_transposed:
            tensor = tf.transpose(tf.reshape(tensor, [self.out, self.columns]))
        elif self.order == CONVOLUTION:
            tensor = tf.transpose(tf.reshape(tensor, [self.out, self.shape[-2], -1]), [2, 1, 0])
        return tf.reshape(tensor, self.shape)


def plain_layout(shape: Sequence[int]) -> Layout:
    shape = tuple(shape)
    out = shape[0] if shape else 1
    return Layout(shape, out, math.prod(shape[1:]))


@dataclass(frozen=True)
class Step:
    """What is done to the result of an op on its way to the variable."""

    kind: str  # "cast", "transpose", "multiply", "divide"
    dtype: tf.DType | None = None
    shape: tuple[int, int] | None = None  # of the matrix before it is transposed
    scalar: tf.Tensor | None = None


@dataclass(frozen=True)
class Path:
    """The steps from a tensor to the variable's gradient, the first one first. Reshapes need none."""

    steps: tuple[Step, ...] = ()

    def below(self, step: Step) -> Path:
        return Path((step, *self.steps))

    @property
    def scalars(self) -> tuple[tf.Tensor, ...]:
        return tuple(step.scalar for step in self.steps if step.scalar is not None)

    @property
    def is_flipped(self) -> bool:
        return sum(step.kind == "transpose" for step in self.steps) % 2 == 1

    def apply(self, tensor, scalars, shape, dtype) -> tf.Tensor:
        left = list(scalars)
        for step in self.steps:
            if step.kind == "cast":
                tensor = tf.cast(tensor, step.dtype)
            elif step.kind == "transpose":
                tensor = tf.transpose(tf.reshape(tensor, step.shape))
            else:
                tensor = _scaled(tensor, step.kind, left.pop(0))
        return tf.cast(tf.reshape(tensor, shape), dtype)

    def scale(self, other, scaled, scalars):
        """The factors with the scalars in `scaled`. A scalar counts in the precision in which it was used:
        in that of the op a loss scale might take D below the smallest number."""
        left = list(scalars)
        for step in self.steps:
            if step.kind == "cast":
                if left and step.dtype.size > scaled.dtype.size:
                    scaled, other = tf.cast(scaled, step.dtype), _widened(other, step.dtype)
            elif step.kind in ("multiply", "divide"):
                scaled = _scaled(scaled, step.kind, tf.cast(left.pop(0), scaled.dtype))
        return other, scaled


def _widened(tensor, dtype):
    return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor


def _scaled(tensor, kind, scalar):
    return tensor * scalar if kind == "multiply" else tensor / scalar


def _size(tensor, axes) -> int | tf.Tensor:
    """The product of dimensions: a number if they are known, else a tensor that depends on the shape only."""
    known = [tensor.shape[axis] for axis in axes]
    if all(size is not None for size in known):
        return math.prod(known)
    shape = tf.shape(tensor, out_type=tf.int64)
    return tf.reduce_prod(tf.gather(shape, [axis % tensor.shape.rank for axis in axes]))


class Use:
    """One op's part of the gradient of a variable.

    `inputs` are tensors of the graph; `factors` and `gradient` take tensors in their place, so that they can
    also be called where only values are at hand. Without arguments they take `inputs` themselves.
    """

    kind = "rows"

    def __init__(self, nodes: Nodes, tensors, path: Path, shape, dtype):
        self.inputs: tuple[tf.Tensor, ...] = (*tensors, *path.scalars)
        self.out_begin = 0
        self.delta: tf.Tensor | None = None
        self.has_bias = False
        self.link = None
        self.nodes = nodes
        self.path = path
        self.shape = tuple(shape)
        self.dtype = dtype
        self._num_tensors = len(tensors)

    def _split(self, inputs):
        inputs = inputs or self.inputs
        return inputs[: self._num_tensors], inputs[self._num_tensors :]

    @plain
    def factors(self, *inputs):
        """rows: A (N × columns) and D (N × outputs); indexed: indices (N) and rows (N × columns)."""
        tensors, scalars = self._split(inputs)
        return self.path.scale(*self._factors(*tensors), scalars)

    @plain
    def gradient(self, *inputs) -> tf.Tensor:
        """This part of the gradient, made by the op that the framework had for it."""
        tensors, scalars = self._split(inputs)
        return self.path.apply(self._form(*tensors), scalars, self.shape, self.dtype)

    def num_rows(self) -> int | tf.Tensor:
        raise NotImplementedError

    def num_samples(self) -> int | tf.Tensor:
        raise NotImplementedError

    def _factors(self, *tensors):
        raise NotImplementedError

    def _form(self, *tensors):
        raise NotImplementedError


class ProductUse(Use):
    """A product of two matrices, summed over their rows: `blocks` are the matrices N × m and N × k."""

    sizes: tuple[int, int]  # m and k
    # Which block is D. The other way round the product is the same, only transposed.
    d_block = 1
    delta_block = 1
    # Whether the op's result is second × first.
    is_reversed = False

    def set_delta(self, block: int) -> None:
        """Says which operand is the gradient of the layer's output; the other is the layer's input."""
        self.delta_block = block
        self.delta = self.nodes.base(self.inputs[block])

    def is_view(self, block: int) -> bool:
        """Whether a block is its operand reshaped: then sums over its rows are sums over the operand."""
        raise NotImplementedError

    @property
    def variable_blocks(self) -> tuple[int, int]:
        """The blocks in the order in which the variable has them: it is, in memory, first × second."""
        return (1, 0) if self.path.is_flipped != self.is_reversed else (0, 1)

    def _factors(self, *tensors):
        blocks = self._blocks(*tensors)
        return blocks[1 - self.d_block], blocks[self.d_block]

    def _blocks(self, *tensors):
        raise NotImplementedError


class MatrixUse(ProductUse):
    """MatMul, or BatchMatMul summed over the batch."""

    def __init__(self, nodes, operands, rows_first, sizes, path, shape, dtype):
        super().__init__(nodes, operands, path, shape, dtype)
        # Per operand: whether it is [..., N, size]; else [..., size, N].
        self._rows_first = rows_first
        self.sizes = sizes

    def is_view(self, block):
        return self._rows_first[block]

    def _blocks(self, *operands):
        return tuple(
            tf.reshape(operand if rows_first else tf.linalg.matrix_transpose(operand), [-1, size])
            for operand, rows_first, size in zip(operands, self._rows_first, self.sizes, strict=True)
        )

    def _form(self, a, b):
        product = tf.linalg.matmul(a, b, transpose_a=self._rows_first[0], transpose_b=not self._rows_first[1])
        rank = product.shape.rank
        return product if rank == 2 else tf.reduce_sum(product, list(range(rank - 2)))

    @plain
    def num_rows(self):
        sizes = [
            _size(operand, (*range(operand.shape.rank - 2), -2 if rows_first else -1))
            for operand, rows_first in zip(self.inputs, self._rows_first, strict=False)
        ]
        return next((size for size in sizes if isinstance(size, int)), sizes[0])

    @plain
    def num_samples(self):
        x = self.inputs[1 - self.delta_block]
        if x.shape.rank > 2:
            return _size(x, (0,))
        # The input of a layer is often reshaped to rows, or else, where that cannot be seen, its gradient.
        for block in (1 - self.delta_block, self.delta_block):
            source = self.nodes.unreshaped(self.inputs[block])
            if self._rows_first[block] and source is not self.inputs[block] and (source.shape.rank or 0) > 1:
                # The rows of a sample must be whole rows.
                width = math.prod(size for size in source.shape[1:] if size is not None)
                if width and width % self.sizes[block] == 0:
                    return _size(source, (0,))
        return self.num_rows()


class EinsumUse(ProductUse):
    def __init__(self, nodes, operands, equation, path, shape, dtype):
        super().__init__(nodes, operands, path, shape, dtype)
        self._equation = equation
        self.sizes = equation.sizes
        self.is_reversed = equation.is_reversed

    def set_delta(self, block):
        super().set_delta(block)
        # Rows in the order of the layer's input keep those of a sample together.
        self._rows = self._equation.rows(1 - block)

    def is_view(self, block):
        return self._rows + self._equation.columns[block] == self._equation.operands[block]

    def _blocks(self, *operands):
        blocks = []
        for operand, labels, columns, size in zip(
            operands, self._equation.operands, self._equation.columns, self.sizes, strict=True
        ):
            wanted = self._rows + columns
            if wanted != labels:
                operand = tf.transpose(operand, [labels.index(label) for label in wanted])
            blocks.append(tf.reshape(operand, [-1, size]))
        return tuple(blocks)

    def _form(self, *operands):
        return tf.einsum(self._equation.text, *operands)

    @plain
    def num_rows(self):
        sizes = [
            _size(operand, [labels.index(label) for label in self._rows])
            for operand, labels in zip(self.inputs, self._equation.operands, strict=False)
        ]
        return next((size for size in sizes if isinstance(size, int)), sizes[0])

    @plain
    def num_samples(self):
        x = self.inputs[1 - self.delta_block]
        first = self._equation.operands[1 - self.delta_block][0]
        return _size(x, (0,)) if first in self._rows else self.num_rows()


@dataclass(frozen=True)
class Equation:
    """An einsum that is a product of two matrices; axes have one letter each."""

    text: str
    operands: tuple[str, str]
    columns: tuple[str, str]  # the axes of the result that come from each operand
    sizes: tuple[int, int]
    is_reversed: bool  # whether the result has the axes of the second operand first

    def rows(self, operand: int) -> str:
        """The axes that are summed over, in the order of an operand."""
        return "".join(label for label in self.operands[operand] if label not in self.columns[operand])


@dataclass(frozen=True)
class Convolution:
    """The numbers of a convolution with channels last. `op` forms the gradient of its kernel."""

    kernel: tuple[int, ...]
    inputs: int  # channels per group
    outputs: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...] | None  # padding; None: SAME
    groups: int

    def patches(self, x, dy) -> tf.Tensor:
        """N × (channels · kernel): for every position of `dy` what the kernel saw there, in torch's order."""
        spatial = range(1, 1 + len(self.kernel))
        sizes = [_dimension(x, axis) for axis in spatial]
        outs = [_dimension(dy, axis) for axis in spatial]
        channels = x.shape[-1]
        reaches = [
            (out - 1) * stride + (kernel - 1) * dilation + 1
            for out, stride, kernel, dilation in zip(
                outs, self.strides, self.kernel, self.dilations, strict=True
            )
        ]
        if self.before is not None:
            before = self.before
        else:
            before = [_at_least_zero(reach - size) // 2 for reach, size in zip(reaches, sizes, strict=True)]
        after = [
            _at_least_zero(reach - size - pad)
            for reach, size, pad in zip(reaches, sizes, before, strict=True)
        ]
        if not all(isinstance(pad, int) and pad == 0 for pad in (*before, *after)):
            x = tf.pad(x, [(0, 0), *zip(before, after, strict=True), (0, 0)])
        views = []
        for offsets in itertools.product(*(range(size) for size in self.kernel)):
            begins = [offset * dilation for offset, dilation in zip(offsets, self.dilations, strict=True)]
            slices = [
                slice(begin, begin + (out - 1) * stride + 1, stride)
                for begin, out, stride in zip(begins, outs, self.strides, strict=True)
            ]
            views.append(x[(slice(None), *slices)])
        if len(views) == 1:
            return tf.reshape(views[0], [-1, channels])
        positions = tf.reshape(tf.concat(views, -1), [-1, len(views), channels])
        return tf.reshape(tf.transpose(positions, [0, 2, 1]), [-1, channels * len(views)])


def _dimension(tensor, axis):
    size = tensor.shape[axis]
    return tf.shape(tensor)[axis] if size is None else size


def _at_least_zero(size):
    return max(size, 0) if isinstance(size, int) else tf.maximum(size, 0)


class ConvolutionUse(Use):
    """One group of a convolution. In a transposed convolution x and dy have changed places."""

    def __init__(self, nodes, x, dy, convolution, restore, form, group, path, shape, dtype):
        super().__init__(nodes, (x, dy), path, shape, dtype)
        self._convolution = convolution
        self._restore = restore  # gives x the shape that the convolution is described for
        self._form_kernel = form
        self._group = group
        self.out_begin = group * (convolution.outputs // convolution.groups)
        self.delta = nodes.base(dy)

    def _of_group(self, x, dy):
        if self._convolution.groups == 1:
            return x, dy
        return (
            tf.split(x, self._convolution.groups, -1)[self._group],
            tf.split(dy, self._convolution.groups, -1)[self._group],
        )

    def _factors(self, x, dy):
        x, dy = self._of_group(self._restore(x), dy)
        return self._convolution.patches(x, dy), tf.reshape(dy, [-1, dy.shape[-1]])

    def _form(self, x, dy):
        if self._convolution.groups == 1:
            return self._form_kernel(x, dy)
        x, dy = self._of_group(x, dy)
        kernel = self._form_kernel(x, dy)
        after = self._convolution.outputs - self.out_begin - dy.shape[-1]
        return tf.pad(kernel, [(0, 0)] * (kernel.shape.rank - 1) + [(self.out_begin, after)])

    @plain
    def num_rows(self):
        return _size(self.inputs[1], range(self.inputs[1].shape.rank - 1))

    @plain
    def num_samples(self):
        return _size(self.inputs[1], (0,))


class IndexedUse(Use):
    """Rows of an embedding: row n of the values belongs to row indices[n] of the variable."""

    kind = "indexed"

    def __init__(self, nodes, indices, values, path, shape, dtype):
        super().__init__(nodes, (indices, values), path, shape, dtype)
        self.delta = nodes.base(values)

    def _factors(self, indices, values):
        rows = tf.reshape(values, [-1, math.prod(self.shape[1:])])
        return tf.cast(tf.reshape(indices, [-1]), tf.int64), rows

    def _form(self, indices, values):
        flat = tf.reshape(indices, [-1])
        rows = tf.reshape(values, [-1, *self.shape[1:]])
        return tf.math.unsorted_segment_sum(rows, flat, self.shape[0])

    @plain
    def num_rows(self):
        indices = self.inputs[0]
        if indices.shape.rank is None:
            return tf.size(indices, out_type=tf.int64)
        return _size(indices, range(indices.shape.rank))

    @plain
    def num_samples(self):
        source = self.nodes.unreshaped(self.inputs[0])
        return _size(source, (0,)) if source.shape.rank else self.num_rows()


class SumUse(Use):
    """A vector whose gradient is a sum over samples and positions: of a norm, or a bias on its own. Its rows
    are the sums of single samples, A is ones: more than the gradient, for methods that look at samples."""

    def __init__(self, nodes, source, size, path, shape, dtype):
        super().__init__(nodes, (source,), path, shape, dtype)
        self.size = size

    def _factors(self, source):
        samples = tf.shape(source)[0]
        rows = tf.reduce_sum(tf.reshape(source, [samples, -1, self.size]), 1)
        return tf.ones([samples, 1], source.dtype), rows

    def _form(self, source):
        return tf.reduce_sum(tf.reshape(source, [-1, self.size]), 0)

    @plain
    def num_rows(self):
        return _size(self.inputs[0], (0,))

    @plain
    def num_samples(self):
        return self.num_rows()


class Declined(Exception):
    """An op that is not taken apart, and why, in words for users."""


class Patterns:
    """Turns the op of a tensor into uses. `shape` is the tensor's, as far as it is known."""

    def __init__(self, nodes: Nodes):
        self.nodes = nodes

    def uses(self, tensor, node: Node, shape, path: Path, variable) -> list[Use]:
        """Raises Declined with a reason if there are no factors."""
        makers = {
            "MatMul": self._matmul,
            "BatchMatMulV2": self._batch_matmul,
            "BatchMatMulV3": self._batch_matmul,
            "Sum": self._summed,
            "Einsum": self._einsum,
            "Conv2DBackpropFilter": self._convolution,
            "Conv3DBackpropFilterV2": self._convolution,
            "UnsortedSegmentSum": self._segment_sum,
            "PartitionedCall": self._called_convolution,
            "StatefulPartitionedCall": self._called_convolution,
        }
        maker = makers.get(node.type)
        if maker is None:
            raise Declined(reason_of(node.type))
        if not tensor.dtype.is_floating:
            raise Declined(f"of type {tensor.dtype.name}")
        return maker(tensor, node, shape, path, variable)

    def _matmul(self, tensor, node, shape, path, variable):
        rows_first = (bool(node.attr("transpose_a")), not node.attr("transpose_b"))
        return self._matrices(node.inputs, rows_first, shape, path, variable)

    def _batch_matmul(self, tensor, node, shape, path, variable):
        # A batch that is not summed over is a product for every matrix of a variable of rank 3 or more.
        if tensor.shape.rank != 2:
            raise Declined("a product for each matrix of a batch (BatchMatMul)")
        a, b = node.inputs
        return self._matrices(
            (a, b), (bool(node.attr("adj_x")), not node.attr("adj_y")), shape, path, variable
        )

    def _summed(self, tensor, node, shape, path, variable):
        product = self.nodes.of(node.inputs[0])
        if product is not None and product.type in ("BatchMatMulV2", "BatchMatMulV3"):
            return self._summed_batch_matmul(node, product, path, variable)
        if product is not None and product.type == "Einsum":
            return self._summed_einsum(node, product, shape, path, variable)
        raise Declined("a sum over positions (a bias or a scale on its own)")

    def _summed_batch_matmul(self, node, product, path, variable):
        a, b = product.inputs
        rank = node.inputs[0].shape.rank
        if rank is None or a.shape.rank != rank or b.shape.rank != rank:
            raise Declined("a product of a batch of matrices of unknown or different rank")
        if not self._sums(node.inputs[1], rank, 0, rank - 2):
            raise Declined("a product of a batch of matrices that is summed over other axes")
        rows_first = (bool(product.attr("adj_x")), not product.attr("adj_y"))
        for mine, other in zip(a.shape[: rank - 2], b.shape[: rank - 2], strict=True):
            if mine is not None and other is not None and mine != other:
                raise Declined("a product of batches of different size")
        return self._matrices((a, b), rows_first, None, path, variable)

    def _sums(self, axes, rank, begin, count) -> bool:
        """Whether `axes` are the `count` ones from `begin` on."""
        known = self.nodes.constant(axes)
        if known is not None:
            wanted = list(range(begin, begin + count))
            return sorted(axis % rank for axis in known.reshape(-1).tolist()) == wanted
        source = self.nodes.of(axes)
        if begin > 0 and source is not None and source.type in ("Add", "AddV2"):
            offset = self.nodes.constant(source.inputs[0])
            source = self.nodes.of(source.inputs[1])
            if offset is None or offset.size != 1 or int(offset) != begin:
                return False
        elif begin > 0:
            return False
        if source is None or source.type != "BroadcastGradientArgs":
            return False
        # The axes that one operand had and the other, the variable, had not: all of them.
        lengths = [shape.shape[0] if shape.shape.rank == 1 else None for shape in source.inputs]
        return lengths[source.index] == 0 and lengths[1 - source.index] == count

    def _matrices(self, operands, rows_first, shape, path, variable):
        sizes = [
            operand.shape[-1 if first else -2] if operand.shape.rank is not None else None
            for operand, first in zip(operands, rows_first, strict=True)
        ]
        if shape is not None and len(shape) == 2:
            sizes = [mine if mine is not None else known for mine, known in zip(sizes, shape, strict=True)]
        total = variable.shape.num_elements()
        for block in (0, 1):
            other = sizes[1 - block]
            if sizes[block] is None and other:
                sizes[block] = total // other
        if None in sizes or sizes[0] * sizes[1] != total:
            raise Declined("a product of matrices of unknown shape")
        if any(operand.shape.rank is None for operand in operands):
            raise Declined("a product of matrices of unknown shape")
        self._check_operands(operands)
        self._check_path(path, tuple(sizes))
        use = MatrixUse(self.nodes, operands, rows_first, tuple(sizes), path, variable.shape, variable.dtype)
        return [use]

    def _check_operands(self, operands):
        """A product of weights has no rows that belong to samples."""
        if any(self.nodes.variable_handle(operand) is not None for operand in operands):
            raise Declined("a product with a variable, and not with the input of a layer")

    def _check_path(self, path, sizes):
        """A transpose of anything but the matrix itself would mix rows and columns."""
        for step in path.steps:
            if step.kind == "transpose":
                if step.shape != sizes:
                    raise Declined("a kernel that is transposed after a reshape")
                sizes = sizes[::-1]

    def _einsum(self, tensor, node, shape, path, variable):
        return self._einsum_uses(node, *self._labels(node), shape, path, variable)

    def _summed_einsum(self, node, product, shape, path, variable):
        """Axes of an ellipsis that the variable has not: the gradient has them at first."""
        (first, second), result, hidden = self._labels(product)
        begin = result.find(hidden)
        if not hidden or not self._sums(node.inputs[1], len(result), begin, len(hidden)):
            raise Declined("an einsum that is summed over other axes")
        return self._einsum_uses(
            product, (first, second), result.replace(hidden, ""), "", shape, path, variable
        )

    def _einsum_uses(self, node, operands, result, hidden, shape, path, variable):
        equation = self._equation(operands, result, self._label_sizes(node.inputs, operands, result, shape))
        self._check_operands(node.inputs)
        self._check_path(path, equation.sizes[::-1] if equation.is_reversed else equation.sizes)
        return [EinsumUse(self.nodes, node.inputs, equation, path, variable.shape, variable.dtype)]

    def _labels(self, node):
        """The letters of both operands and of the result, and those that stand for an ellipsis."""
        text = _text(node.attr("equation")).replace(" ", "")
        left, _, result = text.partition("->")
        operands = left.split(",")
        ranks = [tensor.shape.rank for tensor in node.inputs]
        if len(operands) != 2 or None in ranks:
            raise Declined(f"an einsum of another form ({text})")
        missing = {
            rank - len(labels.replace("...", ""))
            for rank, labels in zip(ranks, operands, strict=True)
            if "..." in labels
        }
        if len(missing) > 1:
            raise Declined(f"an einsum that broadcasts ({text})")
        unused = [label for label in string.ascii_letters if label not in text]
        hidden = "".join(unused[: max(missing, default=0)])
        expanded = [labels.replace("...", hidden) for labels in operands]
        return expanded, result.replace("...", hidden), hidden

    def _label_sizes(self, tensors, operands, result, shape):
        sizes = dict(zip(result, shape, strict=True)) if shape and len(shape) == len(result) else {}
        for tensor, labels in zip(tensors, operands, strict=True):
            pairs = zip(labels, tensor.shape, strict=True)
            sizes.update({label: size for label, size in pairs if size is not None})
        return sizes

    def _equation(self, operands, result, sizes) -> Equation:
        first, second = operands
        text = f"{first},{second}->{result}"
        if any(label not in sizes for label in result):
            raise Declined(f"an einsum of unknown shape ({text})")
        for labels in (first, second, result):
            if len(set(labels)) != len(labels):
                raise Declined(f"an einsum with an axis that comes twice ({text})")
        rows = set(first) & set(second) - set(result)
        shared = set(first) & set(second) & set(result)
        if shared:
            raise Declined(f"an einsum with an axis of the kernel that is not summed over ({text})")
        of_first = "".join(label for label in result if label in first)
        of_second = "".join(label for label in result if label in second)
        if set(first) != rows | set(of_first) or set(second) != rows | set(of_second):
            raise Declined(f"an einsum that sums over an axis of one factor ({text})")
        count = tuple(math.prod(sizes[label] for label in labels) for labels in (of_first, of_second))
        if result not in (of_first + of_second, of_second + of_first):
            raise Declined(f"an einsum whose kernel has input and output axes mixed ({text})")
        return Equation(text, (first, second), (of_first, of_second), count, result != of_first + of_second)

    def _convolution(self, tensor, node, shape, path, variable):
        x, _, dy = node.inputs
        kernel = _known(tensor, shape)
        attributes = _convolution_attributes(node)
        return self._convolution_uses(node.type, x, dy, kernel, attributes, path, variable)

    def _convolution_uses(self, op_type, x, dy, kernel, attributes, path, variable):
        if attributes["data_format"] not in ("NHWC", "NDHWC"):
            raise Declined("a convolution with channels first")
        if kernel is None or any(step.kind == "transpose" for step in path.steps):
            raise Declined("a convolution with a kernel of unknown shape or a transposed one")
        shape = tuple(variable.shape)
        if len(shape) < 2 or shape[-2:] != kernel[-2:] or math.prod(shape) != math.prod(kernel):
            raise Declined("a convolution whose kernel is a part of a variable, or reshaped")
        rank = len(kernel)
        if x.shape.rank != rank or dy.shape.rank != rank or x.shape[-1] is None or dy.shape[-1] is None:
            raise Declined("a convolution of a tensor of unknown shape")
        inputs, outputs = kernel[-2:]
        groups = x.shape[-1] // inputs
        if x.shape[-1] % inputs or outputs % groups or dy.shape[-1] != outputs:
            raise Declined("a convolution of a tensor of another shape than the kernel's")
        before = {
            "VALID": (0,) * (rank - 2),
            "SAME": None,
            "EXPLICIT": tuple(attributes.get("explicit_paddings", [])[2:-2:2]),
        }[attributes["padding"]]
        convolution = Convolution(
            kernel[:-2],
            inputs,
            outputs,
            tuple(attributes["strides"][1:-1]),
            tuple(attributes["dilations"][1:-1]),
            before,
            groups,
        )
        per_group = [*kernel[:-1], outputs // groups]

        def form(x, dy):
            op = getattr(tf.raw_ops, op_type)
            return op(input=x, filter_sizes=per_group, out_backprop=dy, **attributes)

        restore = _unchanged
        dilated = self._dilated(x, dy, convolution, form)
        if dilated is not None:
            x, dy, convolution, restore, form = dilated
        return [
            ConvolutionUse(
                self.nodes, x, dy, convolution, restore, form, group, path, variable.shape, variable.dtype
            )
            for group in range(groups)
        ]

    def _dilated(self, x, dy, convolution, form):
        """A dilated convolution comes as a plain one of every n-th pixel, with the others in the batch. It is
        taken for what it was: rows of a sample lie together then, and a bias sums over the dy before."""
        dy_blocks = self._space_to_batch(dy)
        if dy_blocks is None:
            return None
        unclear = Declined("a dilated convolution of a form or size that is not known beforehand")
        if convolution.before is None or any(convolution.before) or convolution.groups != 1:
            raise unclear
        if {*convolution.strides, *convolution.dilations} != {1}:
            raise unclear
        dy, block, crops = dy_blocks
        added = len(convolution.kernel) - len(block)  # in one dimension an axis is put in between
        kernel, one = convolution.kernel[added:], convolution.kernel[:added]
        if added < 0 or math.prod(one) != 1 or any(begin for begin, _ in crops):
            raise unclear
        x_blocks = self._space_to_batch(x)
        if x_blocks is not None and x_blocks[1] != block:
            raise unclear
        ones = (1,) * len(block)
        if x_blocks is not None:
            x, _, pads = x_blocks
            before, restore = tuple(begin for begin, _ in pads), _unchanged
        elif self.nodes.of(x) is None:  # before the recorder listened
            pads, before = None, (0,) * len(block)

            def restore(x):
                x = tf.squeeze(x, list(range(1, 1 + added))) if added else x
                return tf.batch_to_space(x, block, [(0, 0)] * len(block))
        else:
            raise unclear

        def form_dilated(x, dy):
            dy = _with_axes(tf.space_to_batch(dy, block, crops), added)
            return form(x if pads is None else _with_axes(tf.space_to_batch(x, block, pads), added), dy)

        dilated = Convolution(kernel, convolution.inputs, convolution.outputs, ones, block, before, 1)
        return x, dy, dilated, restore, form_dilated

    def _space_to_batch(self, tensor):
        """The tensor before SpaceToBatchND, the blocks and the padding; None if it is none."""
        blocks, node = tensor, self.nodes.of(tensor)
        while node is not None and node.type in ("ExpandDims", "Reshape"):
            blocks = node.inputs[0]
            node = self.nodes.of(blocks)
        if node is None or node.type != "SpaceToBatchND":
            return None
        block, pads = (self.nodes.constant(constant) for constant in node.inputs[1:])
        spatial = blocks.shape[1:]
        # Nothing but axes of one element may have been put in.
        is_same = spatial.is_fully_defined() and list(tensor.shape)[-len(spatial) :] == list(spatial)
        if block is None or pads is None or not is_same or len(spatial) != len(block) + 1:
            raise Declined("a dilated convolution of a form or size that is not known beforehand")
        return node.inputs[0], tuple(block.tolist()), tuple(map(tuple, pads.tolist()))

    def _segment_sum(self, tensor, node, shape, path, variable):
        values, indices, _ = node.inputs
        if shape is None or tuple(shape) != tuple(variable.shape) or path.is_flipped:
            raise Declined("rows of an embedding that are reshaped or transposed")
        if indices.shape.rank is None:
            raise Declined("an embedding with indices of unknown rank")
        return [IndexedUse(self.nodes, indices, values, path, variable.shape, variable.dtype)]

    def indexed(self, slices, path, variable) -> list[Use]:
        """The uses of tf.IndexedSlices, one for each lookup if they are visibly put together of several."""
        pairs = self._lookups(slices.indices, slices.values)
        return [
            IndexedUse(self.nodes, indices, values, path, variable.shape, variable.dtype)
            for indices, values in pairs
        ]

    def _lookups(self, indices, values):
        whole = [(indices, values)]
        nodes = [self.nodes.of(tensor) for tensor in (indices, values)]
        if any(node is None or node.type != "ConcatV2" for node in nodes):
            return whole
        parts = [node.inputs[:-1] for node in nodes]
        axes = [self.nodes.constant(node.inputs[-1]) for node in nodes]
        if any(axis is None or int(axis) != 0 for axis in axes) or len(parts[0]) != len(parts[1]):
            return whole
        if not all(self._same_length(*part) for part in zip(*parts, strict=True)):
            return whole
        pairs = [self._lookups(*part) for part in zip(*parts, strict=True)]
        return [pair for part in pairs for pair in part]

    def _same_length(self, indices, values) -> bool:
        if indices.shape.rank != 1 or values.shape.rank is None:
            return False
        if indices.shape[0] is not None and indices.shape[0] == values.shape[0]:
            return True
        # The gradient of a lookup reshapes both by the size of its indices.
        nodes = [self.nodes.of(tensor) for tensor in (indices, values)]
        if any(node is None or node.type != "Reshape" for node in nodes):
            return all(node is not None and node.type == "ConcatV2" for node in nodes)
        shape = self.nodes.of(nodes[1].inputs[1])
        if shape is None or shape.type != "ConcatV2":
            return False
        return self.nodes.key(shape.inputs[0]) == self.nodes.key(nodes[0].inputs[1])

    def _called_convolution(self, tensor, node, shape, path, variable):
        """Keras compiles convolutions with groups by themselves, in a function of their own."""
        body = node.body()
        if body is None:
            raise Declined(reason_of(node.type))
        result, arguments = body
        inner = self.nodes.of(result)
        while inner.type in ("Identity", "Reshape"):
            result = inner.inputs[0]
            inner = self.nodes.of(result)
        if inner.type not in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"):
            raise Declined(reason_of(node.type))
        x, dy = (self._argument(inner.inputs[place], arguments) for place in (0, 2))
        if x is None or dy is None:
            raise Declined(reason_of(node.type))
        attributes = _convolution_attributes(inner)
        return self._convolution_uses(inner.type, x, dy, _known(result, None), attributes, path, variable)

    def _argument(self, tensor, arguments):
        """A tensor of a function as its caller has it, if it is an argument; else None."""
        sizes = list(tensor.shape) if tensor.shape.rank is not None else [None, None]
        if sizes.count(None) > 1:
            return None
        inner = self.nodes.of(tensor)
        while inner.type in ("Identity", "Reshape", "ExpandDims"):
            tensor = inner.inputs[0]
            inner = self.nodes.of(tensor)
        passed = arguments.get(tensor.name)
        return (
            None if passed is None else tf.reshape(passed, [-1 if size is None else size for size in sizes])
        )


_REASONS = {
    "a tf.while_loop (a recurrent layer)": ("While", "StatelessWhile", "Exit", "NextIteration", "Scan"),
    "a tf.cond": ("If", "StatelessIf", "Case", "StatelessCase", "Merge", "Switch"),
    "a tf.function that was called inside of the tape": (
        "PartitionedCall",
        "StatefulPartitionedCall",
        "SymbolicGradient",
    ),
    "a recurrent layer of cuDNN": ("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"),
    "a Python function": ("PyFunc", "EagerPyFunc", "PyFuncStateless"),
}


def reason_of(op_type: str) -> str:
    """Why a gradient that this op has made has no factors."""
    for source, types in _REASONS.items():
        if op_type in types:
            return f"comes out of {source}"
    if op_type.startswith("DepthwiseConv"):
        return "a depthwise convolution"
    if op_type.startswith("FusedBatchNormGrad"):
        return "a batch normalization"
    if op_type == "BiasAddGrad":
        return "a bias on its own"
    if op_type == "ReadVariableOp":
        return "the variable itself (a regularizer)"
    if op_type in ("Placeholder", "PlaceholderWithDefault"):
        return "comes from outside of this graph"
    return f"made by the op {op_type}, which has no factors"


def _convolution_attributes(node) -> dict:
    names = ["strides", "padding", "dilations", "data_format"]
    if node.type == "Conv2DBackpropFilter":
        names.append("explicit_paddings")
    values = [node.attr(name) for name in names]
    return {
        name: _text(value) if isinstance(value, bytes | str) else [int(number) for number in value]
        for name, value in zip(names, values, strict=True)
    }


def _unchanged(tensor):
    return tensor


def _with_axes(tensor, count):
    for _ in range(count):
        tensor = tf.expand_dims(tensor, 1)
    return tensor


def _known(tensor, shape):
    if tensor.shape.is_fully_defined():
        return tuple(tensor.shape)
    return tuple(shape) if shape is not None and None not in shape else None


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else value
