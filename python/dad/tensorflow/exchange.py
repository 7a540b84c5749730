"""Gradients by a method that is planned for: factors, low rank, sparse, quantised.

In a graph small layers share an op, which takes their factors: where the plan of the step wants a gradient
formed it forms it. A large variable whose gradient has factors, or one of which these are more work than the
gradient, gets both ways, with a switch in front that the plan sets: of the other way nothing runs, not even
the product that forms the gradient. In eager mode the plan is asked first, and one op sends everything.

Tensors travel in the order that torch has, so that both frameworks put the same bytes on the wire: a kernel
of Keras that comes formed is transposed on its way. By factors nothing is: the exchange writes the gradient
as it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dad.arguments import set_id
from dad.methods.compression import Edad, Exact
from dad.methods.planned import looks_at_variance, planned_method
from dad.planning.agreement import Description
from dad.planning.planner import Link
from dad.process_sets import ProcessSet
from dad.tensorflow._load import lib
from dad.tensorflow.board import Board, Pair, Tensor
from dad.tensorflow.factors.find import Found, Recorder, find
from dad.tensorflow.factors.forms import choose_forms
from dad.tensorflow.factors.uses import Layout, is_plain_product
from dad.tensorflow.graph import is_eager, plain, run_any_time
from dad.tensorflow.grouping import bytes_of, small_together
from dad.tensorflow.ops import resource

# Of gradients by methods that share an op. Less than of dense ones: there is more to do for each, while
# backward goes on.
_OP_BYTES = 1 << 19
# Elements of a gradient that the op forms: more are better spread over TensorFlow's threads.
_MOST_FORMED = 1 << 17


@dataclass
class Work:
    """A pair in a graph."""

    pair: Pair
    weight: int  # by its place among the gradients
    bias: int | None
    found: Found
    place: int = -1  # on the board

    @property
    def members(self) -> list[int]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def sends_rows(self) -> bool:
        """Whether the graph has the factors, for the plan to choose."""
        return self.pair.has_rows and not self.found.is_formed

    def is_formed_by_the_op(self) -> bool:
        """Whether the op that sends it may as well form its gradient: little work, of operands as they
        are."""
        layout = self.found.layout
        small = layout.out * layout.columns <= _MOST_FORMED
        return small and not self.found.rest and all(is_plain_product(use) for use in self.found.uses)

    def rest(self) -> tf.Tensor | None:
        """What comes formed beside the uses, in the order of the wire."""
        terms = [tf.convert_to_tensor(term) for term in self.found.rest]
        return self.found.layout.to_wire(tf.add_n(terms)) if terms else None


class MethodExchange:
    """The gradients of one optimizer or tape that go by planned methods, and where each of its steps begins.

    described: what the optimizer or tape was made with, which ranks compare in the first step.
    """

    def __init__(
        self,
        compression: Any,
        op: int,
        scales: tuple[float, float],
        process_set: ProcessSet,
        stream: int,
        wire_name: Callable[[str], str],
        described: Description,
    ) -> None:
        self.board = Board(process_set, stream, op, wire_name, described)
        self._compression = compression
        self._op = op
        self._scales = scales
        self._process_set = process_set
        self._stream = stream
        self._wire_name = wire_name
        self.saved: dict[str, Any] | None = None  # to go on with, once the tensors are known
        self.compares: Any = None  # whether the step that was begun last compares its replica in the graph

    def begin(self, after: Sequence[Any]) -> tf.Tensor:
        """Begins a step in which nothing goes by a method: whatever is sent in it comes after this tensor.
        after: ops that run first."""
        trace, _ = self.board.add_trace([])
        with tf.control_dependencies(after):
            begun, _, self.compares = lib.dad_plan(
                counts=tf.zeros([0], tf.int64), board=self.board.id, trace=trace, pairs=[], has_rows=[]
            )
        run_any_time([begun])
        return begun

    @plain
    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        names: Sequence[str],
        loss_scale: Any = None,
        recorder: Recorder | None = None,
        after: Sequence[Any] = (),
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The reduced gradients, and what else is sent in this step comes after: see begin()."""
        variables = [resource(variable) for variable in variables]
        found = find(gradients, variables, recorder=recorder)
        self.board.add_tensors(
            [
                tensor_of(name, variable, one, planned_method(self._compression, name))
                for name, variable, one in zip(names, variables, found, strict=True)
            ]
        )
        if self.saved is not None:
            self.board.load(self.saved)
            self.saved = None
        for one in found:
            if is_eager() and recorder is None and one.reason:
                one.reason = "computed eagerly, by another tape than dad's and not in hvd.capture()"
        choose_forms(found, gradients, [planned_method(self._compression, name) for name in names])
        work = pairs_of(names, found)
        sent = _sent_in_this_graph()
        wires = [self._wire_name(name) for name in names]
        # Names are unique until a tensor is there: what has one of them goes first.
        with tf.control_dependencies([*after, *(sent[wire] for wire in wires if wire in sent)]):
            as_rows, in_chain = self._plan(work)
        scale = tf.constant(1.0, tf.float64) if loss_scale is None else tf.cast(loss_scale, tf.float64)
        call = _Call(self, gradients, variables, names, as_rows, scale)
        runs = self._runs(work)
        if is_eager():
            rows, chained = as_rows.numpy(), in_chain.numpy()
            results: dict[int, tf.Tensor] = {}
            for run in runs:
                if any(chained[k] for k in run):
                    by_chain = call.chain([work[k] for k in run])
                    mine = [work[k] for k in run if chained[k]]
                    results.update({i: by_chain[i] for one in mine for i in one.members})
            single = [k for k in range(len(work)) if not chained[k]]
            if single:
                results.update(call.send([work[k] for k in single], [bool(rows[k]) for k in single]))
            return call.gather(results), as_rows
        results = {}
        by_chain = {}
        for run in runs:
            any_chain = tf.reduce_any(tf.gather(in_chain, run))
            by_chain.update(call.chain([work[k] for k in run], any_chain))
        together: list[int] = []
        for k, one in enumerate(work):
            if one.weight in by_chain:
                results.update(call.switched(one, as_rows[k], in_chain[k], by_chain))
            elif one.sends_rows and not one.is_formed_by_the_op():
                results.update(call.switched(one, as_rows[k]))
            else:
                together.append(k)
        sizes = [sum(bytes_of(variables[i]) for i in work[k].members) for k in together]
        for members in small_together(together, sizes, _OP_BYTES):
            batch = [work[k] for k in members]
            results.update(call.send(batch, [one.sends_rows for one in batch]))
        gathered = call.gather(results)
        sent.update(zip(wires, gathered, strict=True))
        return gathered, as_rows

    def _runs(self, work: Sequence[Work]) -> list[list[int]]:
        """Layers, from the lowest up, each of which is linked to the next."""
        place = {one.pair.weight: k for k, one in enumerate(work)}
        methods = {k: planned_method(self._compression, one.pair.weight) for k, one in enumerate(work)}
        upper: dict[int, int] = {}
        for k, one in enumerate(work):
            link = one.pair.link
            top = place.get(link.upper) if link is not None else None
            if top is not None and all(isinstance(methods[i], Edad | Exact) for i in (k, top)):
                upper.setdefault(k, top)
        runs = []
        for k in sorted(upper.keys() - set(upper.values())):
            run = [k]
            while run[-1] in upper and upper[run[-1]] not in run:
                run.append(upper[run[-1]])
            runs.append(run)
        taken: set[int] = set()
        return [run for run in runs if not (taken & set(run) or taken.update(run))]

    def _plan(self, work: Sequence[Work]) -> tuple[tf.Tensor, tf.Tensor]:
        trace, places = self.board.add_trace([one.pair for one in work])
        for one, place in zip(work, places, strict=True):
            one.place = place
        as_rows, in_chain, self.compares = lib.dad_plan(
            counts=[[tf.cast(count, tf.int64) for count in three] for three in counts_of(work)],
            board=self.board.id,
            trace=trace,
            pairs=places,
            has_rows=[one.sends_rows for one in work],
        )
        run_any_time([as_rows])
        return as_rows, in_chain


