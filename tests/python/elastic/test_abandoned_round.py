"""A rank that dies after it has told the others its address does not keep them waiting."""

import json
import signal
import subprocess
import sys
import time

import pytest

from dad.runner.rendezvous import RendezvousServer
from util import job_environment

SCRIPT = """
import json, sys, time
from dad._lib import _core
from dad.errors import DadInternalError

began = time.monotonic()
try:
    _core.init(json.loads(sys.argv[1]), [])
except DadInternalError as error:
    print(f"{time.monotonic() - began:.1f} {error}", flush=True)
"""


def start(server, rank):
    world = {"rank": rank, "size": 2, "local_rank": rank, "local_size": 2, "cross_rank": 0, "cross_size": 1}
    world |= {"hostname": "localhost", "rendezvous": f"http://127.0.0.1:{server.port}", "generation": "1"}
    world |= {"transport": "gloo", "threads": 0, "plugin_dir": plugin_dir()}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(world)],
        env=job_environment(DAD_GLOO_IFACE="lo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(server, key):
    deadline = time.monotonic() + 60.0
    while (value := server.get("dad_gloo_1", key)) is None:
        assert time.monotonic() < deadline, key
        time.sleep(0.005)
    return value


def plugin_dir():
    from dad.basics import _LIB_DIR

    return str(_LIB_DIR)


@pytest.mark.parametrize("dead", [0, 1])
def test_round_that_is_abandoned_while_ranks_connect_is_left_at_once(dead):
    with RendezvousServer("127.0.0.1") as server:
        dying = start(server, dead)
        # It goes on when it knows the other's host, and then tells its address.
        server.put("dad_gloo_1", f"rank_{1 - dead}", wait_for(server, f"rank_{dead}"))
        wait_for(server, str(dead))
        dying.send_signal(signal.SIGKILL)
        dying.communicate()
        survivor = start(server, 1 - dead)
        wait_for(server, str(1 - dead))
        time.sleep(0.2)
        server.abandon_round()
        began = time.monotonic()
        said = survivor.communicate(timeout=60.0)[0]
        assert time.monotonic() - began < 10.0, said  # not the 60 s of DAD_START_TIMEOUT
        assert "round of the job is over" in said or f"rank {dead}" in said, said
