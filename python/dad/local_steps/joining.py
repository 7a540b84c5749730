"""What a rank does before it joins: optimizers with local steps send what they have not sent."""

from __future__ import annotations

from collections.abc import Callable

_preparations: list[Callable[[], None]] = []


def before_join(prepare: Callable[[], None]) -> None:
    """From now on join() begins with this."""
    _preparations.append(prepare)


def prepare_join() -> None:
    for prepare in _preparations:
        prepare()
