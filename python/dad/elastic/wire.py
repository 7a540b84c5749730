"""Messages of Horovod's notification service, by which a launcher tells a worker that hosts have changed.

A message is 32 bytes of HMAC-SHA256 over the body, 4 bytes of length in native order, and the body, a pickle.
Classes are pickled under Horovod's names, and can be read without Horovod. The digest is checked before
anything is unpickled, and no other classes are accepted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, Protocol

DIGEST_BYTES = 32
SERVICE_NAME = "worker notification service"
_LENGTH = struct.Struct("i")
_MOST_BYTES = 1 << 16


class HostUpdateResult(enum.IntFlag):
    """What has happened to the hosts of a job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class PingRequest:
    """Is this the service that I mean?"""


class PingResponse:
    def __init__(self, service_name: str, source_address: str) -> None:
        self.service_name = service_name
        self.source_address = source_address


class AckResponse:
    """Understood."""


class HostsUpdatedRequest:
    """The hosts of the job have changed. timestamp: in seconds, of the launcher's clock."""

    def __init__(self, timestamp: int, res: HostUpdateResult = HostUpdateResult.no_update) -> None:
        self.timestamp = timestamp
        self.res = res


class Reader(Protocol):
    def read(self, count: int, /) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> None: ...


_NETWORK = "horovod.runner.common.util.network"
_WORKER = "horovod.runner.elastic.worker"
_BY_NAME: dict[tuple[str, str], Any] = {
    (_NETWORK, "PingRequest"): PingRequest,
    (_NETWORK, "PingResponse"): PingResponse,
    (_NETWORK, "AckResponse"): AckResponse,
    (_WORKER, "HostsUpdatedRequest"): HostsUpdatedRequest,
    (_WORKER, "HostUpdateResult"): HostUpdateResult,
}
_NAMES = {made: name for name, made in _BY_NAME.items()}


class MessageError(ValueError):
    """A message that was not signed with the key, or that is not one of the known kinds."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("copyreg", "_reconstructor"):  # protocols 0 and 1
            return super().find_class(module, name)
        if (module, name) == ("builtins", "object"):
            return object
        try:
            return _BY_NAME[module, name]
        except KeyError:
            raise MessageError(f"a message has an object of {module}.{name}") from None


def _string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data  # BINUNICODE


def _integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data  # LONG1


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, enum.IntFlag):  # as a call of its class
        return _class_of(type(value)) + _integer(int(value)) + b"\x85R"
    return _integer(value)


def _class_of(cls: type) -> bytes:
    module, name = _NAMES[cls]
    return f"c{module}\n{name}\n".encode()


def dumps(message: Any) -> bytes:
    """A pickle of protocol 2 that names Horovod's class. Python's pickler would insist on finding the class
    under that name."""
    fields = b"".join(_string(key) + _value(value) for key, value in vars(message).items())
    state = b"}(" + fields + b"ub" if fields else b""
    return b"\x80\x02" + _class_of(type(message)) + b")\x81" + state + b"."


def loads(data: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except MessageError:
        raise
    except Exception as error:
        raise MessageError(f"a message cannot be read: {error}") from error


def write(stream: Writer, key: bytes, message: Any) -> None:
    body = dumps(message)
    digest = hmac.new(key, body, hashlib.sha256).digest()
    stream.write(digest + _LENGTH.pack(len(body)) + body)
    stream.flush()


def read(stream: Reader, key: bytes) -> Any:
    """Raises MessageError if it is not a message, EOFError if it ends too early."""
    head = _read_all(stream.read, DIGEST_BYTES + _LENGTH.size)
    (length,) = _LENGTH.unpack(head[DIGEST_BYTES:])
    if not 0 < length <= _MOST_BYTES:
        raise MessageError(f"a message of {length} bytes")
    body = _read_all(stream.read, length)
    if not hmac.compare_digest(hmac.new(key, body, hashlib.sha256).digest(), head[:DIGEST_BYTES]):
        raise MessageError("the digest of a message does not fit the key")
    return loads(body)


def _read_all(read_some: Callable[[int], bytes], count: int) -> bytes:
    data = read_some(count)
    if len(data) < count:
        raise EOFError(f"a message ends after {len(data)} of {count} bytes")
    return data
