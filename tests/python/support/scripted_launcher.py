"""A small elastic launcher for tests: starts workers on this machine, and makes a new round where the test says
so or where a worker is lost. It speaks Horovod's protocol, and knows nothing of dadrun's driver."""

from __future__ import annotations

import base64
import http.server
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dad.elastic import wire
from dad.elastic.wire import HostUpdateResult


class Launcher:
    """workers: slot -> process. Slots are "<host>:<local rank>"; hosts are only names.

    respawn: a lost worker is started again in its slot, in the round that its loss brings about.
    """

    def __init__(
        self, command: list[str], slots: list[str], respawn: bool = False, **environment: str
    ) -> None:
        self._command = command
        self._environment = environment
        self._respawn = respawn
        self._lock = threading.Condition()
        self._store: dict[str, bytes] = {}
        self._ready: set[str] = set()  # for the next round
        self.slots = list(slots)  # of the next round
        self.current: list[str] = []
        self.round = 0
        self._is_stopping = False
        self.logs: dict[str, list[str]] = {}
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.services: dict[str, Any] = {}
        self.exits: dict[str, int] = {}
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        with self._lock:
            self._begin_round()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    # Rounds

    def _places(self) -> dict[str, tuple[int, ...]]:
        hosts = list(dict.fromkeys(slot.split(":")[0] for slot in self.current))
        ordered = [slot for host in hosts for slot in self.current if slot.split(":")[0] == host]
        places = {}
        for rank, slot in enumerate(ordered):
            mates = [s for s in ordered if s.split(":")[0] == slot.split(":")[0]]
            local = mates.index(slot)
            across = [h for h in hosts if sum(s.split(":")[0] == h for s in ordered) > local]
            places[slot] = (
                rank,
                len(ordered),
                local,
                len(mates),
                across.index(slot.split(":")[0]),
                len(across),
            )
        return places

    def _begin_round(self) -> None:
        self.round += 1
        if not self._respawn:
            self.slots = [slot for slot in self.slots if not self._has_failed(slot)]
        self.current = list(self.slots)
        self._store.clear()
        self._ready.clear()
        for slot in self.current:
            if slot not in self.workers or self.workers[slot].poll() is not None:
                self._start(slot)
        self._lock.notify_all()

    def _has_failed(self, slot: str) -> bool:
        return slot in self.workers and self.workers[slot].poll() not in (None, 0)

    def _start(self, slot: str) -> None:
        host, local = slot.split(":")
        place = self._places()[slot]
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        variables = {f"HOROVOD_{name}": str(value) for name, value in zip(names, place, strict=True)}
        variables |= {
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_ELASTIC": "1",
            "PYTHONUNBUFFERED": "1",
            "DAD_LOG_LEVEL": "INFO",
            "DAD_START_TIMEOUT": "300",  # a worker that is started again imports its framework first
        }
        process = subprocess.Popen(
            self._command,
            env={**os.environ, **variables, **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.workers[slot] = process
        lines = self.logs.setdefault(slot, [])
        threading.Thread(target=self._watch, args=(slot, process, lines), daemon=True).start()

    def _watch(self, slot: str, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                lines.append(line.rstrip())
                self._lock.notify_all()
        code = process.wait()
        with self._lock:
            if self.workers.get(slot) is process:
                self.exits[slot] = code
            self._begin_round_if_all_are_ready()
            self._lock.notify_all()

    def _begin_round_if_all_are_ready(self) -> None:
        alive = [slot for slot in self.current if self.workers[slot].poll() is None]
        if self._ready and not self._is_stopping and all(slot in self._ready for slot in alive):
            self._begin_round()

    def rank_and_size(self, slot: str) -> bytes:
        with self._lock:
            asked_in = self.round
            self._ready.add(slot)
            self._begin_round_if_all_are_ready()
            self._lock.wait_for(lambda: self.round > asked_in)
            place = self._places().get(slot, (-1,) * 6)
            return ",".join(map(str, place)).encode()

    # The store

    def get(self, path: str) -> bytes | None:
        _, scope, key = path.split("/")
        if scope == "rank_and_size":
            return self.rank_and_size(key)
        with self._lock:
            return self._store.get(path)

    def put(self, path: str, value: bytes) -> None:
        _, scope, key = path.split("/")
        if scope == "worker_addresses":
            self.services[key] = pickle.loads(base64.b64decode(value))
        with self._lock:
            self._store[path] = value

    # For tests

    def change(self, slots: list[str], result: HostUpdateResult) -> None:
        """The hosts have changed: rank 0 is told, and the next round has these slots."""
        with self._lock:
            self.slots = list(slots)
            for slot in filter(self._has_failed, slots):
                del self.workers[slot], self.exits[slot]
            first = self.current[0]
            self._lock.wait_for(lambda: first in self.services, 60)
        addresses, key = self.services[first]
        address = next(iter(addresses.values()))[0]
        with (
            socket.create_connection(address, timeout=10) as connection,
            connection.makefile("rwb") as stream,
        ):
            wire.write(stream, key, wire.HostsUpdatedRequest(int(time.time()), result))
            assert isinstance(wire.read(stream, key), wire.AckResponse)

    def wait_for_line(self, text: str, count: int = 1, timeout: float = 90) -> None:
        """Until so many lines of all workers have it."""
        with self._lock:
            came = self._lock.wait_for(lambda: len(self.lines(text)) >= count, timeout)
        assert came, f"{count} lines with {text!r} have not come:\n{self.output()}"

    def wait(self, timeout: float = 60) -> dict[str, int]:
        """Until all workers have ended; how they did."""
        with self._lock:
            over = self._lock.wait_for(
                lambda: (
                    all(w.poll() is not None for w in self.workers.values())
                    and len(self.exits) >= len(self.workers)
                ),
                timeout,
            )
        assert over, f"workers have not ended:\n{self.output()}"
        return self.exits

    def lines(self, text: str) -> list[str]:
        return [line for lines in self.logs.values() for line in lines if text in line]

    def output(self) -> str:
        return "\n".join(f"{slot}: {line}" for slot, lines in self.logs.items() for line in lines)

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            for worker in self.workers.values():
                worker.kill()
        for worker in self.workers.values():
            worker.wait()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        value = self.server.launcher.get(self.path)
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def do_PUT(self) -> None:
        self.server.launcher.put(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_: object) -> None:
        pass


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).parents[1] / "elastic" / script), *arguments]
