"""The key-value server, against the protocol of horovodrun's."""

import http.client
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dad.runner.kv import KeyValueClient
from dad.runner.rendezvous import RendezvousServer


@pytest.fixture
def server():
    with RendezvousServer("127.0.0.1") as running:
        yield running


def request(server, verb, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(verb, path, body, headers or {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data, answer


def test_put_get_delete_round_trip_of_binary_values(server):
    value = bytes(range(256)) * 100
    assert request(server, "PUT", "/scope/key", value)[0] == 200
    status, data, answer = request(server, "GET", "/scope/key")
    assert (status, data) == (200, value)
    assert answer.version == 10
    assert answer.getheader("Content-Length") == str(len(value))
    assert request(server, "DELETE", "/scope/key")[0] == 200
    assert request(server, "GET", "/scope/key")[:2] == (404, b"")


def test_empty_value_is_a_value(server):
    assert request(server, "PUT", "/scope/key", b"")[0] == 200
    assert request(server, "GET", "/scope/key")[:2] == (200, b"")


@pytest.mark.parametrize("path", ["/", "/one", "/one/", "/one/two/three", "//two"])
@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE"])
def test_path_without_exactly_two_parts_is_a_bad_request(server, verb, path):
    assert request(server, verb, path, b"x" if verb == "PUT" else None)[0] == 400


def test_put_without_length_is_a_bad_request(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(b"PUT /a/b HTTP/1.0\r\n\r\n")
        assert b" 400 " in raw.recv(1000)


def test_delete_of_what_is_not_there_succeeds(server):
    assert request(server, "DELETE", "/nowhere/key")[0] == 200


def test_token_is_found_under_hello():
    with RendezvousServer("127.0.0.1", token="job 7") as server:
        client = KeyValueClient(f"http://127.0.0.1:{server.port}")
        assert client.is_server_of("job 7")
        assert not client.is_server_of("job 8")
    assert not client.is_server_of("job 7")


def test_many_clients_at_once(server):
    def work(number):
        client = KeyValueClient(f"http://127.0.0.1:{server.port}")
        client.put("many", str(number), str(number).encode())
        return client.wait("many", str((number + 1) % 200), time.monotonic() + 20)

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(work, range(200))) == [str((n + 1) % 200).encode() for n in range(200)]


def test_client_that_says_nothing_does_not_block_the_others(server):
    with socket.create_connection(("127.0.0.1", server.port)):
        assert request(server, "GET", "/a/b")[0] == 404


def test_stop_frees_the_port_and_joins_the_thread():
    before = set(threading.enumerate())  # one of an earlier test may be ending just now
    server = RendezvousServer("127.0.0.1")
    port = server.port
    with pytest.raises(OSError):
        RendezvousServer("127.0.0.1", port)
    server.stop()
    assert set(threading.enumerate()) <= before
    RendezvousServer("127.0.0.1", port).stop()


def test_forked_child_does_not_hold_the_port():
    server = RendezvousServer("127.0.0.1")
    port = server.port
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_wait_names_the_key_that_did_not_come(server):
    client = KeyValueClient(f"http://127.0.0.1:{server.port}")
    with pytest.raises(TimeoutError, match="/scope/never"):
        client.wait("scope", "never", time.monotonic() + 0.05)


def test_after_all_ranks_have_come_only_addresses_that_they_used_are_served():
    with RendezvousServer("") as server:
        ours, other = (KeyValueClient(f"http://127.0.0.{last}:{server.port}") for last in (1, 2))
        ours.put("dad_seats", "0", b"{}")
        other.put("dad_job", "id", b"x")  # a rank it is not
        server.keep_to_ranks("127.0.0.3")
        assert ours.get("dad_job", "id") == b"x"
        assert KeyValueClient(f"http://127.0.0.3:{server.port}").get("dad_job", "id") == b"x"
        with pytest.raises((OSError, http.client.HTTPException)):
            other.get("dad_job", "id")
