"""Helpers that Horovod has in a module of this name, for scripts that import them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Whether ops run at once: not within tf.function and not in a graph of TF1."""
    return tf.executing_eagerly()


def _make_subgraph(function: Any) -> Any:
    return tf.function(function)


class _Reference:
    """What tf.Variable.ref() gives, for variables of Keras 3, which have no such method."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)


def vars_to_refs(variables: Any) -> Any:
    """Makes hashable references of variables.

    Args:
        variables: a variable, or a list of them.

    Returns:
        a reference with deref(); of a list, a tuple of them.

    Example::

        references = hvd.vars_to_refs(model.trainable_variables)
    """
    if isinstance(variables, list):
        return tuple(map(vars_to_refs, variables))
    return variables.ref() if hasattr(variables, "ref") else _Reference(variables)


def refs_to_vars(references: Any) -> Any:
    """The variables of which vars_to_refs() has made references.

    Args:
        references: what vars_to_refs() has returned.

    Returns:
        the variable; of a tuple, a list of them.

    Example::

        variables = hvd.refs_to_vars(references)
    """
    if isinstance(references, tuple):
        return list(map(refs_to_vars, references))
    return references.deref()
