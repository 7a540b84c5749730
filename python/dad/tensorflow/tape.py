"""DistributedGradientTape: tf.GradientTape whose gradient() is reduced over the ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from dad.arguments import gradient_groups, weights_of
from dad.basics import Average
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow.factors.eager_capture import captured
from dad.tensorflow.factors.find import Recorder
from dad.tensorflow.gradients import GradientReducer, variable_names
from dad.tensorflow.graph import is_eager, plain
from dad.tensorflow.ops import resource
from dad.tensorflow.replicas import expect


class _DistributedTape:
    """What is put in front of the user's tape class."""

    _dad: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._dad.register_local(source)

    @plain
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The gradients of `target`, reduced over the ranks; in the structure of `sources`."""
        flat = tf.nest.flatten(sources)
        variables = [resource(source) for source in flat]
        recorder = captured()
        listens = self._dad.has_methods and is_eager() and recorder is None
        with Recorder() if listens else contextlib.nullcontext(recorder) as recorder:
            gradients = super().gradient(  # type: ignore[misc]
                target, variables, output_gradients, **kwargs
            )
        # What else the loss depends on is part of the model, and somebody should train it.
        watched = self.watched_variables()  # type: ignore[attr-defined]
        expect(zip(variable_names(watched), watched, strict=True))
        return tf.nest.pack_sequence_as(sources, self._dad(gradients, flat, recorder=recorder))

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor that has been reduced: what is sent for it, and why."""
        return self._dad.plan()

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """(variable, gradient) pairs: of the variables that are local to this rank, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._dad.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._dad.is_local(pair[0])]


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes the gradient() of a tape return gradients that are reduced over the ranks.

    The result is an instance of a subclass of the tape's own class.

    Args:
        gradtape: a tf.GradientTape.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        sparse_as_dense: sends tf.IndexedSlices as dense tensors.
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the ranks that take part.
        scale_local_gradients: divides the gradients of local sources (register_local_source()) by the
            number of ranks.

    Returns:
        the tape.

    Raises:
        ValueError: an argument is not possible, or the tape is distributed already.

    Example::

        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(inputs))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("this tape is a DistributedGradientTape already")
    groups = gradient_groups(op, gradient_predivide_factor, num_groups, groups)
    reducer = GradientReducer(
        "DistributedGradientTape",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
        scale_local_gradients,
        device_dense,
        device_sparse,
    )
    cls = type(gradtape)
    tape = object.__new__(type(cls.__name__, (_DistributedTape, cls), {"__module__": cls.__module__}))
    tape.__dict__.update(vars(gradtape))
    tape._dad = reducer
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A DistributedGradientTape that leaves the gradients of some layers as they are.

    The other arguments, the result and the errors are those of DistributedGradientTape().

    Args:
        gradtape: a tf.GradientTape.
        device_dense: where dense tensors are reduced, as tf.device() takes it.
        device_sparse: where tf.IndexedSlices are gathered.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        sparse_as_dense: sends tf.IndexedSlices as dense tensors.
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the ranks that take part.
        local_layers: a layer of Keras, or several: their gradients stay on this rank.
        scale_local_gradients: divides them by the number of ranks.

    Example::

        tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    """
    local_weights = weights_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local_weights:
        tape.register_local_source(variable)
    return tape
