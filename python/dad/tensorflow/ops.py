"""The collectives: Horovod's names and argument order, in eager mode, in tf.function and in graphs of TF1.

Gradients are Horovod's: that of allgather and broadcast is the mean over ranks, that of reducescatter with
Average is the gathered gradient and with Sum is `size` times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad._lib import _core
from dad.arguments import reduce_op, set_id
from dad.basics import Adasum, Average, Sum
from dad.local_steps.joining import prepare_join
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow._load import lib
from dad.tensorflow.compression import Compression, compressor
from dad.tensorflow.graph import collective, is_eager, keep_names, run_any_time, wire_name


def _set_size(number: int) -> int:
    return len(_core.process_set_ranks(number))


def _tensors(values: Sequence[Any]) -> list[tf.Tensor]:
    tensors = [tf.convert_to_tensor(value) for value in values]
    if not tensors:
        raise ValueError("a grouped collective needs at least one tensor")
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"dtype {tensor.dtype.name} is not supported; convert the tensor first")
    return tensors


_DTYPES = frozenset(
    (
        tf.uint8,
        tf.int8,
        tf.uint16,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.float64,
        tf.bool,
    )
)


# The ops. `names` has one name for all tensors, which then travel together or not at all, or one for each.


def raw_allreduce(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    stream: int = 0,
    uncompressed_bytes: Sequence[int] = (),
) -> list[tf.Tensor]:
    reduced = lib.dad_allreduce(
        tensors=tensors,
        names=names,
        uncompressed_bytes=list(uncompressed_bytes),
        reduce_op=op,
        prescale=repr(float(prescale)),
        postscale=repr(float(postscale)),
        process_set=process_set,
        stream=stream,
        user_waits=is_eager(),
    )
    run_any_time(reduced)
    return list(reduced)


def raw_allgather(
    tensors: Sequence[tf.Tensor], names: Sequence[str], process_set: int = 0, stream: int = 0
) -> list[tf.Tensor]:
    gathered = lib.dad_allgather(
        tensors=tensors, names=names, process_set=process_set, stream=stream, user_waits=is_eager()
    )
    run_any_time(gathered)
    return list(gathered)


def _raw_reducescatter(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
) -> list[tf.Tensor]:
    scattered = lib.dad_reducescatter(
        tensors=tensors,
        names=names,
        reduce_op=op,
        prescale=repr(float(prescale)),
        postscale=repr(float(postscale)),
        process_set=process_set,
        user_waits=is_eager(),
    )
    run_any_time(scattered)
    return list(scattered)


def _raw_broadcast(
    tensors: Sequence[tf.Tensor], names: Sequence[str], root_rank: int, process_set: int
) -> list[tf.Tensor]:
    sent = lib.dad_broadcast(
        tensors=tensors, names=names, root_rank=root_rank, process_set=process_set, user_waits=is_eager()
    )
    run_any_time(sent)
    return list(sent)


def _raw_alltoall(
    tensor: tf.Tensor, splits: tf.Tensor, name: str, process_set: int
) -> tuple[tf.Tensor, tf.Tensor]:
    received, received_splits = lib.dad_alltoall(
        tensor=tensor, splits=splits, names=[name], process_set=process_set, user_waits=is_eager()
    )
    run_any_time([received])
    return received, received_splits


# allreduce


@collective
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of a tensor over the ranks: by default their mean. Of tf.IndexedSlices: the slices of
    all ranks."""
    op = reduce_op(op, average)
    scales = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        _refuse_scales(*scales)
        with tf.device(device_sparse):
            base = name or "slices"
            values, indices = (
                wire_name("allgather", None if name is None else f"{base}.{part}", ignore_name_scope)
                for part in ("values", "indices")
            )
            return allreduce_slices(tensor, values, indices, op, *scales, set_id(process_set))
    with tf.device(device_dense):
        chosen = compressor(compression, name or "")
        compressed, context = chosen.compress(*_tensors([tensor]))
        wire = wire_name("allreduce", name, ignore_name_scope)
        (reduced,) = raw_allreduce([compressed], [wire], op, *scales, set_id(process_set))
        return chosen.decompress(reduced, context)


def _refuse_scales(prescale: float, postscale: float) -> None:
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            f"prescale_factor={prescale} and postscale_factor={postscale} do not work for tf.IndexedSlices: "
            "scale the values, or convert them with tf.convert_to_tensor()"
        )


