"""The secret of a job, and signatures made with it.

dadrun makes one for each job, or takes the one in DAD_SECRET_FILE, and gives it to child.py with its orders,
through standard input. child.py keeps it in memory that only its user can open, and leaves the place in the
environment of its rank (DAD_SECRET_FD). Ranks that another launcher has started read DAD_SECRET_FILE.

A request to the key-value server carries

    X-Dad-Auth: 1 CLIENT COUNT SERVER DIGEST SIGNATURE

CLIENT is a random name, COUNT grows with each request of that client, SERVER is the name that the server
has given itself ("-" before the client knows it), DIGEST is the SHA-256 of the body, and SIGNATURE is by the
key of the store. The server checks it before it reads the body, and signs its answer, which names the
request. What was recorded can be used again neither there nor at another server.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping, MutableMapping

FILE_VARIABLE = "DAD_SECRET_FILE"
PLACE_VARIABLE = "DAD_SECRET_FD"
HEADER = "X-Dad-Auth"
FEWEST_BYTES = 16
_MOST_BYTES = 4096
# Before the secret, in the memory that child.py keeps.
MARK = b"dad secret 1\n"
UNKNOWN_SERVER = "-"


class SecretError(ValueError):
    """There should be a secret, but it cannot be read, or other users can read it, too."""


# ---- where it comes from


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def read_file(path: str) -> bytes:
    """The secret in a file, without the newline at its end. Raises SecretError."""
    how = "make one that only you can read, the same on all hosts: head -c 32 /dev/urandom | base64 >FILE"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise SecretError(f"{FILE_VARIABLE}={path}: {error.strerror}; {how}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise SecretError(f"{FILE_VARIABLE}={path}: others may read or change it: chmod 600 {path}")
    if not FEWEST_BYTES <= len(data) <= _MOST_BYTES:
        raise SecretError(
            f"{FILE_VARIABLE}={path} has {len(data)} bytes, not {FEWEST_BYTES} to {_MOST_BYTES}; {how}"
        )
    return data


def of_launcher(environ: Mapping[str, str]) -> bytes:
    """For a job that is to be started. Raises SecretError."""
    path = environ.get(FILE_VARIABLE)
    return read_file(path) if path else new_secret()


def of_rank(environ: Mapping[str, str]) -> bytes:
    """The secret of this process's job; empty if that has none. Raises SecretError."""
    place, path = environ.get(PLACE_VARIABLE), environ.get(FILE_VARIABLE)
    if place:
        try:
            return _read_place(place)
        except SecretError:
            if not path:
                raise  # otherwise dadrun has it from the same file
    return read_file(path) if path else b""


def _read_place(place: str) -> bytes:
    pid, _, descriptor = place.partition(":")
    if not (pid.isdecimal() and descriptor.isdecimal()):
        raise SecretError(f"{PLACE_VARIABLE}={place}: expected PROCESS:DESCRIPTOR, as dadrun sets it")
    # The inherited descriptor, or the parent's, if a process in between has closed the inherited one.
    for owner in ("self", pid):
        path = f"/proc/{owner}/fd/{descriptor}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES + len(MARK))
        except OSError:
            continue
        if data.startswith(MARK):
            return data[len(MARK) :]
    raise SecretError(
        f"the secret of this job is not where dadrun has left it ({PLACE_VARIABLE}={place}): was this "
        f"process started in a container or by another user? {FILE_VARIABLE} is for that (docs/security.md)"
    )


def without_secret(environ: MutableMapping[str, str]) -> None:
    """The variables of a job around this one."""
    environ.pop(PLACE_VARIABLE, None)


# ---- keys derived from it


def store_key(secret: bytes, job: str) -> bytes:
    """The key that signs traffic of the job's key-value server; empty for a job without a secret."""
    return _derived(secret, f"dad store {job}") if secret else b""


def notification_key(secret: bytes, slot: str) -> bytes:
    """The key of the notification service of the worker that was started in this slot."""
    return _derived(secret, f"dad notification {slot}")


def key_of_rank(environ: Mapping[str, str]) -> bytes:
    """The key for requests of this process to the store of its job; empty if that knows no secret."""
    # horovodrun's server knows none.
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ and "DAD_RENDEZVOUS" not in environ:
        return b""
    return store_key(of_rank(environ), environ.get("DAD_JOB_ID", ""))


def _derived(secret: bytes, purpose: str) -> bytes:
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


# ---- requests and answers


class Signer:
    """The client's side. Threads may share it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._pid = 0
        self.server = UNKNOWN_SERVER

    def sign(self, verb: str, path: str, body: bytes) -> tuple[str, str]:
        """The value of the header, and the signature in it, by which the answer is checked."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child is a client of its own
                self._pid, self._client, self._count = os.getpid(), secrets.token_hex(16), 0
            self._count += 1
            place = f"{self._client} {self._count} {self.server}"
        digest = hashlib.sha256(body).hexdigest()
        signature = _request_signature(self._key, verb, path, place, len(body), digest)
        return f"1 {place} {digest} {signature}", signature

    def is_answer(self, proof: str, signature: str, status: int, body: bytes) -> bool:
        return hmac.compare_digest(proof.encode(), sign_answer(self._key, signature, status, body).encode())


def sign_answer(key: bytes, signature: str, status: int, body: bytes) -> str:
    text = f"dad store reply 1\n{signature}\n{status} {len(body)} {hashlib.sha256(body).hexdigest()}\n"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _request_signature(key: bytes, verb: str, path: str, place: str, length: int, digest: str) -> str:
    text = f"dad store request 1\n{verb} {path}\n{place}\n{length} {digest}\n"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


class Refused(Exception):
    """A request that is not one of this job; the text says why."""


class StaleError(Exception):
    """A request of this job by a client that does not know the server's name."""

    def __init__(self, signature: str) -> None:
        super().__init__()
        self.signature = signature


class Verifier:
    """The server's side. For one thread."""

    _FORM = re.compile(r"1 ([0-9a-f]{32}) ([1-9][0-9]{0,18}) (-|[0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})")
    # Requests of one client on several connections may overtake each other by this much.
    _WINDOW = 256
    _MOST_CLIENTS = 1 << 16

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        # By client: the highest count so far, and a bit mask of the counts below it that have arrived.
        self._seen: dict[str, tuple[int, int]] = {}

    def check(self, key: bytes, verb: str, path: str, length: int, header: str) -> tuple[str, str]:
        """The signature of the request and the digest of its body. Raises Refused, StaleError."""
        match = self._FORM.fullmatch(header)
        if match is None:
            raise Refused("it is not signed" if not header else "its signature has another form")
        client, count, server, digest, signature = match.groups()
        place = f"{client} {count} {server}"
        if not hmac.compare_digest(signature, _request_signature(key, verb, path, place, length, digest)):
            raise Refused("it is signed with another key")
        if server != self.name:
            raise StaleError(signature)
        self._note(client, int(count))
        return signature, digest

    def _note(self, client: str, count: int) -> None:
        highest, seen = self._seen.get(client, (0, 0))
        if count > highest:
            seen = (seen << min(count - highest, self._WINDOW) | 1) & ((1 << self._WINDOW) - 1)
            highest, is_new = count, True
        else:
            bit = 1 << (highest - count)
            is_new = highest - count < self._WINDOW and not seen & bit
            seen |= bit if is_new else 0
        self._seen[client] = (highest, seen)
        if len(self._seen) > self._MOST_CLIENTS:
            # All clients must learn the new name; requests signed for the old one are refused.
            self.name = secrets.token_hex(16)
            self._seen.clear()
        if not is_new:
            raise Refused("it was sent before")
