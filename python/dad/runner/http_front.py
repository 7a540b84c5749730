"""The front of the key-value server: accepts connections, and reads the head of a request from each.

One thread does this for all connections, in bounded time and memory. A client that sends nothing, sends
slowly or sends too much is dropped, and one that cannot sign (secret.py) is refused before anything more is
read. Only requests that pass here get a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dad.runner.secret import HEADER, Refused, StaleError, Verifier, sign_answer

log = logging.getLogger("dad")

# From the first byte of the head to its last.
HEAD_SECONDS = 10.0
MOST_HEAD_BYTES = 8192
# The most connections whose head has not arrived. If there is one more, the oldest is closed.
MOST_WAITING = 512
# The most requests that are being answered or wait for an answer. There is at most one per worker.
MOST_SERVED = 2048
# Time for a body, and for a client that does not take its answer: this, plus a second per so many bytes.
_PATIENCE_SECONDS = 10.0
_SLOWEST_BYTES_PER_SECOND = 100_000
_MOST_SOURCES_NAMED = 64
# Discarded after an answer, so that the answer is not lost in a reset.
_MOST_DISCARDED_BYTES = 1 << 20


class BadRequest(Exception):
    """The head is not HTTP."""


@dataclass
class Request:
    """Its head has arrived and, if the server has a key, is signed by a member of the job."""

    connection: socket.socket
    source: str
    verb: str
    path: str
    length: int  # -1: not given
    body_start: bytes
    # The signature of the request, which that of the answer covers; empty: the answer is not signed.
    signature: str = ""
    digest: str = ""
    key: bytes = b""

    def read_body(self) -> bytes | None:
        """Returns None if it does not arrive in time."""
        body = bytearray(self.body_start)
        deadline = time.monotonic() + patience(self.length)
        while len(body) < self.length:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                self.connection.settimeout(left)
                more = self.connection.recv(min(1 << 20, self.length - len(body)))
            except OSError:
                return None
            if not more:
                return None
            body += more
        return bytes(body[: self.length])

    def answer(self, status: int, body: bytes = b"") -> None:
        """Raises OSError if the client is gone."""
        proof = sign_answer(self.key, self.signature, status, body) if self.signature else ""
        self.connection.settimeout(patience(len(body)))
        self.connection.sendall(answer_bytes(status, body, proof))
        # A fork of this process may keep a copy of the connection, and the core reads up to its end.
        self.connection.shutdown(socket.SHUT_WR)


_PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}
_PHRASES |= {408: "Request Timeout", 410: "Gone", 501: "Not Implemented", 503: "Service Unavailable"}


def answer_bytes(status: int, body: bytes = b"", proof: str = "") -> bytes:
    signed = f"{HEADER}: {proof}\r\n" if proof else ""
    head = f"HTTP/1.0 {status} {_PHRASES[status]}\r\n{signed}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def patience(count: int) -> float:
    return _PATIENCE_SECONDS + max(0, count) / _SLOWEST_BYTES_PER_SECOND


@dataclass
class _Waiting:
    connection: socket.socket
    source: str
    give_up_at: float
    head: bytearray = field(default_factory=bytearray)
    is_answered: bool = False
    num_discarded: int = 0


class Front:
    """`serve(request)` is called on a thread of its own for each request; `let_in(connection)` may drop one
    at once. key() is the store's key, empty for an open store."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[Request], None],
        let_in: Callable[[socket.socket], bool],
        key: Callable[[], bytes],
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._let_in = let_in
        self._key = key
        self._verifier = Verifier()
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[int, _Waiting] = {}  # by descriptor, the oldest first
        self._num_served = 0
        self._lock = threading.Lock()
        self._wakeup, self._waker = socket.socketpair()
        self.num_refused = 0
        self._named: set[str] = set()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until stop()."""
        while True:
            soonest = next(iter(self._waiting.values()), None)
            left = None if soonest is None else max(0.0, soonest.give_up_at - time.monotonic())
            ready = [entry.fileobj for entry, _ in self._selector.select(left)]
            if self._wakeup in ready:
                return
            for found in ready:
                if found is self._listener:
                    self._accept()
                elif (waiting := self._waiting.get(found.fileno())) is not None:  # type: ignore[union-attr]
                    self._read(waiting)
            now = time.monotonic()
            for waiting in list(self._waiting.values()):
                if waiting.give_up_at > now:
                    break
                self._lose_patience(waiting, "it says nothing, or too slowly")

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def close(self) -> None:
        """Call when run() has returned, or in a forked child, where it does not run."""
        for waiting in self._waiting.values():
            waiting.connection.close()
        self._waiting.clear()
        self._selector.close()
        for ours in (self._listener, self._wakeup, self._waker):
            ours.close()

    def _accept(self) -> None:
        for _ in range(64):  # per turn
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            if not self._let_in(connection):
                connection.close()
                continue
            # TLS would wrap the connection here, before anything is read.
            if len(self._waiting) >= MOST_WAITING:
                oldest = next(iter(self._waiting.values()))
                self._lose_patience(oldest, "it says nothing, and others want its place")
            connection.setblocking(False)
            waiting = _Waiting(connection, str(address[0]), time.monotonic() + HEAD_SECONDS)
            self._waiting[connection.fileno()] = waiting
            self._selector.register(connection, selectors.EVENT_READ)
            self._read(waiting)  # it has often arrived already

    def _read(self, waiting: _Waiting) -> None:
        try:
            more = waiting.connection.recv(MOST_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._drop(waiting)
            return
        if waiting.is_answered:
            waiting.num_discarded += len(more)
            if waiting.num_discarded > _MOST_DISCARDED_BYTES:
                self._drop(waiting)
            return
        waiting.head += more
        head, end, rest = bytes(waiting.head).partition(b"\r\n\r\n")
        if end and len(head) <= MOST_HEAD_BYTES:
            self._take(waiting, head, rest)
        elif len(waiting.head) > MOST_HEAD_BYTES:
            self._refuse(waiting, "its request has no end", 400)

    def _take(self, waiting: _Waiting, head: bytes, rest: bytes) -> None:
        try:
            request, proof = _parse(waiting, head, rest)
        except BadRequest as error:
            self._refuse(waiting, str(error), 400)
            return
        if key := self._key():
            try:
                checked = self._verifier.check(key, request.verb, request.path, max(0, request.length), proof)
            except Refused as error:
                self._refuse(waiting, str(error), 403)
                return
            except StaleError as error:
                name = self._verifier.name.encode()
                self._end(waiting, answer_bytes(401, name, sign_answer(key, error.signature, 401, name)))
                return
            request.key, (request.signature, request.digest) = key, checked
        # Signed, too: clients take an answer that is not for a forgery, and do not ask again.
        proof = sign_answer(request.key, request.signature, 503, b"") if request.signature else ""
        busy = answer_bytes(503, b"", proof)
        with self._lock:
            if self._num_served >= MOST_SERVED:
                self._end(waiting, busy)
                return
            self._num_served += 1
        self._forget(waiting)
        try:
            threading.Thread(
                target=self._serve_one, args=(request,), name="dad-rendezvous-request", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread for us now: others have to be answered all the same
            with self._lock:
                self._num_served -= 1
            self._waiting[waiting.connection.fileno()] = waiting
            self._selector.register(waiting.connection, selectors.EVENT_READ)
            self._end(waiting, busy)

    def _serve_one(self, request: Request) -> None:
        try:
            # A client may hang up in the middle of a request.
            with request.connection, contextlib.suppress(OSError):
                self._serve(request)
        finally:
            with self._lock:
                self._num_served -= 1

    def _lose_patience(self, waiting: _Waiting, why: str) -> None:
        if not waiting.is_answered:
            self._count(waiting, why)
        self._drop(waiting)

    def _refuse(self, waiting: _Waiting, why: str, status: int) -> None:
        self._count(waiting, why)
        self._end(waiting, answer_bytes(status))

    def _count(self, waiting: _Waiting, why: str) -> None:
        self.num_refused += 1
        if waiting.source in self._named or len(self._named) >= _MOST_SOURCES_NAMED:
            return
        self._named.add(waiting.source)
        log.warning(
            "the rendezvous server refuses a request from %s: %s (further ones from there are counted only; "
            "docs/security.md)",
            waiting.source,
            why,
        )

    def _end(self, waiting: _Waiting, answer: bytes) -> None:
        """The answer fits into the buffer of a connection that has carried nothing yet. Further input is
        discarded until the client hangs up."""
        waiting.is_answered = True
        waiting.head.clear()
        try:
            waiting.connection.send(answer)
            waiting.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(waiting)

    def _drop(self, waiting: _Waiting) -> None:
        self._forget(waiting)
        waiting.connection.close()

    def _forget(self, waiting: _Waiting) -> None:
        if self._waiting.pop(waiting.connection.fileno(), None) is not None:
            self._selector.unregister(waiting.connection)


def _parse(waiting: _Waiting, head: bytes, rest: bytes) -> tuple[Request, str]:
    """The request, and its signature header."""
    try:
        first, *lines = head.decode("latin-1").split("\r\n")
        verb, path, version = first.split(" ")
        fields = dict(line.split(":", 1) for line in lines)
    except ValueError:
        raise BadRequest("it does not speak HTTP") from None
    if not version.startswith("HTTP/1."):
        raise BadRequest("it does not speak HTTP")
    by_name = {name.strip().lower(): value.strip() for name, value in fields.items()}
    length = by_name.get("content-length", "")
    number = int(length) if length.isascii() and length.isdecimal() and len(length) < 16 else -1
    request = Request(waiting.connection, waiting.source, verb, path, number, rest)
    return request, by_name.get(HEADER.lower(), "")