def _sent_in_this_graph() -> dict[str, tf.Tensor]:
    """The last result of each name between ranks. A step may reduce the gradients of two losses, or of two
    models with layers of the same names. In eager mode nothing is under way."""
    if is_eager():
        return {}
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_dad_sent"):
        graph._dad_sent = {}
    return graph._dad_sent


def counts_of(work: Sequence[Work]) -> list[tuple[Any, Any, Any]]:
    """Rows, indexed rows and samples of each pair: numbers where shapes are known, else tensors."""
    return [
        (
            _total(use.num_rows() for use in one.found.uses if use.kind == "rows"),
            _total(use.num_rows() for use in one.found.uses if use.kind == "indexed"),
            one.found.uses[0].num_samples() if one.found.uses else 0,
        )
        for one in work
    ]


def tensor_of(name: str, variable: Any, found: Found, method: Any) -> Tensor:
    """A variable as a plan has it."""
    layout = found.layout
    vector = variable.shape.rank < 2
    return Tensor(
        name=name,
        method=method,
        matrix=(layout.out, layout.columns),
        shape=(math.prod(variable.shape),) if vector else (layout.out, layout.columns),
        element_bytes=variable.dtype.base_dtype.size,
        dtype_name=variable.dtype.base_dtype.name,
    )


