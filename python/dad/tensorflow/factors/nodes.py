"""The ops behind gradient tensors, read in the same way in graphs and in eager mode.

In a graph a tensor knows its op. In eager mode it does not, so a `Recorder` listens while a gradient is
computed and keeps what every op read and wrote.
"""

from __future__ import annotations

import abc
import contextlib
import math

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks


class Node(abc.ABC):
    """The op that made a tensor; `index` says which of its outputs the tensor is."""

    type: str
    index: int
    inputs: tuple[tf.Tensor, ...]

    @abc.abstractmethod
    def attr(self, name): ...

    def body(self) -> tuple[tf.Tensor, dict] | None:
        """If this is the call of a function: the tensor that the function returns here, in the function's own
        graph, and what was passed for each of its arguments, by name. None if that cannot be seen."""
        return None


class GraphNode(Node):
    def __init__(self, tensor):
        self._op = tensor.op
        self.type = self._op.type
        self.index = tensor.value_index
        self.inputs = tuple(self._op.inputs)

    def attr(self, name):
        return self._op.get_attr(name)

    def body(self):
        function = self._op.graph._get_function(self._op.get_attr("f").name)
        graph = getattr(function, "graph", None)
        if graph is None or len(graph.inputs) != len(self.inputs):
            return None
        names = [argument.name for argument in graph.inputs]
        return graph.outputs[self.index], dict(zip(names, self.inputs, strict=True))


class RecordedNode(Node):
    def __init__(self, op_type, inputs, attrs, index):
        op_type = op_type.decode() if isinstance(op_type, bytes) else op_type
        # Calls of functions have the function's name.
        self.type = "PartitionedCall" if op_type.startswith("__") else op_type
        self.index = index
        self.inputs = tuple(inputs)
        self._attrs = attrs

    def attr(self, name):
        return self._attrs[name]


