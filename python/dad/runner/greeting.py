"""How the launcher of an elastic job and the notification service of a worker prove to each other that they
know the job's secret, before either reads anything else.

The service sends a nonce; the launcher sends a nonce and a proof; the service sends a proof. A proof is
HMAC-SHA256 over both nonces, by the key of the worker's slot (secret.notification_key). The key that signs
later messages is derived likewise, so a recording of one connection is useless on another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

NONCE_BYTES = 32
_LABEL = b"dad notification 1 "


class GreetingError(ValueError):
    """The peer does not know the secret of the job."""


def as_service(read: Callable[[int], bytes], write: Callable[[bytes], object], key: bytes) -> bytes:
    """Returns the key of this connection. Raises GreetingError, and whatever read and write raise."""
    mine = secrets.token_bytes(NONCE_BYTES)
    write(mine)
    nonces = mine + read(NONCE_BYTES)
    _check(read(hashlib.sha256().digest_size), key, b"launcher", nonces)
    write(_proof(key, b"service", nonces))
    return _proof(key, b"messages", nonces)


def as_launcher(read: Callable[[int], bytes], write: Callable[[bytes], object], key: bytes) -> bytes:
    """The other side of as_service()."""
    nonces = read(NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    nonces += mine
    write(mine + _proof(key, b"launcher", nonces))
    _check(read(hashlib.sha256().digest_size), key, b"service", nonces)
    return _proof(key, b"messages", nonces)


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, _LABEL + who + nonces, hashlib.sha256).digest()


def _check(proof: bytes, key: bytes, who: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, who, nonces)):
        raise GreetingError("it does not prove that it knows the secret of this job")
