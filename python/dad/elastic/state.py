"""State and ObjectState: what a job continues from when ranks join and leave. They are used as in Horovod;
sync.py describes what is different inside."""

from __future__ import annotations

import json
import os
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dad import basics
from dad._lib import _core
from dad.elastic.commits import Commits, Snapshot
from dad.elastic.handlers import ForeignHandler, Handler, StateHandler, copied
from dad.elastic.residuals import norm_of, total_of
from dad.elastic.snapshot import digest
from dad.elastic.wire import HostUpdateResult
from dad.errors import HostsUpdatedInterrupt
from dad.state.kept import Tensors


class Update(NamedTuple):
    """What the launcher has announced, and when it arrived."""

    timestamp: int
    result: HostUpdateResult
    came_at: float


def member_name() -> str:
    """The name of this process among all processes that were ever in the job; made once."""
    global _member
    if _member is None or _member[0] != os.getpid():
        where = os.environ.get("DAD_HOSTNAME") or os.environ.get("HOROVOD_HOSTNAME") or "?"
        slot = os.environ.get("DAD_LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK") or "?"
        _member = os.getpid(), f"{where}[{slot}] {secrets.token_hex(6)}"
    return _member[1]


_member: tuple[int, str] | None = None


def exchange(name: str, mine: Any) -> list[Any]:
    """What every rank says, in rank order; it travels as JSON."""
    data = json.dumps(mine).encode()
    if not _core.is_initialized() or _core.size() == 1:
        return [json.loads(data)]
    return [json.loads(one) for one in _core.gather_bytes(f"elastic.{name}", data, 0)]


class State:
    """What is saved, restored and synchronized when the ranks of a job change.

    Derive from it to handle objects of your own, or use ObjectState, TorchState and the like.

    Args:
        bcast_object: gives all ranks rank 0's object; for derived classes, dad's own do not need it.
        get_rank: the rank of this process; likewise.

    Example::

        class MyState(hvd.elastic.State):
            def save(self): ...
            def restore(self): ...
            def sync(self): ...
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank or basics.rank
        self._host_messages: queue.Queue[Update] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Registers functions to call after the ranks have changed and before their states are synchronized,
        for example to change the learning rate with the number of ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: called on those that were already there."""
        known_at = basics.place_taken_at()
        later = [message for message in self._drained() if message.came_at > known_at]
        for message in later:  # the launcher did not know of them when it made this round
            self._host_messages.put(message)
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """The launcher announces that hosts were added or removed; on a thread of its own."""
        self._host_messages.put(Update(timestamp, update_res, time.monotonic()))

    def commit(self) -> None:
        """Saves the state and checks whether hosts have changed; raises HostsUpdatedInterrupt on all ranks if
        so. All ranks call it at the same point. It copies the state, so calling it after every batch may cost
        too much."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if the launcher has told one of them that hosts have
        changed. All ranks call it at the same point."""
        self._check(exchange("updates", self._say()))

    def _say(self) -> dict[str, Any]:
        """What this rank tells the others at the check."""
        # The launcher counts in seconds: two changes may have the same time.
        messages = [one for one in self._drained() if one.timestamp >= self._last_updated_timestamp]
        result = HostUpdateResult.no_update
        for message in messages:
            result |= message.result
        newest = max([self._last_updated_timestamp, *(one.timestamp for one in messages)])
        return {"newest": newest, "messages": len(messages), "result": int(result)}

    def _check(self, said: Sequence[dict[str, Any]]) -> None:
        self._last_updated_timestamp = max(one["newest"] for one in said)
        if any(one["messages"] for one in said):
            result = HostUpdateResult.no_update
            for one in said:
                result |= HostUpdateResult(one["result"])
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    def _drained(self) -> list[Update]:
        messages = []
        while not self._host_messages.empty():
            messages.append(self._host_messages.get())
        return messages

    # For run()

    def before_leaving(self) -> None:
        """All ranks have agreed to make a new round, and all are still there."""

    @property
    def synchronizes_always(self) -> bool:
        """Whether sync() is called even if only removed ranks are missing, in which case Horovod leaves it
        out."""
        return False

    # For derived classes

    def save(self) -> None:
        """Copies the state to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the same state."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed; sync() follows."""


