"""Client of the key-value server."""

from __future__ import annotations

import http.client
import time
from urllib.parse import urlsplit

from dad.runner.rendezvous import HELLO_KEY, HELLO_SCOPE

POLL_SECONDS = 0.02


class RoundOverError(ConnectionError):
    """The launcher of an elastic job says that what this rank waits for will not come: a rank was lost."""


class KeyValueClient:
    """Talks to `http://HOST:PORT`. One connection per request, as HTTP/1.0 has it."""

    def __init__(self, url: str, request_timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"not a rendezvous address: {url!r} (expected http://HOST:PORT)")
        self.url = url
        self._address = (parts.hostname, parts.port)
        self._timeout = request_timeout

    def get(self, scope: str, key: str) -> bytes | None:
        status, body = self._request("GET", scope, key)
        if status == http.client.GONE:
            raise RoundOverError(f"{self.url}: this round of the job is over, since a rank was lost or left")
        return body if status == 200 else None

    def put(self, scope: str, key: str, value: bytes) -> None:
        status, _ = self._request("PUT", scope, key, value)
        if status != 200:
            raise OSError(f"{self.url} answered {status} to PUT /{scope}/{key}")

    def wait(self, scope: str, key: str, deadline: float) -> bytes:
        """Polls until the key is there or `deadline` (of time.monotonic) has passed."""
        while True:
            value = self.get(scope, key)
            if value is not None:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"no value for /{scope}/{key} appeared at {self.url} in time")
            time.sleep(POLL_SECONDS)

    def is_server_of(self, token: str) -> bool:
        """Whether one of our servers listens there and serves the job with this token."""
        try:
            return self.get(HELLO_SCOPE, HELLO_KEY) == token.encode()
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, verb: str, scope: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout)
        try:
            connection.request(verb, f"/{scope}/{key}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
