"""How a collective gets into a graph: its name, and when it may run."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util

# AutoGraph need not look into our functions: they have no control flow that depends on tensors.
plain = tf.autograph.experimental.do_not_convert


# Else it is tf_keras.
HAS_KERAS_3: bool = getattr(tf.keras, "__version__", "2").startswith("3.")


def is_eager() -> bool:
    return tf.executing_eagerly()


def _root(graph: Any) -> Any:
    """The outermost function that is being traced. Names are counted there, so that a branch or the body
    of a loop has no name in common with what runs beside it."""
    while isinstance(graph, FuncGraph):
        try:
            outer = graph.outer_graph
        except RuntimeError:  # it is gone
            break
        if not isinstance(outer, FuncGraph):
            break
        graph = outer
    return graph


class _Names:
    """The names of collectives that a graph has, counted."""

    def __init__(self) -> None:
        self._count: collections.Counter[str] = collections.Counter()
        self._open: list[str] = []  # whose op has not been made

    @staticmethod
    def of(root: Any) -> _Names:
        if not hasattr(root, "_dad_names"):
            root._dad_names = _Names()
        return root._dad_names

    def take(self, base: str) -> int:
        self._open.append(base)
        self._count[base] += 1
        return self._count[base] - 1

    def keep(self) -> None:
        self._open.clear()

    def give_back(self) -> None:
        for base in self._open:
            self._count[base] -= 1
        self._open.clear()


def collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that puts collectives into a graph. What is refused on this rank takes no name: the others
    know nothing of it, and count on."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException:
            if not is_eager():
                _Names.of(_root(_ops.get_default_graph())).give_back()
            raise

    return plain(call)


def wire_name(kind: str, name: str | None = None, ignore_name_scope: bool = False) -> str:
    """The name of a collective between ranks. Empty in eager mode: kernels are kept by name there, and
    those without one count when they run."""
    if is_eager():
        return name or ""
    graph = _ops.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            f"{kind} cannot be compiled by XLA, since it talks to other processes: use jit_compile=False"
        )
    root = _root(graph)
    if name is None:
        # Not by the input's name: it changes with what else is in the graph, which ranks need not share.
        base = f"{kind}.{getattr(root, 'name', 'graph')}"
    else:
        scope = "" if ignore_name_scope else graph.get_name_scope()
        base = f"{scope}/{name}" if scope else name
    number = _Names.of(root).take(base)
    if name is None:
        return f"{base}.{number}"
    return f"{base}_{number}" if number else base


def keep_names() -> None:
    """The op that the names were for has been made."""
    if not is_eager():
        _Names.of(_root(_ops.get_default_graph())).keep()


def run_any_time(tensors: Sequence[Any]) -> None:
    """Of an op that has just been made. A tf.function runs stateful ops one after the other, in program
    order. Collectives find each other by name and may run as soon as their inputs are there: while the
    backward pass goes on."""
    if is_eager():
        return
    keep_names()
    manager = getattr(_ops.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensors[0].op)


@contextlib.contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """After tf.disable_v2_behavior() the sizes in a shape are objects: within this they are int or None."""
    if isinstance(tf.TensorShape([1])[0], int):
        yield
        return
    tf.compat.v1.enable_v2_tensorshape()
    try:
        yield
    finally:
        tf.compat.v1.disable_v2_tensorshape()