class ObjectState(State):
    """The state of Python objects, each an attribute of its own.

    save() copies the values; to other ranks they travel pickled.

    Args:
        bcast_object: gives all ranks rank 0's object; for derived classes, dad's own do not need it.
        get_rank: the rank of this process; likewise.
        **kwargs: the attributes and their first values.

    Example::

        state = hvd.elastic.ObjectState(epoch=0)
        state.epoch += 1
        state.commit()
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        if "_handlers" not in self.__dict__:
            self._handlers: dict[str, Handler] = {}
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object, get_rank)
        self._commits = Commits(self._snapshot())
        self._inits = basics.num_inits()  # when the kept parts were where the snapshots say
        self._left_in_order = False
        self._totals: dict[str, Tensors] | None = None

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}
        self._commits.add(self._snapshot())

    def restore(self) -> None:
        self._left_in_order = False  # a rank was lost, perhaps while all were leaving
        self._take(self._commits[self._commits.newest])

    def sync(self) -> None:
        """Gives all ranks the state of a rank that has it: the state of the last commit, if ranks have joined
        and left. Raises LostStateError if the job must not continue without the ranks that are gone
        (sync.py)."""
        from dad.elastic.sync import synchronize

        synchronize(self)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.on_reset()

    def before_leaving(self) -> None:
        """Saves what the ranks have now, and adds up what they kept of gradients for later steps, because
        nobody knows yet which ranks will be there."""
        self._commits.add(self._snapshot())
        kept = self._commits[self._commits.newest].kept
        totals = {}
        for name in sorted(name for name, handler in self._handlers.items() if handler.can_carry):
            saved = kept[name]
            said = exchange("keeps", None if saved is None else bool(saved["states"] or saved["kept"]))
            if saved is not None and None not in said and any(said):
                totals[name] = total_of(saved, _core.rank(), _core.size())
        self._totals = totals
        self._left_in_order = True

    @property
    def synchronizes_always(self) -> bool:
        return True

    def _say(self) -> dict[str, Any]:
        newest = self._commits.newest
        pending = newest > self._commits.confirmed
        norm = self._norm() if pending else self._commits.norms.get(member_name(), 0.0)
        return {**super()._say(), "version": newest, "member": member_name(), "norm": norm}

    def _check(self, said: Sequence[dict[str, Any]]) -> None:
        if {one["version"] for one in said} == {self._commits.newest} and self._commits.newest > 0:
            place = (_core.rank(), _core.size()) if _core.is_initialized() else (0, 1)
            norms = {one["member"]: one["norm"] for one in said}
            self._commits.confirm(self._commits.newest, [one["member"] for one in said], norms, place)
        super()._check(said)

    def _norm(self) -> float:
        """The norm of this rank's kept parts, at its newest version."""
        norms = [norm_of(saved) for saved in self._commits[self._commits.newest].kept.values()]
        return float(sum(norm * norm for norm in norms) ** 0.5)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            {name: copied(getattr(self, name)) for name in self._saved_state},
            {name: handler.capture() for name, handler in self._handlers.items()},
            {name: handler.kept() for name, handler in self._handlers.items()},
        )

    def digest_of(self, part: Any) -> str:
        """The digest of a part of a snapshot."""
        return digest(part, self._as_array)

    def _as_array(self, leaf: Any) -> np.ndarray | None:
        """The memory of a tensor of a framework; None for anything else."""
        return None

    def _take(self, snapshot: Snapshot) -> None:
        """Restores its objects and parts; what this rank kept follows when the ranks have met again."""
        for name, part in snapshot.parts.items():
            self._handlers[name].apply(part)
        self._saved_state = {name: copied(value) for name, value in snapshot.objects.items()}
        self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class HandledState(ObjectState):
    """An ObjectState of which some attributes have a handler."""

    def __init__(self, handlers: dict[str, StateHandler], **kwargs: Any) -> None:
        self._handlers = {
            name: handler if isinstance(handler, Handler) else ForeignHandler(handler)
            for name, handler in handlers.items()
        }
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and value is not handlers[name].value:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