def pairs_of(names: Sequence[str], found: Sequence[Found]) -> list[Work]:
    """Weights with their biases, and what is by itself."""
    work = []
    for i, one in enumerate(found):
        if one.rides_with is not None:
            continue
        links = {use.link for use in one.uses}
        link = links.pop() if len(one.uses) == 1 else None
        pair = Pair(
            weight=names[i],
            bias=names[one.bias] if one.bias is not None else None,
            has_rows=bool(one.uses),
            row_bytes=max((_row_bytes(use) for use in one.uses), default=0),
            dense=bool(one.rest),
            reason=one.reason,
            link=Link(names[link.upper], link.activation, link.slope) if link is not None else None,
            sums=bool(one.uses) and one.uses is one.sums,
            row_outputs=max((use.row_outputs for use in one.uses), default=0),
            bias_reason="" if one.bias is None else found[one.bias].reason,
        )
        work.append(Work(pair, i, one.bias, one))
    return work


# A number of samples that is not known when the graph is made.
_COMES = -1

FLOATING = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def _total(counts: Any) -> Any:
    total: Any = 0
    for count in counts:
        total = count + total
    return total


def _row_bytes(use: Any) -> int:
    return use.inputs[-1].dtype.size if use.kind == "indexed" else use.inputs[0].dtype.size


