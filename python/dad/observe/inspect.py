"""`dad inspect`, and SIGUSR1 to a rank: what all ranks of a running job are doing, in one table.

Every rank listens on a local socket, whose name contains process, rank and job. A client of the same user
that connects gets the table as text. The rank that is asked asks the others through the core, whose worker
threads answer, so the table is complete whatever the main threads are stuck in and on whichever hosts they
are.

The socket is abstract: it has no file, and disappears with the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dad._lib import _core
from dad.observe.table import table

# runner/child.py looks for this name, too.
PREFIX = "dad-rank."
# A rank that does not answer costs the others four seconds.
ANSWER_SECONDS = 8.0
_LONGEST_JOB = 48

_server: _Server | None = None
_server_pid: int | None = None  # the process that it serves


@dataclass(frozen=True)
class Door:
    """Where a rank of this machine can be asked."""

    pid: int
    rank: int
    job: str

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.pid}.{self.rank}.{self.job}"


# ---- on the rank


def serve(job: str) -> None:
    """From now on, the table can be requested; called when ranks have met."""
    global _server, _server_pid
    door = Door(os.getpid(), _core.rank(), re.sub(r"[^\w.-]", "_", job)[:_LONGEST_JOB])
    if _server is not None and _server_pid == os.getpid():
        if _server.door == door:
            return
        _server.close()  # a rank of an elastic job may have another number now
    if _server_pid is None:
        os.register_at_fork(after_in_child=_leave_to_parent)
    _server_pid = os.getpid()
    try:
        _server = _Server(door, job)
    except OSError as error:
        from dad.log import log

        _server = None
        log.debug("dad inspect will not see this rank: %s", error)


def _leave_to_parent() -> None:
    if _server is not None:
        _server.drop()


class _Server:
    def __init__(self, door: Door, job: str) -> None:
        self.door = door
        self._job = job
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{door.name}")
        self._listener.listen(8)
        self._wake, self._waker = os.pipe()
        self._signals = _core.catch_signal(signal.SIGUSR1)
        threading.Thread(target=self._run, name="dad inspect", daemon=True).start()

    def close(self) -> None:
        os.write(self._waker, b".")

    def drop(self) -> None:
        """In a forked child, which has none of its parent's threads."""
        self._listener.close()

    def _run(self) -> None:
        listener = self._listener.fileno()
        poll = select.poll()  # select() takes no descriptor from 1024 on
        for descriptor in [listener, self._wake] + ([self._signals] if self._signals >= 0 else []):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._wake in ready:
                break
            # The engine may end while it is asked: that is the end of one answer, not of this thread.
            with contextlib.suppress(Exception):
                if self._signals in ready and os.read(self._signals, 64):
                    sys.stderr.write(self._table())
                    sys.stderr.flush()
            with contextlib.suppress(Exception):
                if listener in ready:
                    self._answer()
        self._listener.close()
        os.close(self._wake)
        os.close(self._waker)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            if _user_of(connection) in (os.geteuid(), 0):
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(self._table().encode())

    def _table(self) -> str:
        snapshots = _core.inspect()
        if not snapshots or not _core.is_initialized():
            return "dad: this rank has shut down\n"
        return table(snapshots, self._job, _core.rank(), _core.size())


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


# ---- on the asking side


def doors() -> list[Door]:
    """The sockets of all ranks on this machine, ordered by job and rank."""
    found = []
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        if match := re.search(rf" @{re.escape(PREFIX)}(\d+)\.(\d+)\.(\S*)$", line):
            door = Door(int(match[1]), int(match[2]), match[3])
            if door not in found:
                found.append(door)
    return sorted(found, key=lambda door: (door.job, door.rank, door.pid))


def ask(door: Door) -> str:
    """The table of one rank. Raises OSError if it does not answer, or belongs to another user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(f"\0{door.name}")
        if _user_of(connection) not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise PermissionError("it is another user's")
        text = b""
        while more := connection.recv(1 << 16):
            text += more
    if not text:
        raise ConnectionError("it gave no answer")
    return text.decode(errors="replace")


def ancestors(pid: int) -> Iterator[int]:
    """The process itself, its parent, and so on."""
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return


def inspect(job: str | None = None, pid: int | None = None) -> int:
    """Prints the table of one job; returns the exit code."""
    all_doors = doors()
    found = [
        door
        for door in all_doors
        if (job is None or door.job == job) and (pid is None or pid in ancestors(door.pid))
    ]
    jobs = list(dict.fromkeys(door.job for door in found))
    if not jobs:
        if pid is not None:
            print(
                f"dad: process {pid} is no rank on this machine and has started none; if its ranks are on "
                f"other hosts, this makes dadrun print the table: kill -USR1 {pid}",
                file=sys.stderr,
            )
        elif all_doors:
            known = ", ".join(dict.fromkeys(door.job for door in all_doors))
            print(f"dad: no job {job} on this machine; there are {known}", file=sys.stderr)
        else:
            print("dad: no rank of a job runs on this machine", file=sys.stderr)
        return 1
    if len(jobs) > 1:
        print("dad: several jobs run on this machine; name one with --job:", file=sys.stderr)
        for one in jobs:
            ranks = [door for door in found if door.job == one]
            print(f"  {one}  {len(ranks)} ranks here, such as process {ranks[0].pid}", file=sys.stderr)
        return 2
    why = ""
    for door in found:
        try:
            sys.stdout.write(ask(door))
            return 0
        except OSError as error:
            why = f"rank {door.rank} (process {door.pid}): {error}"
    print(f"dad: no rank of job {jobs[0]} answers; {why}", file=sys.stderr)
    return 1