class Recorder:
    """Records the eager ops that run inside `with`. It holds their tensors, so drop it after `find`."""

    def __init__(self):
        # A node by the id of its output. Outputs are held, too: an id says nothing once its tensor is gone.
        self._nodes: dict[int, tuple[tf.Tensor, Node]] = {}

    def __enter__(self):
        # One object for both calls: TensorFlow tells callbacks apart by identity.
        self._callback = self._record
        op_callbacks.add_op_callback(self._callback)
        return self

    def __exit__(self, *exception):
        op_callbacks.remove_op_callback(self._callback)
        # A bound method of ourselves would be a cycle: memory would wait for the garbage collector.
        del self._callback

    def _record(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is not None or not outputs:
            return
        names = [name.decode() if isinstance(name, bytes) else name for name in (attrs or ())[0::2]]
        named = dict(zip(names, (attrs or ())[1::2], strict=True))
        for index, output in enumerate(outputs):
            self._nodes[id(output)] = (output, RecordedNode(op_type, inputs, named, index))

    def node(self, tensor) -> Node | None:
        entry = self._nodes.get(id(tensor))
        return entry[1] if entry is not None and entry[0] is tensor else None


def is_eager(tensor) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


class Nodes:
    """Finds the node of a tensor, and what can be said about a tensor without running anything."""

    # Ops that change neither the values (but for rounding) nor their order in memory.
    SAME_ORDER = frozenset({"Identity", "IdentityN", "Reshape", "Cast", "ExpandDims", "Squeeze"})

    def __init__(self, recorder: Recorder | None = None):
        self._recorder = recorder

    def of(self, tensor) -> Node | None:
        if is_eager(tensor):
            return self._recorder.node(tensor) if self._recorder is not None else None
        return GraphNode(tensor)

    def key(self, tensor):
        """Equal for two Python objects if they are the same tensor."""
        if is_eager(tensor):
            return id(tensor)
        return (id(tensor.graph), tensor.name)

    def constant(self, tensor) -> np.ndarray | None:
        if is_eager(tensor):
            return tensor.numpy()
        node = self.of(tensor)
        if node.type == "InvertPermutation":
            permutation = self.constant(node.inputs[0])
            return None if permutation is None else np.argsort(permutation)
        return tf.get_static_value(tensor)

    def base(self, tensor, casts=True):
        """The tensor of which this is another view: the same numbers in the same order."""
        while True:
            node = self.of(tensor)
            if node is None or not self._keeps_order(node, tensor, casts):
                return tensor
            tensor = node.inputs[node.index if node.type == "IdentityN" else 0]

    def _keeps_order(self, node, tensor, casts=True) -> bool:
        if node.type == "Cast":
            source = node.inputs[0].dtype
            return source == tensor.dtype or (casts and source.is_floating and tensor.dtype.is_floating)
        if node.type == "Transpose":
            permutation = self.constant(node.inputs[1])
            return permutation is not None and list(permutation) == list(range(len(permutation)))
        if node.type == "Sum":  # of what might have been broadcast, and was not
            axes = self.constant(node.inputs[1])
            return axes is not None and axes.size == 0
        return node.type in self.SAME_ORDER

    def unreshaped(self, tensor):
        """Like `base`, but goes back through one reshape only: the input of a layer as the layer got it."""
        seen = False
        while True:
            node = self.of(tensor)
            if node is None or not self._keeps_order(node, tensor) or node.type == "IdentityN":
                return tensor
            if node.type not in ("Identity", "Cast", "Transpose"):
                if seen:
                    return tensor
                seen = True
            tensor = node.inputs[0]

    def variable_handle(self, tensor):
        """The key of the handle that this tensor was read from, if it is a variable's value; else None."""
        value = self.variable_value(tensor)
        return None if value is None else self.key(self.of(value).inputs[0])

    def variable_value(self, tensor):
        """What was read from a variable to make this tensor, if it is the variable's value; else None."""
        while True:
            node = self.of(tensor)
            if node is None:
                return None
            if node.type == "ReadVariableOp":
                return tensor
            if node.type not in ("Identity", "Cast", "Reshape", "Transpose"):
                return None
            tensor = node.inputs[0]

    def read_matrix(self, tensor):
        """If the tensor is a variable's value or the transpose of it: its handle's key, and whether it is
        transposed. Else None."""
        is_transposed = False
        while True:
            node = self.of(tensor)
            if node is None:
                return None
            if node.type == "ReadVariableOp":
                return self.key(node.inputs[0]), is_transposed
            if node.type == "Transpose":
                permutation = self.constant(node.inputs[1])
                if permutation is None or permutation.tolist() != [1, 0]:
                    return None
                is_transposed = not is_transposed
            elif node.type != "Identity" and (node.type != "Cast" or node.inputs[0].dtype != tensor.dtype):
                return None
            tensor = node.inputs[0]


_erf = np.vectorize(math.erf)
_erfc = np.vectorize(math.erfc)

_FUNCTIONS = {
    "Identity": lambda x: x,
    "Neg": np.negative,
    "Square": np.square,
    "Exp": np.exp,
    "Erf": _erf,
    "Erfc": _erfc,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Mul": np.multiply,
    "Add": np.add,
    "AddV2": np.add,
    "AddN": lambda *terms: sum(terms),
    "Sub": np.subtract,
    "RealDiv": np.divide,
    "Pow": np.power,
    "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y),
}


class Elementwise:
    """Computes on a few numbers what ops do to every element. So an activation is known by what it computes,
    however a framework has written it.

    `leaf` gives the numbers of the tensors to start from, and None for all others.
    """

    _MOST_OPS = 100  # more than any activation has

    def __init__(self, nodes: Nodes, leaf):
        self._nodes = nodes
        self._leaf = leaf
        self._values: dict = {}

    def value(self, tensor) -> np.ndarray | None:
        """None if the tensor depends on anything else, or in another way than element by element."""
        key = self._nodes.key(tensor)
        if key not in self._values:
            if len(self._values) >= self._MOST_OPS:
                return None
            self._values[key] = None
            self._values[key] = self._compute(tensor)
        return self._values[key]

    def _compute(self, tensor):
        if tensor.shape.rank == 0:
            constant = self._nodes.constant(tensor)
            if constant is not None:
                return np.asarray(constant, np.float64)
        else:
            known = self._leaf(tensor)
            if known is not None:
                return known
        node = self._nodes.of(tensor)
        if node is None:
            return None
        if node.type == "IdentityN":
            return self.value(node.inputs[node.index])
        if node.type == "Reshape":
            # After a sum over what was broadcast, which is nothing here.
            before = self._nodes.of(node.inputs[0])
            return self.value(node.inputs[0]) if before is not None and before.type == "Sum" else None
        if node.type == "Sum":
            return self.value(node.inputs[0]) if self._is_no_sum(node.inputs[1]) else None
        function = _FUNCTIONS.get(node.type)
        if function is None:
            return None
        arguments = []
        for part in node.inputs:
            if part.shape.rank != 0 and not part.shape.is_compatible_with(tensor.shape):
                return None
            arguments.append(self.value(part))
            if arguments[-1] is None:
                return None
        with np.errstate(all="ignore"):
            return function(*arguments)

    def _is_no_sum(self, axes) -> bool:
        """Whether the axes of a sum are those in which two tensors of one shape were broadcast: none."""
        known = self._nodes.constant(axes)
        if known is not None:
            return known.size == 0
        node = self._nodes.of(axes)
        if node is None or node.type != "BroadcastGradientArgs":
            return False
        shapes = [self._nodes.of(shape) for shape in node.inputs]
        return all(
            shape is not None and shape.type == "Shape" and self.value(shape.inputs[0]) is not None
            for shape in shapes
        )


def handle_in(graph, variable):
    """The handle of a variable as ops of `graph` see it; None if they do not use it."""
    handle = getattr(variable, "handle", None)
    if handle is None or not hasattr(graph, "captures"):
        return handle
    outer = handle
    with contextlib.suppress(RuntimeError):  # the outer graph is gone
        if hasattr(graph.outer_graph, "captures"):
            outer = handle_in(graph.outer_graph, variable)
    for external, internal in graph.captures:
        if external is handle or external is outer:
            return internal
    return None


def unwrap(variable):
    """The tf.Variable inside a variable of Keras 3."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
