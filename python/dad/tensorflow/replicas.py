"""What this rank has of a model, for comparisons with the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dad.state.left_out import LeftOut
from dad.state.replicas import Replica
from dad.tensorflow.ops import resource

Settings = Callable[[], dict[str, str]]

left_out = LeftOut()  # of TensorFlow's variables


def expect(named: Iterable[tuple[str, Any]]) -> None:
    """Ranks should have these in common, if they are trained at all. Those of graphs of TF1 are left out:
    who compares could not read them."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        all_of_them = [(name, resource(variable)) for name, variable in named]
        left_out.expect(
            [(name, v) for name, v in all_of_them if getattr(v, "trainable", False) and hasattr(v, "numpy")]
        )


def replica_of(
    names: Sequence[str], variables: Sequence[Any], settings: Settings, reporter: Any
) -> Callable[[], Replica]:
    """Reads the variables when it is called; it does not keep them alive. reporter: who compares them."""
    watched = [(name, weakref.ref(variable)) for name, variable in zip(names, variables, strict=True)]
    reporter = weakref.ref(reporter)

    def memory() -> Iterator[tuple[str, Any]]:
        for name, reference in watched:
            if (variable := reference()) is not None:
                yield name, _memory_of(variable.numpy())

    def outside() -> Iterator[tuple[str, Any]]:
        for name, variable in left_out.of(reporter()):
            yield name, _memory_of(variable.numpy())

    return lambda: Replica.of(memory(), settings(), outside())


def compared_in_graph(
    board: Any, compares: Any, names: Sequence[str], variables: Sequence[Any], settings: Settings
) -> Any:
    """In a graph of TF1 nobody but the graph can read its variables. The op that hashes them in the steps in
    which replicas are compared; what changes them has to come after it."""
    reference = weakref.ref(board)

    def compare(*values: np.ndarray) -> np.ndarray:
        if (alive := reference()) is not None:
            memory = [(name, _memory_of(value)) for name, value in zip(names, values, strict=True)]
            alive.compare(lambda: Replica.of(memory, settings()))
        return np.array(True)

    values = [resource(variable).read_value() for variable in variables]
    return tf.cond(
        tf.reshape(compares, []),
        lambda: tf.reshape(tf.numpy_function(compare, values, tf.bool), []),
        lambda: tf.constant(False),
    )


def settings_of_v1(optimizer: Any) -> Settings:
    """The settings of an optimizer of tf.compat.v1.train that are numbers."""
    return lambda: {
        name.strip("_"): repr(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, bool | int | float) and name != "_use_locking"
    }


def _memory_of(values: Any) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
