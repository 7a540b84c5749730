"""A peer behind a slow line is not taken for a dead one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from util import job_environment

NETLAB = Path(__file__).parents[3] / "tools" / "netlab"

# Without a framework: 10 MB take 5 s at 16 Mbit, five times as long as a peer may be silent. While
# both directions are full, pings wait behind data; in the barrier rank 0 waits for an answer to
# what is still in its kernel's send buffer.
SCRIPT = """
import dad.basics as dad
from dad._lib import _core

dad.init()
large = bytes(10_000_000)
for senders in ([0], [0, 1]):
    mine = large if dad.rank() in senders else b""
    shares = _core.gather_bytes("shares", mine, 0)
    assert [len(share) for share in shares] == [len(large) * (r in senders) for r in range(2)]
    _core.barrier()
dad.shutdown()
print("all arrived")
"""


@pytest.fixture
def lab():
    """Two hosts joined by a line of 16 Mbit; their environment."""
    environment = job_environment(NETLAB="dadslow", DAD_TIMEOUT_SECONDS="1")
    up = subprocess.run([NETLAB, "up", "2", "16mbit"], env=environment, capture_output=True, text=True)
    if up.returncode != 0:
        pytest.skip(f"no network namespaces here: {up.stderr.strip()}")
    yield environment
    subprocess.run([NETLAB, "down"], env=environment, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_peer_whose_bytes_arrive_is_not_silent(lab):
    job = subprocess.run(
        [NETLAB, "run", sys.executable, "-c", SCRIPT],
        env=lab,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert job.returncode == 0, job.stdout
    assert job.stdout.count("all arrived") == 2


# The time of the last step is the time at which the line went, within a step.
UNTIL_IT_FAILS = """
import time
import dad.basics as dad
from dad._lib import _core

dad.init()
last = 0.0
try:
    for step in range(1_000_000):
        _core.reduce_zeros("gradient", 1000, 0)
        last = time.monotonic()
        if step == 20:
            print("running", flush=True)
except dad.DadInternalError as error:
    print(f"after {time.monotonic() - last:.2f} s: {error}", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_host_that_vanished_is_named_when_the_timeout_is_over(lab):
    job = subprocess.Popen(
        [NETLAB, "run", sys.executable, "-c", UNTIL_IT_FAILS],
        env=lab | {"DAD_TIMEOUT_SECONDS": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        running = 0
        while running < 2:
            line = job.stdout.readline()
            assert line, "the job has ended"
            running += "running" in line
        subprocess.run([NETLAB, "link", "1", "down"], env=lab, check=True)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    for rank in range(2):
        (seconds,) = re.findall(
            rf"^\[{rank}\] after (\S+) s: rank {1 - rank}: gave no sign of life", output, re.M
        )
        assert 2.5 < float(seconds) < 3 + 2, output
