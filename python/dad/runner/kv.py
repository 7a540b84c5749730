"""Client of the key-value server."""

from __future__ import annotations

import http.client
import os
import time
from urllib.parse import urlsplit

from dad.runner import secret
from dad.runner.rendezvous import HELLO_KEY, HELLO_SCOPE

POLL_SECONDS = 0.02


class RoundOverError(ConnectionError):
    """The launcher of an elastic job says that the awaited key will not come, because a rank was lost."""


class ForeignStoreError(PermissionError):
    """The server, or this process, does not know the secret of the job."""


class KeyValueClient:
    """Talks to `http://HOST:PORT`. One connection per request, as HTTP/1.0 has it.

    key: signs the requests, and answers have to be signed by it (secret.py); None: the key of the job that
    this process belongs to; empty: the server knows no secret.
    """

    def __init__(self, url: str, request_timeout: float = 10.0, key: bytes | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"not a rendezvous address: {url!r} (expected http://HOST:PORT)")
        self.url = url
        self._address = (parts.hostname, parts.port)
        self._timeout = request_timeout
        self.foreign = ""  # why the server found by is_server_of() is not one of this job
        key = secret.key_of_rank(os.environ) if key is None else key
        self._signer = secret.Signer(key) if key else None

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
        """Polls until the key exists or `deadline` (of time.monotonic) has passed."""
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
        except ForeignStoreError as error:
            self.foreign = str(error)
            return False
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, verb: str, scope: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        path, data = f"/{scope}/{key}", body or b""
        if self._signer is None:
            status, answer, _ = self._exchange(verb, path, body, {})
            return status, answer
        for _ in range(2):
            header, signature = self._signer.sign(verb, path, data)
            status, answer, proof = self._exchange(verb, path, body, {secret.HEADER: header})
            if status == http.client.FORBIDDEN:
                raise ForeignStoreError(
                    f"{self.url} does not know the secret of this job: is {secret.FILE_VARIABLE} the same on "
                    "all hosts, or is it the server of another job?"
                )
            if not self._signer.is_answer(proof, signature, status, answer):
                raise ForeignStoreError(f"what {self.url} answers is not signed with the secret of this job")
            if status != http.client.UNAUTHORIZED:
                break
            self._signer.server = answer.decode()  # it has told its name
        return status, answer

    def _exchange(
        self, verb: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes, str]:
        # TLS would wrap the connection here, before anything is sent.
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout)
        try:
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader(secret.HEADER, "")
        finally:
            connection.close()
