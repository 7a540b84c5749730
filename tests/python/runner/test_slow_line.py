"""A peer behind a slow line is not taken for a dead one."""

from __future__ import annotations

import os
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
