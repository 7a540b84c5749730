"""The key-value server through which ranks find each other.

It speaks what horovodrun's server speaks, so that one client in the core serves both:
plain HTTP/1.0, `GET`, `PUT` and `DELETE` of `/<scope>/<key>`, values are raw bytes,
404 when a key is not there, 400 when the path does not have exactly two parts.

Every server holds its job's token under `/dad/hello`. A client that only knows candidate
ports asks for it and so tells our server from anything else that may listen there.
"""

from __future__ import annotations

import http.server
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HELLO_SCOPE = "dad"
HELLO_KEY = "hello"
SEATS_SCOPE = "dad_seats"  # where every rank says that it has come
# Scopes that a new round of an elastic job leaves as they are: they belong to the job, not to the round.
_LASTING = frozenset({HELLO_SCOPE, "dad_elastic", "runfunc"})
# A client that connects and says nothing must not hold a thread for ever.
REQUEST_TIMEOUT_SECONDS = 10.0
MAX_VALUE_BYTES = 1 << 30


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        place = self._place()
        if place is None:
            return
        special = self.server.special.get(place[0])
        value = special.get(place[1], self._is_there) if special else self.server.get(*place)
        if value is None:
            self._answer(410 if self.server.is_abandoned(place[0]) else 404)
        else:
            self._answer(200, value)

    def do_PUT(self) -> None:
        place = self._place()
        if place is None:
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_VALUE_BYTES:
            self._answer(400)
            return
        try:
            value = self.rfile.read(length)
        except TimeoutError:
            value = b""
        if len(value) < length:
            self._answer(408)
            return
        special = self.server.special.get(place[0])
        if special is None:
            self.server.put(*place, value)
        elif not special.put(place[1], value):
            self._answer(400)
            return
        if place[0] == SEATS_SCOPE:
            self.server.used.add(self.connection.getsockname()[0])
        self._answer(200)

    def do_DELETE(self) -> None:
        place = self._place()
        if place is None:
            return
        self.server.delete(*place)
        self._answer(200)

    def log_message(self, *_args: object) -> None:
        """A request per rank and key is not news."""

    def _is_there(self) -> bool:
        """Whether the client still waits for an answer."""
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLIN)
            return not poll.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    def _place(self) -> tuple[str, str] | None:
        parts = self.path.split("/")
        if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
            self._answer(400)
            return None
        return parts[1], parts[2]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@dataclass(frozen=True)
class _Special:
    """A scope whose keys are not stored: `get` may take its time, a `put` of False is refused."""

    get: Callable[[str, Callable[[], bool]], bytes | None]
    put: Callable[[str, bytes], bool]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # All ranks of a big job connect in the same moment.
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int]) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._abandoned = False
        self.special: dict[str, _Special] = {}
        self.used: set[str] = set()  # of our addresses, by ranks
        self.kept_to: frozenset[str] | None = None
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind would look up our own name in DNS, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def verify_request(self, request: Any, _client: object) -> bool:
        """False closes the connection without an answer."""
        return self.kept_to is None or request.getsockname()[0] in self.kept_to

    def handle_error(self, _request: object, _client: object) -> None:
        """A client that hangs up in the middle of a request is that client's business."""

    def get(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            return self._scopes.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def clear(self, kept: frozenset[str]) -> None:
        with self._lock:
            self._abandoned = False
            self._scopes = {scope: keys for scope, keys in self._scopes.items() if scope in kept}

    def abandon(self) -> None:
        self._abandoned = True

    def is_abandoned(self, scope: str) -> bool:
        return self._abandoned and scope not in _LASTING and scope not in self.special

    def delete(self, scope: str, key: str) -> None:
        with self._lock:
            keys = self._scopes.get(scope)
            if keys is None:
                return
            keys.pop(key, None)
            if not keys:
                del self._scopes[scope]


class RendezvousServer:
    """A key-value server on a thread of its own.

    `host` is the address to listen on, "" means all of IPv4; `port` 0 means any free one. Raises OSError
    if the port is taken.
    """

    def __init__(self, host: str, port: int = 0, token: str = "") -> None:
        self._server = _Server((host, port))
        self._server.put(HELLO_SCOPE, HELLO_KEY, token.encode())
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": None},  # sleeps until somebody connects
            name="dad-rendezvous",
            daemon=True,
        )
        self._thread.start()
        _living.add(self)

    @property
    def host(self) -> str:
        """An address at which this process itself reaches the server."""
        return "127.0.0.1" if self.serves_all_addresses else str(self._server.server_address[0])

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def serves_all_addresses(self) -> bool:
        return self._server.server_address[0] == "0.0.0.0"

    def keep_to_ranks(self, *addresses: str) -> None:
        """All ranks have taken their seats: from now on answers only who connects to one of the addresses
        that they have used, or to one of these."""
        self._server.kept_to = frozenset(self._server.used | set(addresses))

    def get(self, scope: str, key: str) -> bytes | None:
        return self._server.get(scope, key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        self._server.put(scope, key, value)

    def serve(
        self,
        scope: str,
        get: Callable[[str, Callable[[], bool]], bytes | None] = lambda _key, _is_there: None,
        put: Callable[[str, bytes], bool] = lambda _key, _value: False,
    ) -> None:
        """From now on requests for this scope go to these functions, on threads of the server.

        get(key, is_there) returns the value or None, and may block; is_there() tells whether the client still
        waits. put(key, value) returns whether the value was accepted.
        """
        self._server.special[scope] = _Special(get, put)

    def begin_round(self) -> None:
        """Forgets what the ranks have left here to find each other."""
        self._server.clear(_LASTING)

    def abandon_round(self) -> None:
        """Until the next begin_round(): who asks for what is not there learns that it will not come (410)."""
        self._server.abandon()

    def stop(self) -> None:
        """Stops answering, frees the port, joins the thread. Does nothing in a forked child."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which looks for the order then
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _forget_in_child(self) -> None:
        # The child has no server thread. Its copy of the listening socket would keep the port
        # open after the parent's death, and clients would hang instead of being refused.
        self._server.socket.close()


_living: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in list(_living):
        server._forget_in_child()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
