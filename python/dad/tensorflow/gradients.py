"""What gradient tapes and optimizers share: a list of gradients becomes the list of reduced gradients."""

from __future__ import annotations

import collections
import os
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from dad import dry_run
from dad._lib import _core
from dad.arguments import reduce_op, require_variables_of, set_id
from dad.basics import Adasum, Average, Max, Sum
from dad.methods.planned import has_planned_method, planned_method
from dad.planning.agreement import Description, common_options, named_groups
from dad.planning.circle import circle_of
from dad.planning.table import plan_rows
from dad.planning.text import is_plan_shown, show_plan
from dad.process_sets import ProcessSet, global_process_set
from dad.state.state_bytes import for_rank, from_bytes, to_bytes
from dad.tensorflow._load import lib
from dad.tensorflow.compression import compressor, resolve
from dad.tensorflow.exchange import FLOATING, MethodExchange
from dad.tensorflow.factors.eager_capture import captured
from dad.tensorflow.graph import collective, is_eager, sizes_as_numbers, wire_name
from dad.tensorflow.grouping import bytes_of, small_together
from dad.tensorflow.ops import allreduce_slices, resource, size_op
from dad.tensorflow.raw_ops import raw_allreduce
from dad.tensorflow.replicas import Settings, compared_in_graph, left_out, replica_of

# Streams keep what is reduced in every step apart from what is reduced now and then. dad.torch counts its
# optimizers from 1.
TAPE_STREAM = 1 << 20
_first_optimizer_stream = TAPE_STREAM + 1
_num_optimizers: collections.Counter[int | None] = collections.Counter()
# Those of tapes by methods, which keep something between steps.
_first_tape_stream, _NUM_TAPE_STREAMS = 1 << 30, 1 << 30
_num_tapes: collections.Counter[tuple[int | None, str]] = collections.Counter()


def new_stream(process_set: ProcessSet) -> int:
    """For one optimizer; the same on all ranks of the set, which make their optimizers in the same order."""
    _num_optimizers[process_set.process_set_id] += 1
    return _first_optimizer_stream + _num_optimizers[process_set.process_set_id]


def _tape_stream(process_set: ProcessSet, settings: str) -> int:
    """For tapes with these settings. By these, and not by the order in which they come: a rank that had
    others for a while, and got an error for it, has the same as the rest when it goes on as they do."""
    number = process_set.process_set_id
    _num_tapes[number, settings] += 1
    text = f"{settings} {_num_tapes[number, settings]}"
    return _first_tape_stream + zlib.crc32(text.encode()) % _NUM_TAPE_STREAMS


def is_elastic() -> bool:
    return "1" in (os.environ.get("DAD_ELASTIC"), os.environ.get("HOROVOD_ELASTIC"))


def is_active(process_set: ProcessSet) -> bool:
    """Whether there is anybody to talk to."""
    return process_set.included() and (
        process_set.size() > 1 or is_elastic() or dry_run.current() is not None
    )


def variable_name(variable: Any, number: int) -> str:
    """How the variable is called between ranks."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or f"gradient_{number}"
    return path.removesuffix(":0")


def variable_names(variables: Sequence[Any]) -> list[str]:
    """Unique, also where variables share a name."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for number, variable in enumerate(variables):
        name = variable_name(variable, number)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return names


def _key(variable: Any) -> int:
    return id(resource(variable))


def _plain_compressor(compression: Any, name: str) -> Any:
    """The compressor of a tensor that is sent by itself; planned methods do not fit it."""
    return compressor("none" if planned_method(compression, name) is not None else compression, name)


