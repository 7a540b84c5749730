"""A peer that is killed or stopped: every other rank raises, in bounded time, and names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

RANKS = 3
VICTIM = 1
# Trains until it fails; says when it is in full swing, and how it ended.
WORKER = """
import time, torch
import dad.torch as hvd
hvd.init()
tensor = torch.ones(300_000)
try:
    for step in range(1_000_000):
        hvd.allreduce_(tensor, name="gradient")
        if step == 20:
            print("running", flush=True)
except hvd.HorovodInternalError as error:
    print("raised", time.time(), error, flush=True)
try:
    hvd.allreduce_(tensor, name="gradient")
except hvd.HorovodInternalError as error:
    print("again", error, flush=True)
hvd.shutdown()
print("end", flush=True)
"""


@pytest.fixture
def ranks(tmp_path):
    """Started without a launcher, which would end the survivors."""
    processes = []
    for rank in range(RANKS):
        environment = dict(
            os.environ,
            DAD_RANK=str(rank),
            DAD_SIZE=str(RANKS),
            DAD_LOCAL_RANK=str(rank),
            DAD_LOCAL_SIZE=str(RANKS),
            DAD_CROSS_RANK="0",
            DAD_CROSS_SIZE="1",
            DAD_RENDEZVOUS=f"file://{tmp_path}",
            DAD_TIMEOUT_SECONDS="3",
            OMP_NUM_THREADS="1",
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(("how", "seconds"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 3 + 5)])
def test_survivors_raise_in_time_and_name_the_rank(ranks, how, seconds):
    for process in ranks:
        assert process.stdout.readline() == "running\n"
    start = time.time()
    ranks[VICTIM].send_signal(how)
    for rank, process in enumerate(ranks):
        if rank == VICTIM:
            continue
        output, _ = process.communicate(timeout=60)
        raised, again, end = output.splitlines()
        word, at, message = raised.split(" ", 2)
        assert word == "raised"
        assert float(at) - start < seconds
        assert f"rank {VICTIM}" in message
        assert again.startswith("again") and f"rank {VICTIM}" in again
        assert end == "end"
        assert process.returncode == 0
