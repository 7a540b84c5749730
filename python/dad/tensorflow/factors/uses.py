"""How factors are made of what an op reads, and the gradient that it would form.

A row of A and the same row of D are one position of one sample; the gradient is the sum of their outer
products. `Layout` says how a variable lies against the order that all frameworks share on the wire.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from dad.tensorflow.factors.convolutions import dimension
from dad.tensorflow.factors.nodes import Nodes
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
    def samples_to_wire(self, tensor) -> tf.Tensor:
        """samples × shape becomes (samples · out) × columns, the matrix of one sample after another."""
        if self.order == CONVOLUTION:
            positions = tf.reshape(tensor, [-1, math.prod(self.shape[:-2]), self.shape[-2], self.out])
            tensor = tf.transpose(positions, [0, 3, 2, 1])
        return tf.reshape(tensor, [-1, self.columns])

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


def _matrix(tensor, columns) -> tf.Tensor:
    return tensor if tensor.shape.rank == 2 else tf.reshape(tensor, [-1, columns])


def _size(tensor, axes) -> int | tf.Tensor:
    """The product of dimensions: a number if they are known, else a tensor that depends on the shape only."""
    known = [tensor.shape[axis] for axis in axes]
    if all(size is not None for size in known):
        return math.prod(known)
    shape = tf.shape(tensor, out_type=tf.int64)
    return tf.reduce_prod(tf.gather(shape, [axis % tensor.shape.rank for axis in axes]))


class Use(ABC):
    """One op's part of the gradient of a variable.

    `inputs` are tensors of the graph; `factors` and `gradient` take tensors in their place, so that they can
    also be called where only values are at hand. Without arguments they take `inputs` themselves.
    """

    kind = "rows"
    row_outputs = 0  # values of D in a row; 0: all outputs

    def __init__(self, nodes: Nodes, tensors, path: Path, shape, dtype):
        self.inputs: tuple[tf.Tensor, ...] = (*tensors, *path.scalars)
        # The first output row of each group of a convolution; other layers have one group.
        self.begins: tuple[int, ...] = (0,)
        self.delta: tf.Tensor | None = None
        self.has_bias = False
        self.link = None
        # For a use with a link, or above one: weight and bias as the forward pass has read them.
        self.weight_read: tf.Tensor | None = None
        self.bias_read: tf.Tensor | None = None
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
        """rows: A (N × columns) and D (N × outputs); indexed: indices (N) and rows (N × columns).

        With several groups A and D have one more axis, in front: the group. `segments` takes them apart."""
        tensors, scalars = self._split(inputs)
        return self.path.scale(*self._factors(*tensors), scalars)

    @plain
    def segments(self, *inputs) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """The factors of each group, in the order of `begins`."""
        first, second = self.factors(*inputs)
        if len(self.begins) == 1:
            return [(first, second)]
        return list(zip(tf.unstack(first), tf.unstack(second), strict=True))

    @plain
    def gradient(self, *inputs) -> tf.Tensor:
        """This part of the gradient, made by the op that the framework had for it."""
        tensors, scalars = self._split(inputs)
        return self.path.apply(self._form(*tensors), scalars, self.shape, self.dtype)

    @abstractmethod
    def num_rows(self) -> int | tf.Tensor:
        """The rows of all groups: a number if shapes are known, else a tensor that depends on shapes only."""

    @abstractmethod
    def num_samples(self) -> int | tf.Tensor:
        """Likewise; the rows of a sample lie together."""

    @abstractmethod
    def _factors(self, *tensors):
        """factors(), without the scalars on the way."""

    @abstractmethod
    def _form(self, *tensors):
        """gradient(), as the op gives it."""


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

    @abstractmethod
    def is_view(self, block: int) -> bool:
        """Whether a block is its operand reshaped: then sums over its rows are sums over the operand."""

    @property
    def variable_blocks(self) -> tuple[int, int]:
        """The blocks in the order in which the variable has them: it is, in memory, first × second."""
        return (1, 0) if self.path.is_flipped != self.is_reversed else (0, 1)

    def _factors(self, *tensors):
        blocks = self._blocks(*tensors)
        return blocks[1 - self.d_block], blocks[self.d_block]

    @abstractmethod
    def _blocks(self, *tensors):
        """The two matrices, of the operands."""


def is_plain_product(use: Use) -> bool:
    """Whether the operands are the factors, in the same memory, with nothing to multiply."""
    return (
        isinstance(use, ProductUse) and not use.path.scalars and all(use.is_view(block) for block in (0, 1))
    )


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
            _matrix(operand if rows_first else tf.linalg.matrix_transpose(operand), size)
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
            blocks.append(_matrix(operand, size))
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


class ConvolutionUse(Use):
    """A convolution, with all its groups. In a transposed convolution x and dy have changed places."""

    def __init__(self, nodes, x, dy, convolution, restore, form, path, shape, dtype):
        super().__init__(nodes, (x, dy), path, shape, dtype)
        self.convolution = convolution
        self._restore = restore  # gives x the shape that the convolution is described for
        self._form_kernel = form  # of a convolution with one group
        self.row_outputs = convolution.outputs_of_group
        self.begins = tuple(range(0, convolution.outputs, self.row_outputs))
        self.delta = nodes.base(dy)

    def by_samples(self, layout: Layout) -> Use:
        """The same gradient as the sum of those of single samples."""
        return SampleUse(self.nodes, *self.inputs[:2], self.convolution, layout, self.path, self.dtype)

    def _factors(self, x, dy):
        return self.convolution.patches(self._restore(x), dy), self.convolution.deltas(dy)

    def _form(self, x, dy):
        convolution = self.convolution
        if convolution.groups == 1:
            return self._form_kernel(x, dy)
        # TensorFlow has no such op for CPUs, and Keras compiles its own. One product for all groups.
        a, d = self._factors(x, dy)
        positions = math.prod(convolution.kernel)
        product = tf.reshape(
            tf.linalg.matmul(a, d, transpose_a=True),
            [convolution.groups, convolution.inputs, positions, convolution.outputs_of_group],
        )
        kernel = tf.transpose(product, [2, 1, 0, 3])
        return tf.reshape(kernel, [*convolution.kernel, convolution.inputs, convolution.outputs])

    @plain
    def num_rows(self):
        dy = self.inputs[1]
        return self.convolution.groups * _size(dy, range(dy.shape.rank - 1))

    def least_rows(self) -> int:
        """Fewer rows than these never come: sizes that are not known yet count as one."""
        return self.convolution.groups * math.prod(size or 1 for size in self.inputs[1].shape[:-1])

    @plain
    def num_samples(self):
        return _size(self.inputs[1], (0,))


class SampleUse(Use):
    """A convolution with groups, or a depthwise one, by the gradients of single samples: more than the
    gradient, for methods that look at samples. Each has all rows of the kernel's matrix, so the rows come
    with their indices."""

    kind = "indexed"

    def __init__(self, nodes, x, dy, convolution, layout, path, dtype):
        super().__init__(nodes, (x, dy), path, layout.shape, dtype)
        self._convolution = convolution
        self._layout = layout
        self.delta = nodes.base(dy)

    def _factors(self, x, dy):
        rows = self._layout.samples_to_wire(self._convolution.sample_kernels(x, dy))
        return tf.tile(tf.range(self._layout.out, dtype=tf.int64), [dimension(dy, 0)]), rows

    def _form(self, x, dy):
        return tf.reduce_sum(self._convolution.sample_kernels(x, dy), 0)

    @plain
    def num_rows(self):
        return self._layout.out * self.num_samples()

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
