"""A job in training, and strangers at its ports: nothing of theirs is stored, and no step is late."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dad
from dad.runner.secret import HEADER
from util import free_ports

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
DADRUN = [sys.executable, "-m", "dad.runner.cli"]

TRAIN = """
import json, os, sys, time
import torch
import dad.torch as hvd

folder = sys.argv[1]
hvd.init()
if hvd.rank() == 0:
    with open(f"{folder}/there.part", "w") as file:
        json.dump({"store": os.environ["DAD_RENDEZVOUS"]}, file)
    os.rename(f"{folder}/there.part", f"{folder}/there")
steps = 0
going_on = torch.ones(1)
while going_on.item():
    begin = time.monotonic()
    total = hvd.allreduce(torch.ones(1000) * (hvd.rank() + 1), name="sum", op=hvd.Sum)
    assert torch.equal(total, torch.full((1000,), 3.0))
    steps += 1
    # A new meeting, whose ports the strangers know, now and then.
    if steps % 20 == 0:
        hvd.shutdown()
        hvd.init()
    time.sleep(0.01)
    going_on = hvd.broadcast(torch.tensor([0.0 if os.path.exists(f"{folder}/over") else 1.0]), 0, name="on")
print(f"rank {hvd.rank()} made {steps} steps", flush=True)
"""


def environment(**more):
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, **more}


def wait_for(path, job, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Attack:
    """Threads that do the same thing again and again, as long as the context."""

    def __init__(self):
        self.count = 0
        self._over = threading.Event()
        self._threads = []

    def begin(self, act):
        def work():
            while not self._over.is_set():
                with contextlib.suppress(OSError, http.client.HTTPException):
                    act()
                    self.count += 1
                time.sleep(0.001)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._over.set()
        for thread in self._threads:
            thread.join(20)


def status_of(port, verb, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(verb, path, body, headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def noise(port, size):
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(os.urandom(size))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that has been attacked on all its ports while it trained: its output, and what strangers saw."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAIN)
    port = free_ports(3)
    running = subprocess.Popen(
        [*DADRUN, "-np", "2", sys.executable, str(folder / "train.py"), str(folder)],
        env=environment(DAD_PORT=str(port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = {"port": port}
    half_open = []
    try:
        wait_for(folder / "there", running)
        seen["store"] = json.loads((folder / "there").read_text())["store"]
        with Attack() as attack:
            seen["put"] = status_of(port, "PUT", "/dad_elastic/stranger", b"mine")
            seen["get"] = status_of(port, "GET", "/dad/hello")
            seen["signed"] = status_of(
                port, "PUT", "/a/b", b"x", {HEADER: f"1 {'a' * 32} 1 - {'b' * 64} {'c' * 64}"}
            )
            attack.begin(lambda: status_of(port, "PUT", "/dad_gloo_1/0", b"an address of ours"))
            attack.begin(lambda: noise(port, 300))
            attack.begin(lambda: noise(port + 1, 300))  # where ranks listen while they meet
            attack.begin(lambda: noise(port + 2, 48))
            for _ in range(100):
                half_open.append(socket.create_connection(("127.0.0.1", port)))
            time.sleep(4.0)
            (folder / "over").touch()
            output, _ = running.communicate(timeout=120)
        seen.update(output=output, code=running.returncode, attacks=attack.count)
        return seen
    finally:
        for connection in half_open:
            connection.close()
        if running.poll() is None:
            running.terminate()
            running.communicate()


def test_strangers_get_403_from_the_store(job):
    assert job["store"].endswith(f":{job['port']}")
    assert (job["put"], job["get"], job["signed"]) == (403, 403, 403)


def test_training_goes_on_to_its_end(job):
    assert job["code"] == 0, job["output"]
    steps = [int(count) for count in re.findall(r"made (\d+) steps", job["output"])]
    assert len(steps) == 2 and min(steps) > 20, job["output"]
    assert job["attacks"] > 100


def test_each_port_names_a_source_once(job):
    named = [line for line in job["output"].splitlines() if "refuses a request from" in line]
    assert len(named) == 1 and "127.0.0.1" in named[0], job["output"]
    by_rank = [line for line in job["output"].splitlines() if "refused a connection from" in line]
    assert 1 <= len(by_rank) <= 2 and len(set(by_rank)) == len(by_rank), job["output"]
    assert "is open" not in job["output"]  # dadrun has made a secret


def test_secret_of_dadrun_and_of_a_file_do_not_fit(tmp_path):
    """Two ranks that were told different secrets: an error that says so, on both, at once."""
    processes = []
    port = free_ports(1)
    for rank in range(2):
        file = tmp_path / f"secret{rank}"
        file.write_bytes(b"0123456789abcde%d" % rank)
        file.chmod(0o600)
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": port, "DAD_SECRET_FILE": file, "DAD_START_TIMEOUT": 8}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", "import dad.basics as dad\ndad.init()"],
                env=environment(**{name: str(value) for name, value in variables.items()}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode for process in processes), outputs
    assert "does not know the secret of this job" in outputs[1], outputs
    assert "0123456789abcde" not in "".join(outputs)


def test_open_job_says_so_once_and_a_file_closes_it(tmp_path):
    """As under torchrun: no launcher of ours."""
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef")
    file.chmod(0o600)
    for more in ({}, {"DAD_SECRET_FILE": str(file)}):
        port = free_ports(1)
        processes = []
        for rank in range(2):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            variables |= {"MASTER_PORT": port}
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "import dad.basics as dad\nfor _ in range(2): dad.init(); dad.shutdown()",
                    ],
                    env=environment(**{name: str(value) for name, value in variables.items()}, **more),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert not any(process.returncode for process in processes), outputs
        assert "".join(outputs).count("is open") == (0 if more else 1), outputs
