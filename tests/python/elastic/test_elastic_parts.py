"""Parts of elastic launches: the discovery script, the endpoints, the client of the notification service."""

import base64
import contextlib
import hmac
import http.client
import os
import pickle
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import pytest

from dad.elastic import notification
from dad.runner.elastic import notify
from dad.runner.elastic.discovery import DiscoveryError, NotRunnableError, Script, Watcher
from dad.runner.elastic.endpoints import REMOVED, Endpoints
from dad.runner.elastic.placement import Seat
from dad.runner.hosts import Host
from dad.runner.kv import KeyValueClient, RoundOverError
from dad.runner.rendezvous import RendezvousServer
from dad.runner.secret import notification_key

# ---- discovery


def script(folder, text):
    path = folder / "hosts.sh"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_script_names_hosts_with_and_without_slots(tmp_path):
    path = script(tmp_path, "echo 'a:2'; echo; echo b; echo '# c:3'")
    assert Script(path, default_slots=4).find() == [Host("a", 2), Host("b", 4)]
    assert Script(script(tmp_path, "true"), 1).find() == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo oh no >&2; exit 3", "ended with code 3: oh no"),
        ("echo a:zero", '"a:zero" is not a host'),
        ("sleep 600 & sleep 600", "has not ended within 0.5 s"),
    ],
)
def test_script_that_fails_says_why(tmp_path, text, reason):
    with pytest.raises(DiscoveryError, match=reason):
        Script(script(tmp_path, text), 1, seconds=0.5).find()


def test_script_that_is_not_there_is_told_apart():
    with pytest.raises(NotRunnableError, match="No such file"):
        Script("/nowhere/hosts.sh", 1).find()


def test_error_of_the_script_is_said_once_and_its_end_too(tmp_path):
    found, said = [], []
    watcher = Watcher(Script(script(tmp_path, "exit 1"), 1), found.append, said.append)
    for _ in range(3):
        watcher.look()
    script(tmp_path, "echo a")
    watcher.look()
    watcher.look()
    assert [("stay as they were" in text, "works again" in text) for text in said] == [
        (True, False),
        (False, True),
    ]
    assert found == [[Host("a", 1)]] * 2


# ---- endpoints


@pytest.fixture
def server():
    with RendezvousServer("127.0.0.1") as running:
        yield running


def url(server):
    return f"http://127.0.0.1:{server.port}"


def test_place_is_answered_when_it_is_known(server):
    asked = threading.Event()
    endpoints = Endpoints(server, lambda _seat: asked.set(), lambda _seat, _address: None)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(KeyValueClient(url(server)).get, "rank_and_size", "a:1")
        assert asked.wait(10)
        assert endpoints.is_waiting(Seat("a", 1)) and not endpoints.is_waiting(Seat("a", 0))
        assert endpoints.answer(Seat("a", 1), REMOVED)
        assert answer.result(10) == b"-1,-1,-1,-1,-1,-1"
    assert not endpoints.answer(Seat("a", 1), "nobody is there")


