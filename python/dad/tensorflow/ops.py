"""The collectives: Horovod's names and argument order, in eager mode, in tf.function and in graphs of TF1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad.arguments import reduce_op, set_id
from dad.basics import Adasum, Average, Sum
from dad.local_steps.joining import prepare_join
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow._load import lib
from dad.tensorflow.compression import Compression, compressor
from dad.tensorflow.graph import collective, is_eager, keep_names, wire_name
from dad.tensorflow.raw_ops import (
    raw_allgather,
    raw_allreduce,
    raw_alltoall,
    raw_broadcast,
    raw_reducescatter,
    set_size,
)


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
    """Reduces a tensor over the ranks, by default to their mean.

    Of tf.IndexedSlices the result has the slices of all ranks.

    Args:
        tensor: a tensor, or tf.IndexedSlices.
        average: deprecated: use `op`.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Adasum, Min, Max or Product. None: Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.

    Returns:
        a tensor of the same shape and dtype, with the same bits on all ranks.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        mean = hvd.allreduce(loss, name="loss")
    """
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
    divisor = (set_size(process_set) if op == Average else 1) / (prescale * postscale)
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
    """Reduces several tensors, which travel together, over the ranks.

    They are reduced together or not at all.

    Args:
        tensors: tensors or tf.IndexedSlices.
        average: deprecated: use `op`.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Adasum, Min, Max or Product. None: Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.

    Returns:
        the list of results.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        losses, counts = hvd.grouped_allreduce([losses, counts], name="metrics")
    """
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


# allgather


@collective
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Joins the ranks' tensors along their first dimension, in the order of ranks.

    Args:
        tensor: the first dimension may differ between ranks, and may be 0.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        process_set: the ranks that take part.

    Returns:
        all rows, on every rank.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        predictions = hvd.allgather(predictions)
    """
    wire = wire_name("allgather", name, ignore_name_scope)
    return raw_allgather(_tensors([tensor]), [wire], set_id(process_set))[0]


@collective
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gathers several tensors, which travel together.

    Args:
        tensors: at least one; first dimensions may differ between ranks.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        process_set: the ranks that take part.

    Returns:
        the list of results.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        inputs, labels = hvd.grouped_allgather([inputs, labels])
    """
    wire = wire_name("grouped_allgather", name, ignore_name_scope)
    return raw_allgather(_tensors(tensors), [wire], set_id(process_set))


# broadcast


@collective
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Gives every rank the tensor of one of them.

    Args:
        tensor: has the same shape and dtype on all ranks.
        root_rank: whose tensor it is, as a rank of the job.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        process_set: the ranks that take part.

    Returns:
        the root's tensor.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        seed = hvd.broadcast(seed, root_rank=0)
    """
    wire = wire_name("broadcast", name, ignore_name_scope)
    return raw_broadcast(_tensors([tensor]), [wire], root_rank, set_id(process_set))[0]


@collective
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gives every rank the values of one rank's variables, in place.

    Args:
        variables: tf.Variable or variables of Keras.
        root_rank: whose values they are.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        process_set: the ranks that take part.

    Returns:
        the values of the variables.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        hvd.broadcast_(model.variables, root_rank=0)
    """
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
    """Sends some rows of a tensor to each rank.

    Args:
        tensor: has at least one dimension.
        splits: how many rows go to each rank. None: the same number to all.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        process_set: the ranks that take part.

    Returns:
        the rows received, in the order of ranks; with `splits` also how many came from each rank.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        rows, counts = hvd.alltoall(tensor, splits=[1, 3])  # on two ranks
    """
    (tensor,) = _tensors([tensor])
    rows = tf.constant([], tf.int32) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    wire = wire_name("alltoall", name, ignore_name_scope)
    received, received_splits = raw_alltoall(tensor, rows, wire, set_id(process_set))
    return received if splits is None else (received, received_splits)


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
    """Reduces a tensor over the ranks and gives every rank some of its rows.

    Args:
        tensor: has at least one dimension.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Min, Max or Product.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name stands alone, without the name scope of the graph.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        this rank's rows. Where they do not divide evenly, the lowest ranks get one more.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        mine = hvd.reducescatter(tensor, op=hvd.Sum)
    """
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
    """Reduces and scatters several tensors, which travel together.

    Args:
        tensors: of which every rank gets some rows.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        compression: none, fp16 or bf16: how the tensor travels.
        op: Average, Sum, Min, Max or Product.
        name: of the tensor in errors, timelines and stats(), the same on all ranks. None: the
            function's name and a number, or the order of the calls.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        the list of this rank's rows.

    Raises:
        ValueError: an argument is not possible. What only the op can see is a
            tf.errors.InvalidArgumentError.
        tf.errors.FailedPreconditionError: ranks have passed different shapes, dtypes or options.
        tf.errors.UnknownError: a rank was lost.

    Example::

        mine = hvd.grouped_reducescatter([first, second])
    """
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
        scattered = raw_reducescatter(
            [tensor for tensor, _ in compressed],
            [wire_name("reducescatter", name, ignore_name_scope)],
            reduce_op(op),
            *scales,
            set_id(process_set),
        )
        return [chosen.decompress(t, context) for t, (_, context) in zip(scattered, compressed, strict=True)]


# join, barrier and the world as ops


@collective
def join() -> tf.Tensor:
    """Says that this rank has no more data, and waits until all ranks have said so.

    Until then it takes part in the collectives of the other ranks with zeros or without rows. The result is
    the last rank to join.
    """
    if is_eager():
        prepare_join()
    return lib.dad_join(user_waits=is_eager())


@collective
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Returns when all ranks have come here; in a graph it is an op.

    Args:
        process_set: the ranks that take part.

    Returns:
        the op, in a graph.

    Raises:
        tf.errors.UnknownError: a rank was lost.

    Example::

        hvd.barrier()
    """
    return lib.dad_barrier(process_set=set_id(process_set), user_waits=is_eager())


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks, asked when the graph runs.

    Args:
        process_set_id: the id of a process set.
        name: of the op.

    Returns:
        a scalar of int32.

    Example::

        number = hvd.size_op()
    """
    return lib.dad_size(process_set=process_set_id, name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """The rank, asked when the graph runs.

    Args:
        name: of the op.

    Returns:
        a scalar of int32.

    Example::

        number = hvd.rank_op()
    """
    return lib.dad_rank(name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, asked when the graph runs.

    Args:
        name: of the op.

    Returns:
        a scalar of int32.

    Example::

        number = hvd.local_size_op()
    """
    return lib.dad_local_size(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The rank on this host, asked when the graph runs.

    Args:
        name: of the op.

    Returns:
        a scalar of int32.

    Example::

        number = hvd.local_rank_op()
    """
    return lib.dad_local_rank(name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set, asked when the graph runs.

    Args:
        process_set_id: the id of a process set.
        name: of the op.

    Returns:
        1 or 0; negative before init(), or if there is no such set.

    Example::

        included = hvd.process_set_included_op(even.process_set_id)
    """
    return lib.dad_process_set_included(process_set=process_set_id, name=name)
