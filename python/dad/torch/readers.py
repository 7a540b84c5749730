"""Ranks that use .grad alone, before a collective that the script calls on all ranks.

Such a rank waits for the gradients of all ranks. Some of them are sent by synchronize() only: those of
parameters that a rank has not used, and all of a step that a method observes. Other ranks do not come there,
for they wait in the collective for the rank that reads. So whoever waits in a collective looks from time to
time whether other ranks wait for gradients that it has not sent, and then sends them.

Some ranks cannot: one that has run no backward() does not know that its step has begun. Then the rank that
reads gives up after a while, and its error names the collective.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dad._lib import _core
from dad.errors import MismatchError
from dad.rank_groups import name_ranks
from dad.torch._load import _torch

if TYPE_CHECKING:
    from dad.torch.gradient_sync import GradientSync
    from dad.torch.layer_units import Unit

PATIENCE_SECONDS = 20.0  # of a rank that reads .grad, with others that wait for it elsewhere

_all: weakref.WeakSet[Readers] = weakref.WeakSet()


class Readers:
    """Those of one optimizer's gradients."""

    def __init__(self, sync: GradientSync) -> None:
        self._sync = weakref.ref(sync)
        self._thread = 0  # that trains
        self._busy = False  # with what others have asked for
        self._reads_since: float | None = None
        self.gave_up = False
        _all.add(self)

    def backward_ended(self) -> None:
        self._thread = threading.get_ident()

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """This rank uses .grad of the parameter `name`."""
        self._name, self._reads_since = name, time.monotonic()
        self.gave_up = False
        try:
            yield
        finally:
            self._reads_since = None

    def while_waiting(self) -> None:
        """This thread waits for other ranks. MismatchError if they wait for it in something else."""
        sync = self._sync()
        if sync is None or self._busy or self._thread != threading.get_ident():
            return
        if self._reads_since is not None:
            if time.monotonic() - self._reads_since > PATIENCE_SECONDS:
                self._raise_if_awaited(sync)
        elif sync.may_send_rest() and self._is_asked(sync):
            self._busy = True
            try:
                sync.send_rest_for_others()
            finally:
                self._busy = False

    def _is_asked(self, sync: GradientSync) -> bool:
        """Whether another rank is done with this step's backward passes: it has all that we have not sent, or
        wants to make a plan of what was observed."""
        unsent = [_wire_name(unit) for unit in sync.units if not unit.was_sent]
        unsent = [name for name in unsent if name]
        if not unsent:
            return False
        wanted = [name for name, _ in _core.wanted()]
        if sync.plan_name() in wanted:
            return True
        # The parts of a sparse gradient have names of their own.
        return all(any(name == one or name.startswith(f"{one}.") for name in wanted) for one in unsent)

    def _raise_if_awaited(self, sync: GradientSync) -> None:
        ours = {slot.name for slot in sync.slots.values()}
        for name, ranks in _core.wanted():
            if name not in ours:
                self.gave_up = True
                raise MismatchError(
                    f'.grad of "{self._name}" was used between backward() and step(), and waits for the '
                    f"gradients of all ranks; but {name_ranks(ranks)} {_wait(ranks)} for this rank in "
                    f'"{name}" instead of sending them. Use .grad on all ranks alike, or only after that '
                    "collective or after optimizer.synchronize()"
                )


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _wire_name(unit: Unit) -> str:
    """Under which it is sent; "" if nothing is."""
    return next((slot.name for slot in unit.slots if slot.param.requires_grad), "")


def _while_waiting() -> None:
    for readers in list(_all):
        readers.while_waiting()


_core.set_while_waiting(_while_waiting)
_torch.set_while_waiting(_while_waiting)
