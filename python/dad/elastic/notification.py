"""The service of a worker by which the launcher tells it that hosts were added or removed."""

from __future__ import annotations

import base64
import os
import pickle
import secrets
import socketserver
import threading
from typing import Any, Protocol

from dad.elastic import wire
from dad.elastic.launcher import own_slot, store_address
from dad.elastic.wire import HostUpdateResult
from dad.runner import network
from dad.runner.kv import KeyValueClient

_SCOPE = "worker_addresses"
_REQUEST_SECONDS = 10.0  # that a client may take
_KEY_BYTES = 32


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None: ...


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def handle(self) -> None:
        try:
            request = wire.read(self.rfile, self.server.key)
            answer = self.server.manager.answer(request, self.client_address[0])
            wire.write(self.wfile, self.server.key, answer)
        except (EOFError, OSError, wire.MessageError):
            pass  # a stranger, or a launcher that is gone


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, key: bytes, manager: WorkerNotificationManager) -> None:
        self.key = key
        self.manager = manager
        super().__init__((address, 0), _Handler)


class WorkerNotificationManager:
    """One per process. Does nothing where no elastic launcher has started it."""

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
            key = secrets.token_bytes(_KEY_BYTES)
            addresses = _addresses()
            # Only where the launcher can reach us anyway.
            only = next(iter(addresses.values())) if len(addresses) == 1 else ""
            self._server, self._pid = _Server(only, key, self), os.getpid()
            threading.Thread(target=self._server.serve_forever, name="dad-notification", daemon=True).start()
            port = self._server.server_address[1]
            packet = ({name: [(address, port)] for name, address in addresses.items()}, key)
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
