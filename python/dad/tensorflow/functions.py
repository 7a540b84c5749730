"""Bringing all ranks to the same state: variables, any object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from dad.basics import rank
from dad.process_sets import ProcessSet, global_process_set
from dad.tensorflow.gradients import variable_name
from dad.tensorflow.graph import is_eager, plain
from dad.tensorflow.ops import allgather, broadcast, broadcast_in_place
from dad.tensorflow.replicas import expect


@plain
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives all ranks the values of one rank's variables.

    Args:
        variables: tf.Variable or variables of Keras.
        root_rank: whose values they are.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake: variables are written in place where nobody else reads
            their memory.

    Returns:
        None; in a graph of TF1 the op that does it.

    Raises:
        ValueError: one of them is not a variable.

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    variables = list(variables)
    operations = broadcast_in_place(variables, root_rank, process_set=process_set)
    if process_set is global_process_set:
        # A variable that is broadcast should be equal on all ranks.
        expect((variable_name(one, i), one) for i, one in enumerate(variables))
    return None if is_eager() else tf.group(*operations)


@plain
def broadcast_global_variables(root_rank: int) -> Any:
    """In a graph of TF1, gives all ranks the values of one rank's global variables.

    Args:
        root_rank: whose values they are.

    Returns:
        the op that does it.

    Raises:
        RuntimeError: it was called in eager mode.

    Example::

        session.run(hvd.broadcast_global_variables(0))
    """
    if is_eager():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook of TF1's MonitoredSession: all ranks start with the root's variables.

    Args:
        root_rank: whose values they are.
        device: where the op is placed.

    Example::

        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            session.run(train_op)
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def _to_bytes(obj: Any) -> np.ndarray:
    return np.frombuffer(cloudpickle.dumps(obj), dtype=np.uint8)


def _value(tensor: Any, session: Any) -> np.ndarray:
    if is_eager():
        return tensor.numpy()
    session = session or tf.compat.v1.get_default_session()
    if session is None:
        raise ValueError("in a graph of TF1 give session=, or call it within one")
    return session.run(tensor)


@plain
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives all ranks the object of one of them; it travels pickled.

    Args:
        obj: anything that cloudpickle takes. On the other ranks it is not looked at.
        root_rank: whose object it is.
        session: in a graph of TF1, the session. None: the default session.
        name: of the collective, the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        the root's object.

    Example::

        settings = hvd.broadcast_object(settings, root_rank=0)
    """
    # Not the type of obj, as in Horovod: ranks that have only None to give would use another name.
    name = name or "broadcast_object"
    is_root = rank() == root_rank
    data = _to_bytes(obj) if is_root else np.empty(0, np.uint8)
    count = broadcast(np.array([data.size]), root_rank, f"{name}.size", process_set=process_set)
    count = int(_value(count, session)[0])
    if not is_root:
        data = np.empty(count, np.uint8)
    data = _value(broadcast(data, root_rank, f"{name}.data", process_set=process_set), session)
    return obj if is_root else cloudpickle.loads(data.tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """In a graph of TF1, broadcast_object() as a function that adds its ops only once.

    Args:
        root_rank: whose object it is.
        session: in a graph of TF1, the session. None: the default session.
        name: of the collective, the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        a function that takes an object and returns the root's.

    Example::

        send = hvd.broadcast_object_fn(session=session)
        settings = send(settings)
    """
    name = name or "broadcast_object_fn"
    v1 = tf.compat.v1
    with v1.get_default_graph().as_default():
        count = v1.placeholder(tf.int64, [1], name="bcast_object_size")
        data = v1.placeholder(tf.uint8, [None], name="bcast_object_data")
        sent_count = broadcast(count, root_rank, f"{name}.size", process_set=process_set)
        sent_data = broadcast(data, root_rank, f"{name}.data", process_set=process_set)
    session = session or v1.get_default_session()

    def send(obj: Any) -> Any:
        is_root = rank() == root_rank
        mine = _to_bytes(obj) if is_root else np.empty(0, np.uint8)
        (size,) = session.run(sent_count, feed_dict={count: [mine.size]})
        if not is_root:
            mine = np.empty(size, np.uint8)
        received = session.run(sent_data, feed_dict={data: mine})
        return obj if is_root else cloudpickle.loads(received.tobytes())

    return send


@plain
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives all ranks the objects of all of them; they travel pickled.

    Args:
        obj: anything that cloudpickle takes.
        session: in a graph of TF1, the session. None: the default session.
        name: of the collective, the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        the list of objects, by rank.

    Example::

        hosts = hvd.allgather_object(socket.gethostname())
    """
    name = name or "allgather_object"
    data = _to_bytes(obj)
    counts = _value(allgather(np.array([data.size]), f"{name}.size", process_set=process_set), session)
    everything = _value(allgather(data, f"{name}.data", process_set=process_set), session)
    ends = np.cumsum(counts)
    return [cloudpickle.loads(piece.tobytes()) for piece in np.split(everything, ends[:-1])]
