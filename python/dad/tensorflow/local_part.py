"""A fragment of a model in TensorFlow: its weights, and how their changes travel between ranks.

The changes go the way of gradients, by a reducer of their own, in eager mode and on a thread, so that
training goes on while they are in flight. Its variables are not those of the model but stand-ins that hold
the common weights of the round; the change of a weight is the gradient of its stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from dad.basics import Average, Sum
from dad.process_sets import ProcessSet
from dad.state.state_bytes import from_bytes, to_bytes
from dad.tensorflow.gradients import GradientReducer, variable_names
from dad.tensorflow.ops import allreduce, broadcast, resource

Tensors = list[Any]


class TensorFlowPart:
    """See dad.local_steps.rounds.Part."""

    def __init__(
        self,
        variables: Sequence[Any],
        compression: Any,
        name: str,
        stream: int,
        process_set: ProcessSet,
        settings_of_optimizer: Callable[[], dict[str, str]],
    ) -> None:
        self.name = f"tensorflow.{stream}"
        self._process_set = process_set
        self._variables = [resource(variable) for variable in variables]
        self._names = variable_names(variables)
        self._stand_ins = [
            tf.Variable(variable.read_value(), trainable=False, name=name)
            for variable, name in zip(self._variables, self._names, strict=True)
        ]
        self._reducer = GradientReducer(
            name, compression, sparse_as_dense=True, op=Average, process_set=process_set, stream=stream
        )
        self._reducer.settings_of_optimizer = settings_of_optimizer
        # One thread for the changes, one for the number of samples.
        self._threads = ThreadPoolExecutor(2, "dad local steps")
        self._changes: Future[Tensors] | None = None
        self._samples: Future[float] | None = None

    def weights(self) -> Tensors:
        return [variable.read_value() for variable in self._variables]

    def assign(self, values: Tensors) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def hold(self, values: Tensors) -> Tensors:
        for stand_in, value in zip(self._stand_ins, values, strict=True):
            stand_in.assign(value)
        return [stand_in.read_value() for stand_in in self._stand_ins]

    def copy(self, values: Tensors) -> Tensors:
        return list(values)  # tensors do not change

    def tensor(self, array: Any) -> Any:
        return tf.convert_to_tensor(array)

    def note_step(self) -> None:
        """Methods that look at the variance of a change have one sample of it."""

    def send(self, changes: Tensors) -> None:
        self._changes = self._threads.submit(self._reduce, changes)

    def _reduce(self, changes: Tensors) -> Tensors:
        return list(self._reducer(changes, self._stand_ins))

    def receive(self) -> Tensors:
        return self._changes.result()

    def send_samples(self, samples: float) -> None:
        self._samples = self._threads.submit(self._sum, samples)

    def _sum(self, samples: float) -> float:
        total = allreduce(
            tf.constant(samples, tf.float64),
            op=Sum,
            name=f"local_steps.samples.{self.name}",
            process_set=self._process_set,
        )
        return float(total)

    def receive_samples(self) -> float:
        return self._samples.result()

    def broadcast(self, values: Tensors, root: int) -> Tensors:
        root_rank = self._process_set.ranks[root]
        return [
            broadcast(value, root_rank, f"local_steps.{name}", process_set=self._process_set)
            for name, value in zip(self._names, values, strict=True)
        ]

    def doubt(self) -> None:
        """The common weights are sent anew with the next round; the reducer compares where ranks may have
        parted by itself."""

    def plan(self) -> list[dict[str, Any]]:
        return self._reducer.plan()

    def save(self) -> dict[str, Any]:
        data = self._reducer.save_state()
        return from_bytes(data) if data else {}

    def load(self, saved: dict[str, Any]) -> None:
        if saved:
            self._reducer.load_state(to_bytes(saved))


class BatchCounter:
    """Counts batches and their samples where a model runs as a graph: they are added up in a variable."""

    def __init__(self) -> None:
        self._sums: tf.Variable | None = None
        self._taken = [0, 0]

    def count(self, outputs: Any) -> None:
        """outputs: of a batch, one row for each sample."""
        if self._sums is None:
            with tf.init_scope():
                self._sums = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="dad_batches")
        rows = tf.cast(tf.shape(outputs)[0], tf.int64)
        self._sums.assign_add(tf.stack([tf.ones_like(rows), rows]))

    def take(self) -> tuple[int, int]:
        """How many batches, and samples, there were since the last call."""
        if self._sums is None:
            return 0, 0
        before, self._taken = self._taken, self._sums.numpy().tolist()
        return self._taken[0] - before[0], self._taken[1] - before[1]


def around(
    begin: Callable[[], None],
    apply: Callable[[], Any],
    done: Callable[[], None],
    variables: Sequence[Any],
) -> Any:
    """A step, with Python before and after it, also in a graph of the user's own."""
    if tf.executing_eagerly():
        begin()
        result = apply()
        done()
        return result
    with tf.control_dependencies([tf.py_function(begin, [], [])]):
        result = apply()
    # What reads the variables comes after what has written them.
    written = [resource(variable).read_value() for variable in variables]
    with tf.control_dependencies(written):
        tf.py_function(done, [], [])
    return result
