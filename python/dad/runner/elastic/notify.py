"""The client of the notification service that an elastic worker runs, in Horovod's own format.

One request per connection. A frame is HMAC-SHA256(key, body), the length as a native int, the body: a
pickle of an object. The pickles name Horovod's classes, which need not be installed here; in answers, only
those names are accepted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from dad.runner import greeting

# Of Horovod's HostUpdateResult; both together mean both.
REMOVED = 1
ADDED = 2
SERVICE = "worker notification service"
_NETWORK = "horovod.runner.common.util.network"
_WORKER = "horovod.runner.elastic.worker"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_REPLY_BYTES = 1 << 16
_LENGTH = struct.Struct("i")


@dataclass(frozen=True)
class WorkerAddress:
    """The address of a worker's notification service, and the key that it has made, if any.

    greets: it is a worker of ours that knows the job's secret. Connections then begin with a greeting, and
    the key is that of its slot.
    """

    addresses: tuple[tuple[str, int], ...]
    key: bytes
    greets: bool = False


def parse_address(body: bytes) -> WorkerAddress:
    """base64(pickle(({interface: [(ip, port), …]}, key))). Raises ValueError."""
    try:
        by_interface, key = _Reader(io.BytesIO(base64.b64decode(body, validate=True))).load()
        found = [(str(ip), int(port)) for entries in by_interface.values() for ip, port in entries]
    except Exception as error:
        raise ValueError(f"not the address of a notification service: {error}") from error
    if not found or not isinstance(key, bytes):
        raise ValueError("an address of a notification service without address or key")
    return WorkerAddress(tuple(dict.fromkeys(found)), key)


def ping(worker: WorkerAddress, timeout: float) -> bool:
    """Whether the worker's process still answers."""
    return _ask(worker, _pickled(_NETWORK, "PingRequest"), timeout) == "PingResponse"


def tell_hosts_updated(worker: WorkerAddress, timestamp: int, result: int, timeout: float) -> bool:
    """Returns whether the worker has taken the news. `timestamp` must grow from one to the next."""
    state = _DICT + b"X\x09\x00\x00\x00timestamp" + _integer(timestamp)
    state += b"X\x03\x00\x00\x00res" + _global(_WORKER, "HostUpdateResult") + _integer(result) + b"\x85R"
    return _ask(worker, _pickled(_WORKER, "HostsUpdatedRequest", state + b"u"), timeout) == "AckResponse"


# ---- frames


def _ask(worker: WorkerAddress, body: bytes, timeout: float) -> str | None:
    """Returns the name of the class in the answer; None if no address gave a signed answer."""
    for address in worker.addresses:
        try:
            with (
                socket.create_connection(address, timeout=timeout) as connection,
                connection.makefile("rb") as reader,
            ):
                key = worker.key
                if worker.greets:
                    key = greeting.as_launcher(reader.read, connection.sendall, key)
                digest = hmac.new(key, body, hashlib.sha256).digest()
                connection.sendall(digest + _LENGTH.pack(len(body)) + body)
                return _read_reply(reader, key)
        except (OSError, ValueError):
            continue
    return None


def _read_reply(reader: Any, key: bytes) -> str:
    head = reader.read(_DIGEST_BYTES + _LENGTH.size)
    if len(head) < _DIGEST_BYTES + _LENGTH.size:
        raise ValueError("the reply is cut short")
    (length,) = _LENGTH.unpack(head[_DIGEST_BYTES:])
    if not 0 <= length <= _MAX_REPLY_BYTES:
        raise ValueError(f"a reply of {length} bytes")
    body = reader.read(length)
    if not hmac.compare_digest(head[:_DIGEST_BYTES], hmac.new(key, body, hashlib.sha256).digest()):
        raise ValueError("the reply is not signed with the worker's key")
    try:
        reply = _Reader(io.BytesIO(body)).load()
    except Exception as error:
        raise ValueError(f"the reply cannot be read: {error}") from error
    return type(reply).__name__


# ---- pickles


class PingResponse:
    pass


class AckResponse:
    pass


class _Reader(pickle.Unpickler):
    _KNOWN = {(_NETWORK, "PingResponse"): PingResponse, (_NETWORK, "AckResponse"): AckResponse}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place here") from None


_DICT = b"}("


def _global(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _integer(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def _pickled(module: str, name: str, state: bytes = b"") -> bytes:
    """An object of the class, made without its constructor: protocol 2, for any Python."""
    build = state + b"b" if state else b""
    return b"\x80\x02" + _global(module, name) + b")\x81" + build + b"."