def allreduce_slices(
    slices: tf.IndexedSlices,
    values_name: str,
    indices_name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    stream: int = 0,
) -> tf.IndexedSlices:
    if op == Adasum:
        raise NotImplementedError(
            "Adasum does not work for tf.IndexedSlices: pass sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Sum, Average):
        raise NotImplementedError("only op=Sum and op=Average work for tf.IndexedSlices")
    if is_eager():
        values, indices = raw_allgather(
            [slices.values, slices.indices], [values_name, indices_name], process_set, stream
        )
    else:
        (values,) = raw_allgather([slices.values], [values_name], process_set, stream)
        (indices,) = raw_allgather([slices.indices], [indices_name], process_set, stream)
    divisor = (_set_size(process_set) if op == Average else 1) / (prescale * postscale)
    if divisor != 1.0:
        # Integers become floats, those of up to 16 bits float32, as TensorFlow itself divides them.
        if not values.dtype.is_floating:
            values = tf.cast(values, tf.float32 if values.dtype.size <= 2 else tf.float64)
        values /= tf.cast(divisor, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@collective
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """allreduce of several tensors that are reduced together or not at all."""
    op = reduce_op(op, average)
    results: list[Any] = list(tensors)
    if not results:
        return results
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    # Whatever may be refused comes before the first op: in eager mode that sends.
    chosen = compressor(compression, name or "")
    process_set_id = set_id(process_set)
    with tf.device(device_dense):
        given = _tensors([results[i] for i in dense]) if dense else []
        compressed = [chosen.compress(tensor) for tensor in given]
    if len(dense) < len(results):
        _refuse_scales(prescale_factor, postscale_factor)
    for number, tensor in enumerate(results):
        if isinstance(tensor, tf.IndexedSlices):
            results[number] = allreduce(
                tensor,
                device_sparse=device_sparse,
                op=op,
                name=None if name is None else f"{name}.{number}",
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
    if not dense:
        return results
    with tf.device(device_dense):
        reduced = raw_allreduce(
            [tensor for tensor, _ in compressed],
            [wire_name("grouped_allreduce", name, ignore_name_scope)],
            op,
            prescale_factor,
            postscale_factor,
            process_set_id,
        )
        for i, tensor, (_, context) in zip(dense, reduced, compressed, strict=True):
            results[i] = chosen.decompress(tensor, context)
    return results


def _gradients(op: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    """Dense, in the dtypes of the inputs: TensorFlow fills in zeros of its own where a result is not used."""
    return [tf.cast(tf.convert_to_tensor(g), x.dtype) for g, x in zip(grads, op.inputs, strict=True)]


def _require_linear(op: Any, what: str) -> int:
    reduce_op = op.get_attr("reduce_op")
    if reduce_op not in (Sum, Average):
        raise ValueError(f"{what} has a gradient for op=Sum and op=Average only")
    return reduce_op


@tf.RegisterGradient("DadAllreduce")
@collective
def _allreduce_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    return raw_allreduce(
        _gradients(op, grads),
        [wire_name("allreduce_gradient")],
        _require_linear(op, "allreduce"),
        float(op.get_attr("prescale")),
        float(op.get_attr("postscale")),
        op.get_attr("process_set"),
    )


@tf.RegisterGradient("DadAllOrNone")
def _all_or_none_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    return list(grads)


# allgather


@collective
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The ranks' tensors one after the other; their first dimensions may differ."""
    wire = wire_name("allgather", name, ignore_name_scope)
    return raw_allgather(_tensors([tensor]), [wire], set_id(process_set))[0]


@collective
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """allgather of several tensors that are gathered together or not at all."""
    wire = wire_name("grouped_allgather", name, ignore_name_scope)
    return raw_allgather(_tensors(tensors), [wire], set_id(process_set))


@tf.RegisterGradient("DadAllgather")
@collective
def _allgather_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    process_set = op.get_attr("process_set")
    rank = _core.process_set_ranks(process_set).index(_core.rank())
    grads = _gradients(op, grads)
    reduced = raw_allreduce(grads, [wire_name("allgather_gradient")], Average, process_set=process_set)
    rows = tf.stack([tf.shape(tensor, out_type=tf.int64)[0] for tensor in op.inputs])
    (all_rows,) = raw_allgather([rows[tf.newaxis]], [wire_name("allgather_gradient_rows")], process_set)
    first = tf.reduce_sum(all_rows[:rank], axis=0)
    return [
        whole[first[i] : first[i] + all_rows[rank, i]] for i, whole in enumerate(reduced)
    ]  # this rank's rows


# broadcast


@collective
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's tensor, on all ranks. root_rank is a global rank."""
    wire = wire_name("broadcast", name, ignore_name_scope)
    return _raw_broadcast(_tensors([tensor]), [wire], root_rank, set_id(process_set))[0]


@tf.RegisterGradient("DadBroadcast")
@collective
def _broadcast_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    reduced = raw_allreduce(
        _gradients(op, grads),
        [wire_name("broadcast_gradient")],
        Average,
        process_set=op.get_attr("process_set"),
    )
    if _core.rank() == op.get_attr("root_rank"):
        return reduced
    return [tensor * 0 for tensor in reduced]


@collective
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gives the variables the root's values, in place; returns their values."""
    variables = [resource(variable) for variable in variables]
    operations = broadcast_in_place(variables, root_rank, name, process_set)
    with tf.control_dependencies(operations):
        return [variable.read_value() for variable in variables]


def resource(variable: Any) -> Any:
    """The tf.Variable of a variable of Keras 3, or what it is itself."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


@collective
def broadcast_in_place(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The ops that give the variables the root's values; none in eager mode, where it has been done."""
    variables = [resource(variable) for variable in variables]
    if not all(hasattr(variable, "assign") for variable in variables):
        raise ValueError("only variables can be broadcast in place")
    resources = [v for v in variables if getattr(v, "handle", None) is not None]
    references = [v for v in variables if getattr(v, "handle", None) is None]  # only in graphs of TF1
    base = name or "broadcast_variables"
    operations = [
        v.assign(broadcast(v, root_rank, f"{base}.{v.op.name}", process_set=process_set)) for v in references
    ]
    if resources:
        operation = lib.dad_broadcast_variables(
            resources=[variable.handle for variable in resources],
            names=[wire_name(base, f"{base}.{i}.{v.name}") for i, v in enumerate(resources)],
            root_rank=root_rank,
            process_set=set_id(process_set),
            user_waits=is_eager(),
        )
        keep_names()
        operations.append(operation)
    return [] if is_eager() else operations


# alltoall


@collective
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends splits[i] rows to rank i. Returns the rows received and, where splits are given, how many
    came from each rank."""
    (tensor,) = _tensors([tensor])
    rows = tf.constant([], tf.int32) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    wire = wire_name("alltoall", name, ignore_name_scope)
    received, received_splits = _raw_alltoall(tensor, rows, wire, set_id(process_set))
    return received if splits is None else (received, received_splits)


@tf.RegisterGradient("DadAlltoall")
@collective
def _alltoall_gradient(op: Any, grad: Any, _: Any) -> list[Any]:
    back, _ = _raw_alltoall(
        tf.convert_to_tensor(grad), op.outputs[1], wire_name("alltoall_gradient"), op.get_attr("process_set")
    )
    return [back, None]


# reducescatter


@collective
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduced tensor; the lowest ranks get one more where they do not divide
    evenly."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(
        [tensor], device_dense, compression, op, name, process_set, ignore_name_scope, scales
    )[0]


@collective
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[tf.Tensor]:
    """reducescatter of several tensors that are reduced together or not at all."""
    if not tensors:
        return list(tensors)
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, device_dense, compression, op, name, process_set, False, scales)


def _reducescatter(
    tensors: Sequence[Any],
    device: str,
    compression: Any,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    scales: tuple[float, float],
) -> list[tf.Tensor]:
    with tf.device(device):
        chosen = compressor(compression, name or "")
        compressed = [chosen.compress(tensor) for tensor in _tensors(tensors)]
        scattered = _raw_reducescatter(
            [tensor for tensor, _ in compressed],
            [wire_name("reducescatter", name, ignore_name_scope)],
            reduce_op(op),
            *scales,
            set_id(process_set),
        )
        return [chosen.decompress(t, context) for t, (_, context) in zip(scattered, compressed, strict=True)]


@tf.RegisterGradient("DadReducescatter")
@collective
def _reducescatter_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    process_set = op.get_attr("process_set")
    factor = float(op.get_attr("prescale")) * float(op.get_attr("postscale"))
    if _require_linear(op, "reducescatter") == Sum:
        factor *= _set_size(process_set)
    scaled = [grad * tf.cast(factor, grad.dtype) for grad in _gradients(op, grads)]
    return raw_allgather(scaled, [wire_name("reducescatter_gradient")], process_set)


# join, barrier and the world as ops


@collective
def join() -> tf.Tensor:
    """This rank has no more data: until all ranks have joined it takes part in the others' collectives
    with zeros. Returns the last rank to join."""
    if is_eager():
        prepare_join()
    return lib.dad_join(user_waits=is_eager())


@collective
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Returns when all ranks have come here. In a graph it is an op."""
    return lib.dad_barrier(process_set=set_id(process_set), user_waits=is_eager())


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks, asked when the graph runs."""
    return lib.dad_size(process_set=process_set_id, name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """The rank, asked when the graph runs."""
    return lib.dad_rank(name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, asked when the graph runs."""
    return lib.dad_local_size(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The rank on this host, asked when the graph runs."""
    return lib.dad_local_rank(name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 or 0: whether this rank is in the set, asked when the graph runs. Negative: before init(), or there
    is no such set."""
    return lib.dad_process_set_included(process_set=process_set_id, name=name)


for _op in ("DadBroadcastVariables", "DadJoin", "DadBarrier", "DadRank", "DadSize", "DadLocalRank"):
    tf.no_gradient(_op)
for _op in ("DadLocalSize", "DadProcessSetIncluded"):
    tf.no_gradient(_op)
