"""DistributedOptimizer: for optimizers of Keras 3, of tf_keras, and of tf.compat.v1.train."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dad.arguments import gradient_groups, require_model
from dad.basics import Adasum, Average
from dad.local_steps.outer import Outer
from dad.local_steps.settings import resolve as resolve_local_steps
from dad.methods.momentum import require_plain_optimizer
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow.gradients import GradientReducer, new_stream
from dad.tensorflow.v1_delta_optimizer import DistributedDeltaOptimizer
from dad.tensorflow.v1_optimizer import DistributedV1Optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    model: Any = None,
    local_steps: int | str = 1,
    outer: Outer | None = None,
    fragments: int = 1,
    delay: int = 0,
) -> Any:
    """Makes an optimizer use gradients that are reduced over the ranks.

    Args:
        optimizer: of Keras 3, tf_keras or tf.compat.v1.train.
        name: of the new optimizer.
        use_locking: as of optimizers of tf.compat.v1.train.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        sparse_as_dense: sends tf.IndexedSlices as dense tensors.
        backward_passes_per_step: gradients of so many calls add up locally before they are reduced and
            applied.
        op: Average, Sum, and for optimizers of tf.compat.v1 also Adasum, which combines the changes
            that the ranks' own steps make, not the gradients.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        average_aggregated_gradients: divides by backward_passes_per_step.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the ranks that take part.
        scale_local_gradients: divides the gradients of local variables by the number of ranks.
        model: what is trained; gradients of other variables are an error then. With an optimizer of
            Keras, factors of its layers are found where Keras runs eagerly, too.
        local_steps, outer, fragments, delay: with an optimizer of Keras 3, as of
            dad.keras.DistributedOptimizer.

    Returns:
        the optimizer.

    Raises:
        ValueError: an argument is not possible, or not for this kind of optimizer.

    Example::

        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size()))
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from dad.tensorflow.keras import DistributedOptimizer as KerasOptimizer

        return KerasOptimizer(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            model=model,
            local_steps=local_steps,
            outer=outer,
            fragments=fragments,
            delay=delay,
        )
    if resolve_local_steps(local_steps, outer, fragments, delay).is_on:
        raise ValueError("local steps need an optimizer of Keras 3; this one is of tf.compat.v1.train")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("op=Adasum does not work with average_aggregated_gradients=True")
    groups = gradient_groups(op, gradient_predivide_factor, num_groups, groups)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    reducer = GradientReducer(
        name or f"Distributed{type(optimizer).__name__}",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
        scale_local_gradients,
        device_dense,
        device_sparse,
        new_stream(process_set),
        require_model(model),
    )
    require_plain_optimizer(reducer.compression, optimizer)
    cls = DistributedDeltaOptimizer if op == Adasum else DistributedV1Optimizer
    return cls(optimizer, name, use_locking, reducer, backward_passes_per_step, average_aggregated_gradients)
