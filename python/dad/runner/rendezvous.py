"""The key-value server through which ranks find each other.

It speaks what horovodrun's server speaks, so that one client in the core serves both:
plain HTTP/1.0, `GET`, `PUT` and `DELETE` of `/<scope>/<key>`, values are raw bytes,
404 when a key is not there, 400 when the path does not have exactly two parts.

Every server holds its job's token under `/dad/hello`. A client that only knows candidate
ports asks for it and so tells our server from anything else that may listen there.

Where the job has a secret, everything is signed with it (secret.py), and strangers get 403.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from dad.runner.http_front import Front, Request, log
from dad.runner.secret import store_key

HELLO_SCOPE = "dad"
HELLO_KEY = "hello"
SEATS_SCOPE = "dad_seats"  # where every rank announces its arrival
# Scopes that a new round of an elastic job leaves as they are: they belong to the job, not to the round.
_LASTING = frozenset({HELLO_SCOPE, "dad_elastic", "runfunc"})
MAX_VALUE_BYTES = 1 << 30


@dataclass(frozen=True)
class _Special:
    """A scope whose keys are not stored: `get` may block, a `put` that returns False is refused."""

    get: Callable[[str, Callable[[], bool]], bytes | None]
    put: Callable[[str, bytes], bool]


class _Store:
    """The values, and the request handler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._abandoned = False
        self.special: dict[str, _Special] = {}
        self.used: set[str] = set()  # our addresses that ranks have used
        self.kept_to: frozenset[str] | None = None

    def lets_in(self, connection: socket.socket) -> bool:
        return self.kept_to is None or connection.getsockname()[0] in self.kept_to

    def serve(self, request: Request) -> None:
        scope, _, key = request.path.removeprefix("/").partition("/")
        if not request.path.startswith("/") or not scope or not key or "/" in key:
            request.answer(400)
        elif request.verb == "GET":
            self._serve_get(request, scope, key)
        elif request.verb == "PUT":
            request.answer(self._take_put(request, scope, key))
        elif request.verb == "DELETE":
            self.delete(scope, key)
            request.answer(200)
        else:
            request.answer(501)

    def _serve_get(self, request: Request, scope: str, key: str) -> None:
        special = self.special.get(scope)
        if special is not None:
            value = special.get(key, lambda: _is_there(request.connection))
        else:
            value = self.get(scope, key)
        if value is None:
            request.answer(410 if self.is_abandoned(scope) else 404)
        else:
            request.answer(200, value)

    def _take_put(self, request: Request, scope: str, key: str) -> int:
        if not 0 <= request.length <= MAX_VALUE_BYTES:
            return 400
        value = request.read_body()
        if value is None:
            return 408
        if request.signature and hashlib.sha256(value).hexdigest() != request.digest:
            return 403  # the request was changed on its way
        special = self.special.get(scope)
        if special is None:
            self.put(scope, key, value)
        elif not special.put(key, value):
            return 400
        if scope == SEATS_SCOPE:
            self.used.add(request.connection.getsockname()[0])
        return 200

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


def _is_there(connection: socket.socket) -> bool:
    """Whether the client still waits for an answer."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return not poll.poll(0) or connection.recv(1, socket.MSG_PEEK) != b""
    except (OSError, ValueError):
        return False


def _listener(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        # All ranks of a big job connect at the same moment.
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


class RendezvousServer:
    """A key-value server on a thread of its own.

    `host` is the address to listen on, "" means all of IPv4; `port` 0 means any free one. With a `secret`,
    only requests of the job `job`, which is known before its ranks start, are answered (secret.py). Raises
    OSError if the port is taken.
    """

    def __init__(self, host: str, port: int = 0, token: str = "", secret: bytes = b"", job: str = "") -> None:
        self.secret = secret
        self.job = job
        self._store = _Store()
        self._store.put(HELLO_SCOPE, HELLO_KEY, token.encode())
        self._socket = _listener(host, port)
        self._address: tuple[str, int] = self._socket.getsockname()
        self._front = Front(self._socket, self._store.serve, self._store.lets_in, self._key)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._front.run, name="dad-rendezvous", daemon=True)
        self._thread.start()
        _living.add(self)

    def _key(self) -> bytes:
        return store_key(self.secret, self.job)

    @property
    def num_refused(self) -> int:
        """The number of requests that were invalid, or not of this job."""
        return self._front.num_refused

    @property
    def host(self) -> str:
        """An address at which this process itself reaches the server."""
        return "127.0.0.1" if self.serves_all_addresses else self._address[0]

    @property
    def port(self) -> int:
        return self._address[1]

    @property
    def serves_all_addresses(self) -> bool:
        return self._address[0] == "0.0.0.0"

    def keep_to_ranks(self, *addresses: str) -> None:
        """All ranks have taken their seats: from now on only clients that connect to an address that the
        ranks have used, or to one of these, are answered."""
        self._store.kept_to = frozenset(self._store.used | set(addresses))

    def get(self, scope: str, key: str) -> bytes | None:
        return self._store.get(scope, key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        self._store.put(scope, key, value)

    def serve(
        self,
        scope: str,
        get: Callable[[str, Callable[[], bool]], bytes | None] = lambda _key, _is_there: None,
        put: Callable[[str, bytes], bool] = lambda _key, _value: False,
    ) -> None:
        """Hands requests for this scope to these functions, on threads of the server, from now on.

        get(key, is_there) returns the value or None, and may block; is_there() tells whether the client still
        waits. put(key, value) returns whether the value was accepted.
        """
        self._store.special[scope] = _Special(get, put)

    def begin_round(self) -> None:
        """Forgets the values that ranks have left here to find each other."""
        self._store.clear(_LASTING)

    def abandon_round(self) -> None:
        """Until the next begin_round(), requests for missing keys are answered with 410: they will not
        come."""
        self._store.abandon()

    def stop(self) -> None:
        """Stops answering, frees the port, joins the thread. Does nothing in a forked child."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._front.stop()
        self._thread.join()
        self._front.close()
        if self.num_refused > 1:  # one has been logged
            log.warning("the rendezvous server has refused %d requests", self.num_refused)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _forget_in_child(self) -> None:
        # The child has no server thread. Its copy of the listening socket would keep the port
        # open after the parent's death, and clients would hang instead of being refused.
        self._front.close()


_living: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in list(_living):
        server._forget_in_child()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
