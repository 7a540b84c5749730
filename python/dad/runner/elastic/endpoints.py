"""Horovod's elastic endpoints, on top of the key-value store.

GET /rank_and_size/HOST:SLOT     blocks until the driver knows the worker's next place, then
                                 "rank,size,local_rank,local_size,cross_rank,cross_size";
                                 all of them are -1 for a worker that is no longer in the job
PUT /worker_addresses/HOST:SLOT  where the worker's notification service listens
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from dad.runner.elastic.notify import WorkerAddress, parse_address
from dad.runner.elastic.placement import Seat, parse_seat
from dad.runner.hosts import Slot
from dad.runner.rendezvous import RendezvousServer

PLACES = "rank_and_size"
ADDRESSES = "worker_addresses"
REMOVED = ",".join(["-1"] * 6)


def format_place(place: Slot) -> str:
    return (
        f"{place.rank},{place.size},{place.local_rank},{place.local_size},"
        f"{place.cross_rank},{place.cross_size}"
    )


class Endpoints:
    """The requests arrive on threads of the server; `asked` and `registered` are called there."""

    def __init__(
        self,
        server: RendezvousServer,
        asked: Callable[[Seat], None],
        registered: Callable[[Seat, WorkerAddress], None],
    ) -> None:
        self._server = server
        self._asked = asked
        self._registered = registered
        self._lock = threading.Lock()
        self._waiting: dict[Seat, list[tuple[Future[str], Callable[[], bool]]]] = {}
        server.serve(PLACES, get=self._get_place)
        server.serve(ADDRESSES, put=self._put_address)

    def answer(self, seat: Seat, text: str) -> bool:
        """Returns False if nobody waited for it any more."""
        with self._lock:
            waiting = self._waiting.pop(seat, [])
        heard = False
        for future, is_there in waiting:
            heard |= is_there()
            future.set_result(text)
        return heard

    def is_waiting(self, seat: Seat) -> bool:
        """Whether a request is open and its client still there: it may have given up and asked again."""
        with self._lock:
            return any(is_there() for _, is_there in self._waiting.get(seat, []))

    def hang_up(self, seat: Seat | None = None) -> None:
        """The worker is gone (None: all workers are): nobody answers its requests any more."""
        with self._lock:
            seats = list(self._waiting) if seat is None else [seat]
            dropped = [entry for seat in seats for entry in self._waiting.pop(seat, [])]
        for future, _ in dropped:
            future.cancel()

    def _get_place(self, key: str, is_there: Callable[[], bool]) -> bytes | None:
        try:
            seat = parse_seat(key)
        except ValueError:
            return None
        future: Future[str] = Future()
        with self._lock:
            self._waiting.setdefault(seat, []).append((future, is_there))
        self._asked(seat)
        try:
            return future.result().encode()
        except CancelledError:
            return None

    def _put_address(self, key: str, value: bytes) -> bool:
        try:
            self._registered(parse_seat(key), parse_address(value))
        except ValueError:
            return False
        return True
