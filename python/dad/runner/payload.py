"""Signed Python objects on their way through the key-value server.

Otherwise anyone who can reach the server could make us unpickle arbitrary data. The key travels in the
environment of the ranks, which only their user can read.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

SECRET_VARIABLE = "DAD_RUN_SECRET"
FUNCTION = ("runfunc", "func")
RESULT_SCOPE = "runfunc_result"
_DIGEST_BYTES = hashlib.sha256().digest_size


def pack(value: Any, secret: str) -> bytes:
    import cloudpickle

    body: bytes = cloudpickle.dumps(value)
    return _digest(body, secret) + body


def unpack(data: bytes, secret: str) -> Any:
    import cloudpickle

    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(body, secret)):
        raise ValueError("a message through the rendezvous server is not signed by this job")
    return cloudpickle.loads(body)


def _digest(body: bytes, secret: str) -> bytes:
    return hmac.new(secret.encode(), body, hashlib.sha256).digest()
