"""The service of a worker by which the launcher tells it that hosts were added or removed."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import secrets
import socket
import socketserver
import threading
import time
from typing import Any, Protocol

from dad.elastic import wire
from dad.elastic.launcher import own_slot, store_address
from dad.elastic.wire import HostUpdateResult
from dad.log import log
from dad.runner import greeting, network, secret
from dad.runner.kv import KeyValueClient

_SCOPE = "worker_addresses"
_REQUEST_SECONDS = 10.0  # for a client, from its first byte to its last
_KEY_BYTES = 32
# The most connections to serve at a time. If there is one more, the oldest is closed: a launcher takes
# milliseconds.
_MOST_CONNECTIONS = 32


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None: ...


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        deadline = time.monotonic() + _REQUEST_SECONDS
        try:
            stream = _Stream(self.connection, deadline)
            key = self.server.key
            if self.server.greets:
                key = greeting.as_service(stream.read, stream.write, key)
            request = wire.read(stream, key)
            answer = self.server.manager.answer(request, self.client_address[0])
            wire.write(stream, key, answer)
        except (EOFError, OSError, wire.MessageError, greeting.GreetingError) as error:
            self.server.refused(self.client_address[0], error)


class _Stream:
    """A socket with a total deadline, however slowly the bytes come."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._set_timeout()
            more = self._connection.recv(count - len(data))
            if not more:
                raise EOFError(f"a message ends after {len(data)} of {count} bytes")
            data += more
        return bytes(data)

    def write(self, data: bytes) -> None:
        self._set_timeout()
        self._connection.sendall(data)

    def flush(self) -> None:
        pass

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("too slow")
        self._connection.settimeout(left)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, key: bytes, greets: bool, manager: WorkerNotificationManager) -> None:
        self.key = key
        self.greets = greets
        self.manager = manager
        self.num_refused = 0
        self._named: set[str] = set()
        self._served: dict[int, socket.socket] = {}  # by identity, the oldest first
        self._served_lock = threading.Lock()
        super().__init__((address, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._served_lock:
            if len(self._served) >= _MOST_CONNECTIONS:
                oldest = self._served.pop(next(iter(self._served)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._served[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._served_lock:
            self._served.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A stranger's requests must not write to the output of the rank."""

    def refused(self, source: str, error: Exception) -> None:
        """The connection is from a stranger, or from a launcher that is gone."""
        self.num_refused += 1
        if source not in self._named and len(self._named) < 64:
            self._named.add(source)
            log.warning(
                "the notification service refuses a request from %s: %s (further ones from there are counted "
                "only; docs/security.md)",
                source,
                error,
            )


class WorkerNotificationManager:
    """One per process. Does nothing in a process that no elastic launcher has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._pid = 0
        self._listeners: set[Any] = set()

    def init(self) -> None:
        """Starts the service and tells the launcher where it is; once."""
        with self._lock:
            store, slot = store_address(os.environ), own_slot(os.environ)
            if store is None or slot is None or (self._server is not None and self._pid == os.getpid()):
                return
            # If the store knows the job's secret, the launcher does too, and no key has to be sent there.
            known = secret.of_rank(os.environ) if secret.key_of_rank(os.environ) else b""
            key = secret.notification_key(known, slot) if known else secrets.token_bytes(_KEY_BYTES)
            addresses = _addresses()
            # If the launcher can reach just one address, the service listens only there.
            only = next(iter(addresses.values())) if len(addresses) == 1 else ""
            self._server, self._pid = _Server(only, key, bool(known), self), os.getpid()
            threading.Thread(target=self._server.serve_forever, name="dad-notification", daemon=True).start()
            port = self._server.server_address[1]
            packet = ({name: [(address, port)] for name, address in addresses.items()}, b"" if known else key)
            value = base64.b64encode(pickle.dumps(packet, protocol=4))
            # The launcher tries to reach the service before it answers.
            KeyValueClient(store, request_timeout=60.0).put(_SCOPE, slot, value)

    def register_listener(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)

    def answer(self, request: Any, client: str) -> Any:
        if isinstance(request, wire.PingRequest):
            return wire.PingResponse(wire.SERVICE_NAME, client)
        if isinstance(request, wire.HostsUpdatedRequest):
            self.handle_hosts_updated(request.timestamp, request.res)
            return wire.AckResponse()
        raise wire.MessageError(f"{type(request).__name__} is not a request")


def _addresses() -> dict[str, str]:
    """Where the launcher may reach this process, by interface."""
    found = network.interface_addresses()
    wanted = (os.environ.get("DAD_GLOO_IFACE") or os.environ.get("HOROVOD_GLOO_IFACE") or "").split(",")
    return {name: found[name] for name in wanted if name in found} or found


notification_manager = WorkerNotificationManager()
