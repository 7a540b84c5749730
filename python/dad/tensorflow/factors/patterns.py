"""Ops whose result is a product of factors: known by their type, attributes and operands."""

from __future__ import annotations

import math
import string

import tensorflow as tf

from dad.tensorflow.factors.convolutions import Convolution
from dad.tensorflow.factors.nodes import Node, Nodes
from dad.tensorflow.factors.uses import (
    ConvolutionUse,
    EinsumUse,
    Equation,
    IndexedUse,
    MatrixUse,
    Path,
    Use,
)


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

        def form(x, dy):
            op = getattr(tf.raw_ops, op_type)
            return op(input=x, filter_sizes=kernel, out_backprop=dy, **attributes)

        restore = _unchanged
        dilated = self._dilated(x, dy, convolution, form)
        if dilated is not None:
            x, dy, convolution, restore, form = dilated
        return [
            ConvolutionUse(
                self.nodes, x, dy, convolution, restore, form, path, variable.shape, variable.dtype
            )
        ]

    def depthwise(self, tensor) -> tuple | None:
        """x, dy and the convolution behind the gradient of a depthwise kernel; None for other tensors."""
        node = self.nodes.of(tensor)
        while node is not None and node.type in ("Identity", "Reshape", "Squeeze", "ExpandDims"):
            tensor = node.inputs[0]
            node = self.nodes.of(tensor)
        if node is None or node.type != "DepthwiseConv2dNativeBackpropFilter":
            return None
        x, _, dy = node.inputs
        try:
            is_dilated = self._space_to_batch(dy) is not None
        except Declined:
            is_dilated = True
        if is_dilated:  # a sample is spread over several images
            return None
        kernel, attributes = _known(tensor, None), _convolution_attributes(node)
        known = kernel is not None and x.shape.rank == dy.shape.rank == 4
        if not known or attributes["data_format"] != "NHWC" or attributes["padding"] == "EXPLICIT":
            return None
        outputs = kernel[2] * kernel[3]
        if x.shape[-1] != kernel[2] or dy.shape[-1] != outputs:
            return None
        before = None if attributes["padding"] == "SAME" else (0, 0)
        steps = (tuple(attributes[name][1:-1]) for name in ("strides", "dilations"))
        return x, dy, Convolution(kernel[:2], 1, outputs, *steps, before, groups=kernel[2])

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
    if node.type != "Conv3DBackpropFilterV2":
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