@dataclass(frozen=True)
class Row:
    """A tensor of which a plan tells."""

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    compressor: Any
    method: Any = None
    planned: bool = False

    @staticmethod
    def of(name: str, variable: Any, compression: Any, planned: bool = False) -> Row:
        method = planned_method(compression, name)
        dtype = tf.as_dtype(variable.dtype).base_dtype
        return Row(name, tuple(variable.shape), dtype, _plain_compressor(compression, name), method, planned)

    @property
    def element_bytes(self) -> int:
        return self.dtype.size

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating


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
        model: Any = None,
    ) -> None:
        self.name = name
        self.model = model
        self.compression = resolve(compression)
        self.sparse_as_dense = sparse_as_dense
        self.op = reduce_op(op)
        self.prescale = 1.0 / gradient_predivide_factor
        self.postscale = gradient_predivide_factor
        self.groups = groups
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.devices = (device_dense, device_sparse)
        self.stream = stream
        self.settings_of_optimizer: Settings = dict  # for comparisons with other ranks
        self.options: dict[str, Any] = {}  # of the optimizer, beside those given here
        self._local: dict[int, Any] = {}  # by id; the variable stays alive with it
        self._rows: dict[str, Row] = {}
        self.by_method: MethodExchange | None = None  # tapes have theirs in common
        self.of_all_ranks: bytes | None = None  # while a checkpoint is written that has them all
        self._saved: dict[str, Any] | None = None  # to go on with, once there is an exchange
        self.has_methods = has_planned_method(self.compression)
        if self.has_methods and op not in (Average, Sum):
            raise ValueError(
                f"compression={self.compression.spec()!r} works for op=Average and op=Sum only: other "
                "ops need the whole gradient of every rank"
            )

    def register_local(self, variable: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._local[_key(variable)] = variable
        left_out.trains([resource(variable)])

    def is_local(self, variable: Any) -> bool:
        return _key(variable) in self._local

    @collective
    @sizes_as_numbers()
    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        loss_scale: Any = None,
        recorder: Any = None,
    ) -> list[Any]:
        """loss_scale: what the loss was multiplied with. recorder: of eager gradients (factors.py)."""
        results = list(gradients)
        require_variables_of(self.model, variables)
        if not is_active(self.process_set):
            return results
        if recorder is None and is_eager():
            recorder = captured()
        names = variable_names(variables)
        self._note(names, variables)
        left_out.trains(resource(variable) for variable in variables)
        planned = [
            i for i, gradient in enumerate(results) if self._is_planned(gradient, variables[i], names[i])
        ]
        shared = [variable for variable in variables if not self.is_local(variable)]
        if not shared:
            return self._reduce_others(results, variables, names, planned)
        exchange = self._exchange(gradients, variables, names)
        after = _values_are_there(shared)
        if planned:
            picked = [[values[i] for i in planned] for values in (results, variables, names)]
            reduced, begun = exchange(*picked, loss_scale, recorder, after)
            for i, gradient in zip(planned, reduced, strict=True):
                results[i] = gradient
        else:
            begun = exchange.begin(after)
        with tf.control_dependencies([begun]):
            reduced = _all_or_none(self._reduce_others(results, variables, names, planned))
        return self._compared(exchange, reduced, variables, names)

    def _compared(
        self, exchange: MethodExchange, gradients: list[Any], variables: Sequence[Any], names: Sequence[str]
    ) -> list[Any]:
        """In graphs of TF1: the gradients, not before variables were compared with those of other ranks."""
        if is_eager() or tf.compat.v1.executing_eagerly_outside_functions():
            return gradients
        shared = [(n, v) for n, v in zip(names, variables, strict=True) if not self.is_local(v)]
        exchange.board.let_graph_compare()
        compared = compared_in_graph(
            exchange.board,
            exchange.compares,
            [name for name, _ in shared],
            [variable for _, variable in shared],
            self.settings_of_optimizer,
        )
        with tf.control_dependencies([compared]):
            return tf.nest.map_structure(tf.identity, gradients, expand_composites=True)

    def _reduce_others(
        self, results: list[Any], variables: Sequence[Any], names: Sequence[str], planned: Sequence[int]
    ) -> list[Any]:
        """What goes by no planned method: dense, as slices, or not at all."""
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in results]
        dense = []
        for i, gradient in enumerate(results):
            if gradient is None or i in planned:
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

    def _describe(
        self, gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str]
    ) -> Description:
        """What ranks must have in common."""
        known = {_key(variable): name for variable, name in zip(variables, names, strict=True)}
        options = common_options(
            compression=self.compression,
            op=self.op,
            gradient_predivide_factor=self.postscale,
            groups=named_groups(self.groups, lambda variable: known.get(_key(variable))),
            sparse_as_dense=self.sparse_as_dense,
            **self.options,
        )
        is_tape = self.stream == TAPE_STREAM
        if self.has_methods and not is_tape:
            # What is kept between steps goes by this number.
            options["number among the optimizers made"] = str(self.stream - _first_optimizer_stream)
        tensors = [
            (name, _as_text(variable, gradient))
            for name, variable, gradient in zip(names, variables, gradients, strict=True)
            if not self.is_local(variable)
        ]
        return Description(options, tensors, "DistributedGradientTape" if is_tape else "DistributedOptimizer")

    def _note(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        for name, variable in zip(names, variables, strict=True):
            if name not in self._rows and not self.is_local(variable):
                self._rows[name] = Row.of(name, variable, self.compression)

    # What plan() tells, and what is kept between steps

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor that has been reduced: what is sent for it, and why."""
        return self._plan_of(self.by_method) if is_active(self.process_set) else []

    def _plan_of(self, exchange: MethodExchange | None) -> list[dict[str, Any]]:
        planned = exchange.board.tensors if exchange is not None else {}
        choices = exchange.board.plan.choices if exchange is not None and exchange.board.plan else []
        rows = [
            replace(row, planned=name in planned and planned[name].planned)
            for name, row in self._rows.items()
        ]
        stats = _core.stats()["tensors"]
        measured = {name: stats[w] for name in self._rows if (w := self.method_name(name)) in stats}
        # A class of the user's own need not have a name.
        dense = getattr(self.compression, "name", "") == "none"
        why = "no method asked for" if dense else "asked for"
        return plan_rows(rows, choices, circle_of(self.process_set).size, why, measured)

    def save_state(self) -> bytes:
        """This rank's residuals and warm starts, or those of all ranks; empty if there are none."""
        if self.of_all_ranks is not None:
            return self.of_all_ranks
        waiting = self._saved if self.by_method is None else self.by_method.saved
        if waiting is not None:  # for the first step
            return to_bytes(waiting)
        if self.by_method is None or not self.by_method.board.tensors:
            return b""
        return to_bytes(self.by_method.board.save())

    def load_state(self, data: bytes) -> None:
        """Goes on with the state of the rank of the same number."""
        if self.has_methods and is_active(self.process_set):
            self._saved = for_rank(data, self.process_set.rank(), self.process_set.size())
            if self.by_method is not None:
                self.by_method.saved, self._saved = self._saved, None

    def carry_state(self, data: bytes) -> None:
        """Goes on with that in a new round of an elastic job."""
        if self.by_method is not None and self.by_method.board.tensors:
            self.by_method.board.load(from_bytes(data))
        else:
            self.load_state(data)

    def reduced_scaled(self, gradients: Sequence[Any]) -> None:
        """Of a scaled loss: if these are not finite the step is left out, and what it would have applied is
        kept."""
        if not self.has_methods or self.by_method is None:
            return
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
        lib.dad_return_last(finite=finite, process_set=set_id(self.process_set), stream=self.stream)

    def _is_planned(self, gradient: Any, variable: Any, name: str) -> bool:
        if gradient is None or not self.has_methods or self.is_local(variable):
            return False
        replaces = getattr(variable, "overwrite_with_gradient", False)
        floating = resource(variable).dtype.base_dtype in FLOATING  # a reference of TF1 is not its base
        return not replaces and floating and planned_method(self.compression, name) is not None

    def _exchange(
        self, gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str]
    ) -> MethodExchange:
        """An optimizer has one. Tapes are made anew in every step: those with the same settings and the same
        variables go on with one another's state."""
        if self.stream != TAPE_STREAM:
            if self.by_method is None:
                self.by_method = self._new_exchange(self.stream, self._describe(gradients, variables, names))
            found = self.by_method
        else:
            resources = [resource(variable) for variable in variables]
            described = self._describe(gradients, variables, names)
            settings = (repr(described.options), self.process_set.process_set_id)
            key = (*settings, *(id(variable) for variable in resources))
            if key not in _of_tapes:
                of_variables = repr((*settings, names))
                stream = _tape_stream(self.process_set, of_variables)
                _of_tapes[key] = self._new_exchange(stream, described)
                weakref.finalize(resources[0], _of_tapes.pop, key, None)
            self.by_method = found = _of_tapes[key]
        if found.board.replica is None and tf.compat.v1.executing_eagerly_outside_functions():
            shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
            found.board.replica = replica_of(
                [names[i] for i in shared],
                [resource(variables[i]) for i in shared],
                self.settings_of_optimizer,
                found.board,
            )
        if not is_eager():
            # Its ops know the board only by number.
            graph = tf.compat.v1.get_default_graph()
            graph._dad_exchanges = [*getattr(graph, "_dad_exchanges", []), found]
        return found

    def _new_exchange(self, stream: int, described: Description) -> MethodExchange:
        scales = (self.prescale, self.postscale)
        exchange = MethodExchange(
            self.compression, self.op, scales, self.process_set, stream, self.method_name, described
        )
        exchange.saved, self._saved = self._saved, None
        if self.stream == TAPE_STREAM and _carried_for_tapes and exchange.saved is None:
            exchange.saved = _carried_for_tapes.pop()
        if is_plan_shown() and self.process_set.rank() == 0:
            exchange.board.on_measured = lambda exposed_ms: show_plan(self._plan_of(exchange), exposed_ms)
        return exchange

    def method_name(self, name: str) -> str:
        """One for all graphs: it names what is kept between steps."""
        return f"{self.name}/{name}"

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
        """What goes into one op: groups travel together. Others travel by themselves. In a graph an op starts
        when its last gradient is there, so that large ones have an op each and small ones share one; in eager
        mode they are all there."""
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
        sizes = [bytes_of(variables[i]) for i in rest]
        return [*batches, *((members, False) for members in small_together(rest, sizes))]

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
            chosen = [_plain_compressor(self.compression, name) for name in names]
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
                [bytes_of(variable) for variable in variables],
            )
            return [
                c.decompress(t, context)
                for c, t, (_, context) in zip(chosen, reduced, compressed, strict=True)
            ]