def test_client_that_hangs_up_does_not_wait_any_more(server):
    asked = threading.Event()
    endpoints = Endpoints(server, lambda _seat: asked.set(), lambda _seat, _address: None)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/rank_and_size/a:1")
    assert asked.wait(10)
    assert endpoints.is_waiting(Seat("a", 1))
    connection.close()
    deadline = time.monotonic() + 10
    while endpoints.is_waiting(Seat("a", 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    endpoints.hang_up()


def test_new_round_forgets_what_the_ranks_have_left(server):
    client = KeyValueClient(url(server))
    for scope in ("global", "dad_elastic", "runfunc"):
        client.put(scope, "key", b"x")
    server.abandon_round()
    assert client.get("global", "key") == b"x"
    with pytest.raises(RoundOverError, match="this round of the job is over"):
        client.get("global", "missing")
    server.begin_round()
    assert client.get("global", "key") is None
    assert client.get("dad_elastic", "key") == client.get("runfunc", "key") == b"x"


# ---- notification


class Horovod:
    """A service as Horovod's worker has it, with classes of Horovod's names."""

    def __init__(self, key=b"k" * 32, reply_key=None, reply="PingResponse"):
        self.key, self.seen = key, []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                head = self.rfile.read(36)
                if len(head) < 36:
                    return
                body = self.rfile.read(struct.unpack("i", head[32:])[0])
                if hmac.digest(key, body, sha256) != head[:32]:
                    return
                outer.seen.append(body)
                answer = b"\x80\x02chorovod.runner.common.util.network\n" + reply.encode() + b"\n)\x81."
                self.wfile.write(hmac.digest(reply_key or key, answer, sha256))
                self.wfile.write(struct.pack("i", len(answer)) + answer)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def address(self, key=None):
        packet = ({"lo": [self.server.server_address]}, key or self.key)
        return notify.parse_address(base64.b64encode(pickle.dumps(packet)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


READ = """
import enum, pickle, sys, types
for name in ("common", "common.util", "common.util.network", "elastic", "elastic.worker"):
    sys.modules["horovod.runner." + name] = types.ModuleType(name)
sys.modules["horovod"] = types.ModuleType("horovod"); sys.modules["horovod.runner"] = types.ModuleType("runner")
class HostUpdateResult(enum.IntFlag):
    no_update = 0; removed = 1; added = 2; mixed = 3
class HostsUpdatedRequest:
    def __init__(self, timestamp, res): raise AssertionError("unpickling calls no constructor")
worker = sys.modules["horovod.runner.elastic.worker"]
worker.HostUpdateResult, worker.HostsUpdatedRequest = HostUpdateResult, HostsUpdatedRequest
asked = pickle.loads(sys.stdin.buffer.read())
print(type(asked).__name__, asked.timestamp, asked.res.name)
"""


def test_news_are_pickles_that_horovod_can_read():
    with Horovod(reply="AckResponse") as service:
        assert notify.tell_hosts_updated(service.address(), 1763496000, notify.ADDED, 5.0)
        done = subprocess.run([sys.executable, "-c", READ], input=service.seen[0], capture_output=True)
    assert done.stdout.decode().split() == ["HostsUpdatedRequest", "1763496000", "added"], (
        done.stderr.decode()
    )


def test_service_that_answers_is_told_from_one_that_cannot():
    with Horovod() as service:
        assert notify.ping(service.address(), 5.0)
        assert not notify.ping(service.address(key=b"w" * 32), 5.0)
        address = service.address()
    assert not notify.ping(address, 0.5)
    with Horovod(reply_key=b"w" * 32) as stranger:
        assert not notify.ping(stranger.address(), 5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = notify.WorkerAddress((silent.getsockname(),), b"k" * 32)
        assert not notify.ping(mute, 0.2)


def test_address_that_is_no_address_is_refused():
    class Evil:
        def __reduce__(self):
            return print, ("run by unpickling",)

    for value in (b"", b"no base64!", base64.b64encode(b"x"), base64.b64encode(pickle.dumps(({}, b"k")))):
        with pytest.raises(ValueError):
            notify.parse_address(value)
    with pytest.raises(ValueError, match="has no place here"):
        notify.parse_address(base64.b64encode(pickle.dumps(Evil())))


# ---- notification, where the job has a secret


@pytest.fixture
def private_service(tmp_path, monkeypatch):
    """The service of a worker of dadrun, and what the launcher knows of it."""
    file = tmp_path / "secret"
    file.write_bytes(b"the secret of a job")
    file.chmod(0o600)
    registered = []
    with RendezvousServer("127.0.0.1", secret=b"the secret of a job", job="job") as server:
        Endpoints(server, lambda _seat: None, lambda _seat, address: registered.append(address))
        for name, value in {
            "DAD_SECRET_FILE": str(file),
            "DAD_JOB_ID": "job",
            "DAD_ELASTIC": "1",
            "DAD_RENDEZVOUS": url(server),
            "DAD_GLOO_IFACE": "lo",
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "DAD_SECRET_FD"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(notification, "own_slot", lambda _environ: "a:0")
        manager = notification.WorkerNotificationManager()
        manager.init()
        yield manager, registered[0]
        manager._server.shutdown()
        manager._server.server_close()


def test_key_of_a_service_does_not_travel_and_its_launcher_is_heard(private_service):
    manager, address = private_service
    assert address.key == b""
    key = notification_key(b"the secret of a job", "a:0")
    known = replace(address, key=key, greets=True)
    news = []

    class Listener:
        def on_hosts_updated(self, *what):
            news.append(what)

    manager.register_listener(Listener())
    assert notify.ping(known, 5.0)
    assert notify.tell_hosts_updated(known, 7, notify.ADDED, 5.0) and news == [(7, notify.ADDED)]
    assert not notify.ping(replace(known, key=b"k" * 32), 5.0)
    assert not notify.ping(replace(known, greets=False), 0.5)  # signed, but for no connection


def test_strangers_at_a_service_give_way(private_service, caplog):
    manager, address = private_service
    known = replace(address, key=notification_key(b"the secret of a job", "a:0"), greets=True)
    threads = threading.active_count()
    idle = [socket.create_connection(address.addresses[0]) for _ in range(100)]
    for connection in idle[::2]:
        with contextlib.suppress(OSError):
            connection.sendall(os.urandom(64))
    assert notify.ping(known, 10.0)
    assert threading.active_count() <= threads + notification._MOST_CONNECTIONS + 2
    for connection in idle:
        connection.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert manager._server.num_refused >= 50
    assert sum("refuses a request from" in record.getMessage() for record in caplog.records) == 1
