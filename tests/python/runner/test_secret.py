"""The secret of a job: where it comes from, what is signed with it, and what strangers get."""

import http.client
import os
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from dad.runner import greeting, http_front, secret
from dad.runner.kv import ForeignStoreError, KeyValueClient
from dad.runner.rendezvous import RendezvousServer
from elastic_job import wait_until

SECRET = b"the secret of a test"
KEY = secret.store_key(SECRET, "job")


@pytest.fixture
def server():
    with RendezvousServer("127.0.0.1", secret=SECRET, job="job") as running:
        yield running


def url(server):
    return f"http://127.0.0.1:{server.port}"


def raw(server, data, seconds=5.0):
    """What comes back for these bytes, until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
        except ConnectionResetError:
            pass
        return received


def head(verb, path, *lines, body=b""):
    return "\r\n".join([f"{verb} {path} HTTP/1.0", *lines, "", ""]).encode() + body


# ---- where it comes from


def test_file_has_to_be_private_and_long_enough(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    assert secret.read_file(str(file)) == b"0123456789abcdef"
    file.chmod(0o604)
    with pytest.raises(secret.SecretError, match="chmod 600"):
        secret.read_file(str(file))
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(secret.SecretError, match="5 bytes"):
        secret.read_file(str(file))
    with pytest.raises(secret.SecretError, match="No such file"):
        secret.of_rank({"DAD_SECRET_FILE": str(tmp_path / "nowhere")})


def test_without_a_launcher_and_a_file_there_is_none():
    assert secret.of_rank({}) == b"" and secret.key_of_rank({}) == b""
    assert len(secret.of_launcher({})) == 32 and secret.of_launcher({}) != secret.of_launcher({})


def test_store_of_horovodrun_knows_no_secret(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    environ = {"DAD_SECRET_FILE": str(file), "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    assert secret.of_rank(environ) == SECRET
    assert secret.key_of_rank(environ) == b""
    assert secret.key_of_rank(environ | {"DAD_RENDEZVOUS": "http://127.0.0.1:1"}) != b""


READ = "import os, sys; from dad.runner import secret; sys.stdout.buffer.write(secret.of_rank(os.environ))"


def test_rank_and_what_it_starts_find_what_child_was_given_and_nobody_sees_it(tmp_path):
    from dad.runner import remote

    again = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {READ!r}], check=True)"
    seen = "; import time; open(sys.argv[1], 'w').close(); time.sleep(30)"
    child = remote.start_local(
        [sys.executable, "-c", READ + ";sys.stdout.flush();" + again + seen, str(tmp_path / "there")],
        dict(os.environ),
        os.getcwd(),
        secret=SECRET,
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "there").exists():
            assert time.monotonic() < deadline and child.poll() is None, child.stderr.read()
            time.sleep(0.02)
        (rank,) = subprocess.run(
            ["pgrep", "-P", str(child.pid)], capture_output=True, text=True
        ).stdout.split()
        for process in (child.pid, rank):
            for place in ("cmdline", "environ"):
                with open(f"/proc/{process}/{place}", "rb") as file:
                    assert SECRET not in file.read()
        with open(f"/proc/{rank}/environ", "rb") as file:
            place = next(e for e in file.read().split(b"\0") if e.startswith(b"DAD_SECRET_FD="))
        # This process is of the same user, so it may look.
        descriptor = place.decode().partition("=")[2].partition(":")[2]
        assert os.stat(f"/proc/{rank}/fd/{descriptor}").st_uid == os.getuid()
        assert not stat.S_ISFIFO(os.stat(f"/proc/{rank}/fd/{descriptor}").st_mode)
    finally:
        child.stdin.close()
        out = child.stdout.read()
        child.wait()
    assert out == SECRET * 2  # that of the rank, and that of a process whose descriptors were closed


def test_place_that_is_gone_is_an_error_that_names_the_cure(tmp_path):
    """As in a container, where a file can be mounted instead: dadrun has the secret from there, too."""
    gone = {"DAD_SECRET_FD": f"{os.getpid()}:987"}
    with pytest.raises(secret.SecretError, match="DAD_SECRET_FILE"):
        secret.of_rank(gone)
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    assert secret.of_rank(gone | {"DAD_SECRET_FILE": str(file)}) == SECRET


# ---- the store


def test_who_has_the_key_is_served(server):
    client = KeyValueClient(url(server), key=KEY)
    client.put("a", "b", b"\0value")
    client.put("a", "empty", b"")
    assert client.get("a", "b") == b"\0value" and client.get("a", "empty") == b""
    assert client.get("a", "c") is None
    assert KeyValueClient(url(server), key=KEY).get("a", "b") == b"\0value"
    assert server.num_refused == 0


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE", "POST"])
def test_stranger_gets_403_and_changes_nothing(server, verb):
    server.put("a", "b", b"ours")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(verb, "/a/b", b"x" * 100_000 if verb == "PUT" else None)
    assert connection.getresponse().status == 403
    connection.close()
    assert server.get("a", "b") == b"ours"
    assert server.num_refused == 1


def test_other_keys_other_jobs_and_open_clients_are_refused(server):
    for key in (b"another key", secret.store_key(SECRET, "another job"), secret.store_key(b"x", "job")):
        client = KeyValueClient(url(server), key=key)
        with pytest.raises(ForeignStoreError, match="DAD_SECRET_FILE"):
            client.put("a", "b", b"x")
    assert server.get("a", "b") is None


def test_client_with_a_key_does_not_believe_an_open_server():
    with RendezvousServer("127.0.0.1") as other, pytest.raises(ForeignStoreError, match="not signed"):
        KeyValueClient(url(other), key=KEY).get("a", "b")


def recorded(server, signer, verb, path, body=b""):
    header, signature = signer.sign(verb, path, body)
    lines = [f"Content-Length: {len(body)}", f"{secret.HEADER}: {header}"]
    return head(verb, path, *lines, body=body), signature


def test_replayed_request_is_refused_by_this_server_and_by_another(server):
    signer = secret.Signer(KEY)
    first, _ = recorded(server, signer, "PUT", "/a/b", b"1")
    answer = raw(server, first)
    assert answer.startswith(b"HTTP/1.0 401 ")
    signer.server = answer.rpartition(b"\r\n\r\n")[2].decode()
    put, _ = recorded(server, signer, "PUT", "/a/b", b"2")
    assert raw(server, put).startswith(b"HTTP/1.0 200 ")
    server.put("a", "b", b"later")
    assert raw(server, put).startswith(b"HTTP/1.0 403 ")
    assert raw(server, first).startswith(b"HTTP/1.0 401 ")
    assert server.get("a", "b") == b"later"
    with RendezvousServer("127.0.0.1", secret=SECRET, job="job") as second:
        assert raw(second, put).startswith(b"HTTP/1.0 401 ")
        assert second.get("a", "b") is None


def test_changed_request_is_refused(server):
    signer = secret.Signer(KEY)
    KeyValueClient(url(server), key=KEY).get("a", "b")
    answer = raw(server, recorded(server, signer, "GET", "/a/b")[0])
    signer.server = answer.rpartition(b"\r\n\r\n")[2].decode()
    for change in (
        (b"PUT", b"DELETE"),
        (b"/a/b", b"/a/c"),
        (b"Length: 5", b"Length: 4"),
        (b"hello", b"HELLO"),
    ):
        request, _ = recorded(server, signer, "PUT", "/a/b", b"hello")
        assert raw(server, request.replace(*change, 1)).startswith(b"HTTP/1.0 403 "), change
    assert server.get("a", "b") is None and server.get("a", "c") is None


def test_counts_may_overtake_each_other_but_not_come_twice():
    verifier, signer = secret.Verifier(), secret.Signer(KEY)
    signer.server = verifier.name
    headers = [signer.sign("GET", "/a/b", b"")[0] for _ in range(600)]
    for index in (3, 1, 2, 0, 300, 299, 599):
        verifier.check(KEY, "GET", "/a/b", 0, headers[index])
    for index in (3, 0, 300, 599, 200):  # the last one is too old to tell
        with pytest.raises(secret.Refused, match="sent before"):
            verifier.check(KEY, "GET", "/a/b", 0, headers[index])


def test_full_memory_of_clients_makes_a_new_name_and_no_replay(monkeypatch):
    monkeypatch.setattr(secret.Verifier, "_MOST_CLIENTS", 3)
    verifier = secret.Verifier()
    seen = []
    for _ in range(4):
        signer = secret.Signer(KEY)
        signer.server = verifier.name
        seen.append(signer.sign("GET", "/a/b", b"")[0])
        verifier.check(KEY, "GET", "/a/b", 0, seen[-1])
    for header in seen:
        with pytest.raises(secret.StaleError):
            verifier.check(KEY, "GET", "/a/b", 0, header)


def test_body_is_not_read_before_the_signature_is_checked(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head("PUT", "/a/b", "Content-Length: 1000000000"))
        assert connection.recv(100).startswith(b"HTTP/1.0 403 ")  # and not after a gigabyte


# ---- bounds


def test_endless_head_and_noise_are_refused_at_once(server):
    assert raw(server, b"GET /" + b"x" * 20_000).startswith(b"HTTP/1.0 400 ")
    assert raw(server, os.urandom(200) + b"\r\n\r\n").startswith(b"HTTP/1.0 400 ")
    assert raw(server, b"\x16\x03\x01 a TLS client\r\n\r\n").startswith(b"HTTP/1.0 400 ")
    assert server.num_refused == 3


def test_half_open_and_slow_connections_give_way_and_time_out(server, monkeypatch):
    monkeypatch.setattr(http_front, "MOST_WAITING", 8)
    threads = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    client = KeyValueClient(url(server), key=KEY)
    client.put("a", "b", b"still served")
    assert client.get("a", "b") == b"still served"
    # Only a request with a signature gets a thread, which ends soon after its answer.
    wait_until(lambda: threading.active_count() == threads)
    assert server.num_refused >= 32
    for connection in idle:
        connection.close()
    monkeypatch.setattr(http_front, "HEAD_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
        begin = time.monotonic()
        with pytest.raises(OSError):
            while True:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begin < 5


def test_source_is_named_once(server, caplog):
    for _ in range(5):
        raw(server, head("GET", "/a/b"))
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 1 and "127.0.0.1" in named[0] and "not signed" in named[0]
    server.stop()
    assert caplog.records[-1].getMessage() == "the rendezvous server has refused 5 requests"


# ---- notifications


def greet(key_of_service, key_of_launcher):
    ours, theirs = socket.socketpair()
    result = []

    def serve():
        with theirs, theirs.makefile("rb") as reader:
            try:
                result.append(greeting.as_service(reader.read, theirs.sendall, key_of_service))
            except greeting.GreetingError as error:
                result.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with ours, ours.makefile("rb") as reader:
        try:
            result.append(greeting.as_launcher(reader.read, ours.sendall, key_of_launcher))
        except greeting.GreetingError as error:
            result.append(error)
    thread.join(10)
    return result


def test_launcher_and_service_agree_on_a_key_of_this_connection_alone():
    key = secret.notification_key(SECRET, "host:0")
    first, second = greet(key, key), greet(key, key)
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0]
    for outcome in greet(key, secret.notification_key(SECRET, "host:1")):
        assert isinstance(outcome, greeting.GreetingError)
