"""The ops of dad's library on lists of tensors, and their gradients.

Gradients are Horovod's: that of allgather and broadcast is the mean over ranks, that of reducescatter with
Average is the gathered gradient and with Sum is `size` times that.

`names` has one name for all tensors, which then travel together or not at all, or one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dad._lib import _core
from dad.basics import Average, Sum
from dad.tensorflow._load import lib
from dad.tensorflow.graph import collective, is_eager, run_any_time, wire_name


def set_size(number: int) -> int:
    return len(_core.process_set_ranks(number))


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


def raw_reducescatter(
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


def raw_broadcast(
    tensors: Sequence[tf.Tensor], names: Sequence[str], root_rank: int, process_set: int
) -> list[tf.Tensor]:
    sent = lib.dad_broadcast(
        tensors=tensors, names=names, root_rank=root_rank, process_set=process_set, user_waits=is_eager()
    )
    run_any_time(sent)
    return list(sent)


def raw_alltoall(
    tensor: tf.Tensor, splits: tf.Tensor, name: str, process_set: int
) -> tuple[tf.Tensor, tf.Tensor]:
    received, received_splits = lib.dad_alltoall(
        tensor=tensor, splits=splits, names=[name], process_set=process_set, user_waits=is_eager()
    )
    run_any_time([received])
    return received, received_splits


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


@tf.RegisterGradient("DadAllgather")
@collective
def _allgather_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    process_set = op.get_attr("process_set")
    rank = _core.process_set_ranks(process_set).index(_core.rank())
    dense = _gradients(op, grads)
    reduced = raw_allreduce(dense, [wire_name("allgather_gradient")], Average, process_set=process_set)
    rows = tf.stack([tf.shape(tensor, out_type=tf.int64)[0] for tensor in op.inputs])
    (all_rows,) = raw_allgather([rows[tf.newaxis]], [wire_name("allgather_gradient_rows")], process_set)
    first = tf.reduce_sum(all_rows[:rank], axis=0)
    return [
        whole[first[i] : first[i] + all_rows[rank, i]] for i, whole in enumerate(reduced)
    ]  # this rank's rows


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


@tf.RegisterGradient("DadAlltoall")
@collective
def _alltoall_gradient(op: Any, grad: Any, _: Any) -> list[Any]:
    back, _ = raw_alltoall(
        tf.convert_to_tensor(grad), op.outputs[1], wire_name("alltoall_gradient"), op.get_attr("process_set")
    )
    return [back, None]


@tf.RegisterGradient("DadReducescatter")
@collective
def _reducescatter_gradient(op: Any, *grads: Any) -> list[tf.Tensor]:
    process_set = op.get_attr("process_set")
    factor = float(op.get_attr("prescale")) * float(op.get_attr("postscale"))
    if _require_linear(op, "reducescatter") == Sum:
        factor *= set_size(process_set)
    scaled = [grad * tf.cast(factor, grad.dtype) for grad in _gradients(op, grads)]
    return raw_allgather(scaled, [wire_name("reducescatter_gradient")], process_set)


for _op in ("DadBroadcastVariables", "DadJoin", "DadBarrier", "DadRank", "DadSize", "DadLocalRank"):
    tf.no_gradient(_op)
for _op in ("DadLocalSize", "DadProcessSetIncluded"):
    tf.no_gradient(_op)
