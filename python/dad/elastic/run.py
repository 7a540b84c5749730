"""run(): trains on while ranks join and leave."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from dad import basics
from dad._lib import _core
from dad.elastic.launcher import is_elastic
from dad.elastic.notification import notification_manager
from dad.elastic.state import State
from dad.errors import (
    DadInternalError,
    Error,
    HostsUpdatedInterrupt,
    LeftJobError,
    MismatchError,
)
from dad.log import log


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains in an elastic job; its first argument is a State.

    It is called with all ranks in the same state, and again when ranks were lost (then from the last commit)
    or when the launcher has added or removed hosts (then from its current place).

    A new rank begins with the function too: what comes before it must not call collectives. Make the model,
    the optimizer and the state there, and train in the function. A worker whose host was removed leaves the
    process with status 1; the launcher does not count that.

    Args:
        func: the function.

    Returns:
        a function that returns what `func` returns.

    Raises:
        LostStateError: the ranks that are left must not go on.
        MismatchError: ranks disagree, which would happen again.

    Example::

        @hvd.elastic.run
        def train(state):
            while state.epoch < 10:
                train_one_epoch()
                state.epoch += 1
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """
    return run_fn(func, reset)


def reset() -> None:
    """Leaves the ranks of this round and meets those of the next one."""
    basics.shutdown()
    if not is_elastic():
        raise Error(
            "a rank of this job was lost, and nothing starts another one: launch it with dadrun --min-np N"
        )
    basics.init()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Like run(), with another way to meet the ranks of the next round.

    Args:
        func: the function that trains.
        reset: is called without arguments when ranks have changed.

    Returns:
        a function that returns what `func` returns.

    Example::

        train = hvd.elastic.run_fn(train, reset)
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _run(functools.partial(func, state, *args, **kwargs), state, reset)
        except LeftJobError as left:
            log.warning("%s", left)
            basics.shutdown()
            sys.exit(1)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _run(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync = False
    while True:
        lost: DadInternalError | None = None
        try:
            if not skip_sync:
                state.sync()
            return train()
        except MismatchError:
            raise  # it would happen again
        except DadInternalError as error:
            lost = error
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync and not state.synchronizes_always
            lost = _leave_in_order(state)
        except Exception as error:
            # TensorFlow has its own errors for what an op raises.
            if isinstance(error, Error) or not _has_lost_a_peer():
                raise
            lost = DadInternalError(f"{type(error).__name__}: … {' '.join(str(error).split())[-200:]}")
        if lost is not None:
            log.info("going back to the last commit: %s", lost)
            skip_sync = False
            state.restore()
        try:
            reset()
        except Error as error:
            raise error from lost
        state.on_reset()


def _has_lost_a_peer() -> bool:
    return _core.is_initialized() and not _core.is_healthy()


def _leave_in_order(state: State) -> DadInternalError | None:
    """All ranks have come here; returns the error of one that was lost meanwhile."""
    try:
        state.before_leaving()
    except MismatchError:
        raise
    except DadInternalError as error:
        return error
    return None