def _values_are_there(variables: Sequence[Any]) -> list[Any]:
    """In a graph: what runs when earlier steps have written these variables, so that they may be compared
    with those of other ranks. A graph may have several steps."""
    if is_eager() or not tf.compat.v1.executing_eagerly_outside_functions():
        return []
    return [tf.group(*[resource(variable).read_value() for variable in variables])]


def _as_text(variable: Any, gradient: Any) -> str:
    """What ranks must have in common of a variable."""
    text = f"{tuple(variable.shape)} {tf.as_dtype(variable.dtype).base_dtype.name}"
    return f"{text}, no gradient" if gradient is None else text


def _all_or_none(gradients: list[Any]) -> list[Any]:
    """A graph updates a variable as soon as its gradient is there. If another gradient of the step fails
    later, some ranks would have updated it and some not: so all are there, or none. By an op of ours:
    TensorFlow's optimizers of graphs take IdentityN apart."""
    if is_eager():
        return gradients
    present = [g for g in gradients if g is not None]
    flat = tf.nest.flatten(present, expand_composites=True)
    if len(flat) < 2:
        return gradients
    held = tf.nest.pack_sequence_as(present, lib.dad_all_or_none(tensors=flat), expand_composites=True)
    remaining = iter(held)
    return [None if g is None else next(remaining) for g in gradients]


_of_tapes: dict[Any, MethodExchange] = {}
_carried_for_tapes: list[dict[str, Any]] = []  # of an elastic job: for the first one that there will be


def kept_by_tapes() -> dict[str, Any] | None:
    """What the exchange of tapes keeps in this rank, if there is one by methods and not several."""
    exchanges = [one for one in _of_tapes.values() if one.board.tensors]
    if len(exchanges) == 1:
        return exchanges[0].saved or exchanges[0].board.save()
    return _carried_for_tapes[0] if _carried_for_tapes else None


def carry_for_tapes(saved: dict[str, Any]) -> None:
    """Goes on with that in a new round of an elastic job."""
    exchanges = [one for one in _of_tapes.values() if one.board.tensors]
    if len(exchanges) == 1:
        exchanges[0].board.load(saved)
    else:
        _carried_for_tapes[:] = [saved]


def refuse_adasum(op: int) -> None:
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
