"""How a value of a state is saved, restored and brought to other ranks."""

from __future__ import annotations

import copy
from typing import Any

import cloudpickle

from dad.elastic.residuals import Saved


class StateHandler:
    """Horovod's interface, for handlers of users."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class Handler(StateHandler):
    """What dad's own handlers can do besides: keep several versions, say what is the same on all ranks, and
    carry over what is not."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def capture(self) -> Any:
        """A copy of what all ranks have in common."""
        raise NotImplementedError

    def apply(self, snapshot: Any) -> None:
        """Takes it over; the snapshot stays as it is."""
        raise NotImplementedError

    def encode(self, snapshot: Any) -> bytes:
        return cloudpickle.dumps(snapshot)

    def decode(self, data: bytes) -> Any:
        return cloudpickle.loads(data)

    # What ranks do not have in common

    @property
    def can_carry(self) -> bool:
        """Whether this rank may keep parts of gradients for later steps; the same on all ranks."""
        return False

    def kept(self) -> Saved | None:
        """This rank's own kept parts; None before the first step."""
        return None

    def carry(self, saved: Saved) -> None:
        """Continues with that in a new round."""

    def contribution(self) -> Any:
        """What only this rank knows, for merge(); of JSON's types."""
        return None

    def merge(self, contributions: list[Any]) -> None:
        """Merges the values of all ranks that have the state."""

    def on_reset(self) -> None:
        """The number of ranks, or this rank's number, may have changed."""

    # Horovod's interface

    def save(self) -> None:
        self._saved = self.capture()

    def restore(self) -> None:
        self.apply(self._saved)

    def sync(self) -> None:
        """Synchronizes on its own, without the rest of its state; rank 0 is the source."""
        from dad._lib import _core
        from dad.elastic.snapshot import send

        rank, size = _core.rank(), _core.size()
        parts = [self.encode(self.capture())] * size if rank == 0 else []
        data = send(0, rank, parts)
        if rank != 0:
            self.apply(self.decode(data))
        self.save()


class ForeignHandler(Handler):
    """Wraps a handler of the user's, which knows one version and synchronizes by itself."""

    def __init__(self, handler: StateHandler) -> None:
        self.handler = handler
        super().__init__(handler.value)

    def capture(self) -> None:
        self.handler.save()

    def apply(self, snapshot: None) -> None:
        self.handler.restore()

    def sync(self) -> None:
        self.handler.sync()

    def set_value(self, value: Any) -> None:
        self.value = value
        self.handler.set_value(value)


class StateDictHandler(Handler):
    """Handles objects that have state_dict() and load_state_dict()."""

    def capture(self) -> Any:
        return copy.deepcopy(self.value.state_dict())

    def apply(self, snapshot: Any) -> None:
        self.value.load_state_dict(copy.deepcopy(snapshot))


class SamplerHandler(StateDictHandler):
    """Handles an ElasticSampler. Ranks may have recorded different samples, and all of them count."""

    def contribution(self) -> list[int]:
        return sorted(self.value.processed_indices)

    def merge(self, contributions: list[list[int]]) -> None:
        together = set().union(*contributions)
        self.value.load_state_dict({**self.value.state_dict(), "processed_indices": together})

    def on_reset(self) -> None:
        self.value.reset()


def copied(value: Any) -> Any:
    """A value that cannot be copied is kept as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
