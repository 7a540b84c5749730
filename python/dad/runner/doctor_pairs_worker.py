"""One host of the doctor's check of lines: every host connects to every other, one after the other.

Rank 0 prints the findings of all of them as a line of JSON after MARK. It does not use dad's engine, which
needs every pair: this check finds the pairs that do not work.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from dad._version import __version__
from dad.runner import network
from dad.runner.kv import KeyValueClient

MARK = "dad doctor pairs: "
_SCOPE = "doctor_pairs"
_CONNECT_SECONDS = 4.0
_TURN_SECONDS = 60.0
_STALLED_SECONDS = 10.0  # a line that connects and carries nothing, say because of its MTU
_PINGS = 8
_FIRST_BYTES = 128 << 10
_MOST_BYTES = 32 << 20
_RATE_SECONDS = 0.3
_CHUNK = bytes(64 << 10)
_PACKAGES = ("torch", "tensorflow", "keras", "numpy")


def main() -> int:
    rank, size = int(os.environ["DAD_RANK"]), int(os.environ["DAD_SIZE"])
    store = KeyValueClient(os.environ["DAD_RENDEZVOUS"], request_timeout=30.0)
    address = _own_address(urlsplit(os.environ["DAD_RENDEZVOUS"]).hostname or "127.0.0.1")
    token = secrets.token_hex(16)
    with socket.create_server((address, 0)) as server:
        threading.Thread(target=serve, args=(server, token), daemon=True).start()
        place = {"address": address, "port": server.getsockname()[1], "token": token, "versions": versions()}
        store.put(_SCOPE, f"place.{rank}", json.dumps(place).encode())
        deadline = time.monotonic() + _TURN_SECONDS
        places = [json.loads(store.wait(_SCOPE, f"place.{other}", deadline)) for other in range(size)]
        # One rank measures at a time, so that all lines are measured alike.
        for turn in range(size):
            if turn == rank:
                lines = {
                    other: measure(places[other]["address"], places[other]["port"], places[other]["token"])
                    for other in range(size)
                    if other != rank
                }
                found = {"versions": place["versions"], "address": address, "lines": lines}
                store.put(_SCOPE, f"found.{rank}", json.dumps(found).encode())
            patience = max(_TURN_SECONDS, (_CONNECT_SECONDS + _STALLED_SECONDS) * size)
            last = store.wait(_SCOPE, f"found.{turn}", time.monotonic() + patience)
            if turn == size - 1:
                assert last
        if rank == 0:
            everyone = [json.loads(store.get(_SCOPE, f"found.{other}") or b"{}") for other in range(size)]
            print(MARK + json.dumps(everyone), flush=True)
    return 0


def versions() -> dict[str, str]:
    """What has to agree between hosts."""
    found = {"python": platform.python_version(), "dad": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _own_address(store: str) -> str:
    """Where ranks would listen: on the chosen interface, or on the one that routes to the store."""
    chosen = (os.environ.get("DAD_GLOO_IFACE") or "").split(",")[0]
    return network.interface_addresses().get(chosen) or network.address_towards(store)


def serve(server: socket.socket, token: str) -> None:
    """Answers clients that know the token: "P" with the time, "R" and a length when that many bytes have
    arrived."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: str) -> None:
    with connection:
        connection.settimeout(_TURN_SECONDS)
        try:
            if not secrets.compare_digest(_receive(connection, len(token)), token.encode()):
                return
            while True:
                question = _receive(connection, 1)
                if question == b"P":
                    connection.sendall(struct.pack("<d", time.time()))
                elif question == b"R":
                    left = struct.unpack("<q", _receive(connection, 8))[0]
                    while left > 0:
                        left -= len(_receive(connection, min(left, len(_CHUNK))))
                    connection.sendall(b"K")
                else:
                    return
        except OSError:
            return


def measure(address: str, port: int, token: str) -> dict[str, Any]:
    """Measures the line to a host: {"delay", "skew", "rate"}, the first two in seconds, or {"error"}."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(_STALLED_SECONDS)
            line.sendall(token.encode())
            trips = [_ping(line) for _ in range(_PINGS)]
            trip, skew = min(trips)
            rate = _rate(line, _FIRST_BYTES)
            rate = _rate(line, min(max(int(rate * _RATE_SECONDS), _FIRST_BYTES), _MOST_BYTES))
            return {"delay": trip / 2, "skew": skew, "rate": rate}
    except OSError as error:
        return {"error": error.strerror or str(error) or type(error).__name__}


def _ping(line: socket.socket) -> tuple[float, float]:
    """Seconds there and back, and by how much the other clock is ahead."""
    began, clock = time.perf_counter(), time.time()
    line.sendall(b"P")
    (theirs,) = struct.unpack("<d", _receive(line, 8))
    trip = time.perf_counter() - began
    return trip, theirs - (clock + trip / 2)


def _rate(line: socket.socket, num_bytes: int) -> float:
    """Bytes per second of the second of two parts; during the first the connection reaches its rate."""
    for _ in range(2):
        line.sendall(b"R" + struct.pack("<q", num_bytes))
        for begin in range(0, num_bytes, len(_CHUNK)):
            line.sendall(_CHUNK[: min(len(_CHUNK), num_bytes - begin)])
    _receive(line, 1)
    began = time.perf_counter()
    _receive(line, 1)
    return num_bytes / max(time.perf_counter() - began, 1e-6)


def _receive(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.exit(main())