class _Call:
    """One call of a MethodExchange."""

    def __init__(
        self,
        exchange: MethodExchange,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        names: Sequence[str],
        as_rows: tf.Tensor,
        loss_scale: tf.Tensor,
    ) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._variables = variables
        self._names = names
        self._as_rows = as_rows
        self._loss_scale = loss_scale

    def gather(self, results: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """The results, in the shape of the variables."""
        return [_shaped(results[i], variable.shape) for i, variable in enumerate(self._variables)]

    def send(self, work: Sequence[Work], as_rows: Sequence[bool]) -> dict[int, tf.Tensor]:
        """One op for these pairs."""
        parts, tensors = [], []
        for one, by_rows in zip(work, as_rows, strict=True):
            inputs = [use.inputs for use in one.found.uses]
            text, given = (
                self._rows(one, inputs, one.rest())
                if by_rows
                else ("rows=0;indexed=0;dense=1", [self._formed(one)])
            )
            forms = by_rows and not is_eager()
            parts.append(self._part(one, f"{text};forms=1" if forms else text, by_rows))
            tensors += [*given, *self._bias(one)]
        results = self._op(work, parts, tensors, as_rows)
        for one, by_rows in zip(work, as_rows, strict=True):
            results[one.weight] = _in_order(one, by_rows, results[one.weight])
        return results

    def chain(self, run: Sequence[Work], any_chain: tf.Tensor | None = None) -> dict[int, tf.Tensor]:
        """One op for layers that are linked, which are products; results of those that are in no chain are
        empty. In a graph it runs only if some are."""
        tensors: list[Any] = []
        for one in run:
            use = one.found.uses[0]
            inputs: Any = use.inputs
            # Not what the variables are now, where that is known: the step may have written them since.
            values = [_as_it_lies(one.found.layout, self._value(one.weight, use.weight_read))]
            if one.bias is not None:
                values.append(tf.reshape(self._value(one.bias, use.bias_read), [-1]))
            if any_chain is not None:
                inputs, values = (_when(any_chain, part) for part in (inputs, values))
            tensors += [*self._rows(one, [inputs], None)[1], *values]
        parts = [self._part(one, "rows=1;indexed=0;dense=0", True) for one in run]
        return self._op(run, parts, tensors, [True] * len(run), lib.dad_exchange_chain)

    def switched(
        self,
        one: Work,
        as_rows: tf.Tensor,
        in_chain: tf.Tensor | None = None,
        by_chain: dict[int, tf.Tensor] | None = None,
    ) -> dict[int, tf.Tensor]:
        """All ways, of which the plan takes one."""
        rest = one.rest()
        flat = [tensor for use in one.found.uses for tensor in use.inputs]
        flat = [*flat, *([rest] if rest is not None else []), *self._bias(one)]
        if in_chain is not None:
            flat = _when(tf.logical_not(in_chain), flat)
        both = [tf.raw_ops.Switch(data=tensor, pred=as_rows) for tensor in flat]
        ways = []
        for by_rows in (False, True):
            mine = [side.output_true if by_rows else side.output_false for side in both]
            inputs = []
            for use in one.found.uses:
                inputs.append(tuple(mine[: len(use.inputs)]))
                mine = mine[len(use.inputs) :]
            my_rest = mine.pop(0) if rest is not None else None
            if by_rows:
                text, given = self._rows(one, inputs, my_rest)
            else:
                formed = [use.gradient(*of) for use, of in zip(one.found.uses, inputs, strict=True)]
                dense = one.found.layout.to_wire(tf.add_n(formed) if len(formed) > 1 else formed[0])
                text = "rows=0;indexed=0;dense=1"
                given = [dense if my_rest is None else dense + my_rest]
            way = self._op([one], [self._part(one, text, by_rows)], [*given, *mine], [by_rows])
            way[one.weight] = _in_order(one, by_rows, way[one.weight])
            ways.append(way)
        if in_chain is not None:
            chained = {i: _when(in_chain, [by_chain[i]])[0] for i in one.members}
            chained[one.weight] = tf.reshape(chained[one.weight], one.found.layout.shape)
            ways.append(chained)
        results = {}
        for i in one.members:
            merged = tf.raw_ops.Merge(inputs=[way[i] for way in ways]).output
            merged.set_shape(ways[0][i].shape)
            results[i] = merged
        return results

    def _value(self, member: int, read: tf.Tensor | None) -> tf.Tensor:
        return self._variables[member].read_value() if read is None else read

    def _part(self, one: Work, text: str, by_rows: bool) -> str:
        transposed = by_rows and one.found.layout.is_transposed
        return f"pair={one.place};{text};bias={int(one.bias is not None)};transposed={int(transposed)}"

    def _rows(self, one: Work, inputs: Sequence[Any], rest: tf.Tensor | None) -> tuple[str, list[Any]]:
        uses = list(zip(one.found.uses, inputs, strict=True))
        rows = [(use, of) for use, of in uses if use.kind == "rows"]
        indexed = [(use, of) for use, of in uses if use.kind == "indexed"]
        counts, tensors = [], []
        for use, of in [*rows, *indexed]:
            samples = use.num_samples() if self._looks_at_samples(one) else 0
            comes = [] if isinstance(samples, int) else [tf.cast(samples, tf.int64)]
            for factors in use.segments(*of):
                counts.append(_COMES if comes else samples)
                tensors += [*factors, *comes]
        begins = [begin for use, _ in rows for begin in use.begins]
        text = f"rows={len(begins)};indexed={len(indexed)};dense={int(rest is not None)}"
        text += f";samples={','.join(map(str, counts))}"
        text += f";begin={','.join(map(str, begins))}" if rows else ""
        return text, [*tensors, *([rest] if rest is not None else [])]

    def _looks_at_samples(self, one: Work) -> bool:
        return looks_at_variance(planned_method(self._exchange._compression, one.pair.weight))

    def _formed(self, one: Work) -> tf.Tensor:
        return one.found.layout.to_wire(tf.convert_to_tensor(self._gradients[one.weight]))

    def _bias(self, one: Work) -> list[tf.Tensor]:
        return [] if one.bias is None else [_shaped(self._gradients[one.bias], [None])]

    def _op(
        self,
        work: Sequence[Work],
        parts: list[str],
        tensors: list[Any],
        as_rows: Sequence[bool],
        op: Any = lib.dad_exchange,
    ) -> dict[int, tf.Tensor]:
        exchange = self._exchange
        members = [i for one in work for i in one.members]
        shapes = []
        for one, by_rows in zip(work, as_rows, strict=True):
            layout = one.found.layout
            shape = [layout.out, layout.columns]
            shapes.append(shape[::-1] if by_rows and layout.is_transposed else shape)
            if one.bias is not None:
                shapes.append([math.prod(self._variables[one.bias].shape)])
        before, after = exchange._scales
        results = op(
            as_rows=self._as_rows,
            loss_scale=self._loss_scale,
            tensors=tensors,
            board=exchange.board.id,
            parts=parts,
            names=[exchange._wire_name(self._names[i]) for i in members],
            dtypes=[self._variables[i].dtype.base_dtype for i in members],
            shapes=shapes,
            reduce_op=exchange._op,
            prescale=repr(float(before)),
            postscale=repr(float(after)),
            process_set=set_id(exchange._process_set),
            stream=exchange._stream,
            user_waits=is_eager(),
        )
        run_any_time(results)
        return dict(zip(members, results, strict=True))


def _as_it_lies(layout: Layout, variable: tf.Tensor) -> tf.Tensor:
    """The matrix of a product's variable: as the wire has it, or transposed."""
    shape = [layout.out, layout.columns]
    return tf.reshape(variable, shape[::-1] if layout.is_transposed else shape)


def _in_order(one: Work, by_rows: bool, result: tf.Tensor) -> tf.Tensor:
    """The result of an exchange as the variable has it."""
    layout = one.found.layout
    return _shaped(result, layout.shape) if by_rows and layout.is_transposed else layout.from_wire(result)


def _shaped(tensor: Any, shape: Any) -> tf.Tensor:
    """In that shape, in which one size may be None: the rest. Without an op where it has it already."""
    wanted = tf.TensorShape(shape)
    if tensor.shape.rank == wanted.rank and wanted.is_compatible_with(tensor.shape):
        return tf.convert_to_tensor(tensor)
    return tf.reshape(tensor, [-1 if size is None else size for size in wanted])


def _when(condition: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, for ops that run only where the condition holds."""
    return [tf.raw_ops.Switch(data=tensor, pred=condition).output_true for tensor in tensors]
