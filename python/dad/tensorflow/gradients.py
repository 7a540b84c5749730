"""What gradient tapes and optimizers share: a list of gradients becomes the list of reduced gradients."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad.arguments import set_id
from dad.basics import Adasum, Average, Max
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow.compression import compressor, resolve
from dad.tensorflow.graph import is_eager, plain, wire_name
from dad.tensorflow.ops import allreduce_slices, raw_allreduce, resource, size_op

# Streams keep what is reduced in every step apart from what is reduced now and then. dad.torch counts its
# optimizers from 1.
TAPE_STREAM = 1 << 20
_first_optimizer_stream = TAPE_STREAM + 1
_num_optimizers: collections.Counter[int | None] = collections.Counter()


def new_stream(process_set: ProcessSet) -> int:
    """For one optimizer; the same on all ranks of the set, which make their optimizers in the same order."""
    _num_optimizers[process_set.process_set_id] += 1
    return _first_optimizer_stream + _num_optimizers[process_set.process_set_id]


def is_elastic() -> bool:
    return "1" in (os.environ.get("DAD_ELASTIC"), os.environ.get("HOROVOD_ELASTIC"))


def is_active(process_set: ProcessSet) -> bool:
    """Whether there is anybody to talk to."""
    return process_set.included() and (process_set.size() > 1 or is_elastic())


def variable_name(variable: Any, number: int) -> str:
    """How the variable is called between ranks."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or f"gradient_{number}"
    return path.removesuffix(":0")


def _key(variable: Any) -> int:
    return id(resource(variable))


class GradientReducer:
    """Reduces the gradients of variables over the ranks. One per optimizer, or per tape."""

    def __init__(
        self,
        name: str,
        compression: Any = None,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        device_dense: str = "",
        device_sparse: str = "",
        stream: int = TAPE_STREAM,
    ) -> None:
        self.name = name
        self.compression = resolve(compression)
        self.sparse_as_dense = sparse_as_dense
        self.op = op
        self.prescale = 1.0 / gradient_predivide_factor
        self.postscale = gradient_predivide_factor
        self.groups = groups
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.devices = (device_dense, device_sparse)
        self.stream = stream
        self._local: dict[int, Any] = {}  # by id; the variable stays alive with it

    def register_local(self, variable: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._local[_key(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        return _key(variable) in self._local

    @plain
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        if not is_active(self.process_set):
            return results
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in results]
        names = self._names(variables)
        dense = []
        for i, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[i]):
                results[i] = self._scale_local(gradient)
            elif isinstance(gradient, tf.IndexedSlices):
                results[i] = self._reduce_slices(gradient, names[i])
            else:
                dense.append(i)
        for members, together in self._batches(dense, variables):
            batch = [results[i] for i in members]
            reduced = self._reduce(
                batch, [names[i] for i in members], [variables[i] for i in members], together
            )
            for i, gradient in zip(members, reduced, strict=True):
                results[i] = gradient
        return results

    def _names(self, variables: Sequence[Any]) -> list[str]:
        """Unique, also where variables share a name."""
        seen: collections.Counter[str] = collections.Counter()
        names = []
        for number, variable in enumerate(variables):
            name = variable_name(variable, number)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
        return names

    def _wire_name(self, name: str) -> str:
        return wire_name("gradient", f"{self.name}/{name}", ignore_name_scope=True)

    def _scale_local(self, gradient: Any) -> Any:
        """So that a local gradient counts as much as the mean of the others."""
        if not self.scale_local_gradients:
            return gradient
        size = size_op(self.process_set.process_set_id) if is_elastic() else self.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)

    def _reduce_slices(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        with tf.device(self.devices[1]):
            reduced = allreduce_slices(
                slices,
                self._wire_name(f"{name}.values"),
                self._wire_name(f"{name}.indices"),
                self.op,
                self.prescale,
                self.postscale,
                set_id(self.process_set),
                self.stream,
            )
            # Rows that several ranks have are added up: the optimizers of Keras 3 take each for a gradient.
            indices, places = tf.unique(reduced.indices)
            values = tf.math.unsorted_segment_sum(reduced.values, places, tf.size(indices))
            return tf.IndexedSlices(values, indices, reduced.dense_shape)

    def _batches(self, dense: list[int], variables: Sequence[Any]) -> list[tuple[list[int], bool]]:
        """What goes into one op: groups travel together. In a graph every other gradient has an op of its
        own, which starts as soon as the gradient is there; in eager mode they are all there."""
        if isinstance(self.groups, list | tuple):
            place = {_key(variables[i]): i for i in dense}
            found = [[place.pop(_key(v)) for v in group if _key(v) in place] for group in self.groups]
            batches = [(group, True) for group in found if group]
            rest = sorted(place.values())
        elif self.groups:
            count = min(self.groups, len(dense))
            ends = [len(dense) * k // count for k in range(count + 1)] if count else []
            pairs = zip(ends[:-1], ends[1:], strict=True)
            return [(dense[first:last], True) for first, last in pairs]
        else:
            batches, rest = [], dense
        if is_eager():
            return [*batches, (rest, False)] if rest else batches
        return [*batches, *(([i], False) for i in rest)]

    def _reduce(
        self, gradients: list[tf.Tensor], names: list[str], variables: list[Any], together: bool
    ) -> list[tf.Tensor]:
        # Keras' float8 layers keep statistics in "gradients" that replace the variable: all take the largest.
        replaces = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        if any(replaces) and not all(replaces):
            results: list[Any] = [None] * len(gradients)
            for kind in (True, False):
                part = [i for i, r in enumerate(replaces) if r == kind]
                picked = ([values[i] for i in part] for values in (gradients, names, variables))
                for i, gradient in zip(part, self._reduce(*picked, together), strict=True):
                    results[i] = gradient
            return results
        with tf.device(self.devices[0]):
            chosen = [compressor(self.compression, name) for name in names]
            compressed = [c.compress(g) for c, g in zip(chosen, gradients, strict=True)]
            wires = [self._wire_name(name) for name in names]
            is_statistic = all(replaces)
            reduced = raw_allreduce(
                [tensor for tensor, _ in compressed],
                [self._wire_name(f"group/{names[0]}")] if together and len(names) > 1 else wires,
                Max if is_statistic else self.op,
                1.0 if is_statistic else self.prescale,
                1.0 if is_statistic else self.postscale,
                set_id(self.process_set),
                self.stream,
            )
            return [
                c.decompress(t, context)
                for c, t, (_, context) in zip(chosen, reduced, compressed, strict=True)
            ]


def refuse_adasum(op: int) -> None:
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
