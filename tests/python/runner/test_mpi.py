"""Jobs under mpirun of Open MPI and MPICH: the transport's contract, and dad in a script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dad

PACKAGE_ROOT = Path(dad.__file__).parents[1]

TRAIN = """
import torch
import dad.torch as hvd

for again in range(2):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for step in range(3):
        for count in (10, 500_000):  # with its header; by MPI, if that is the transport
            total = hvd.allreduce(torch.full((count,), rank + 1.0), name=f"sum.{count}", op=hvd.Sum)
            assert torch.equal(total, torch.full((count,), size * (size + 1) / 2))
        rows = hvd.allgather(torch.full((rank * 50_000, 2), float(rank)), name="rows")
        assert rows.shape[0] == 50_000 * size * (size - 1) // 2
        copy = hvd.broadcast(torch.full((300_000,), float(rank)), root_rank=size - 1, name="copy")
        assert torch.equal(copy, torch.full((300_000,), size - 1.0))
    hvd.shutdown()
print(f"rank {rank} of {size} is done", flush=True)
"""

RAISE = """
import torch
import dad.torch as hvd

hvd.init()
if hvd.rank() == 1:
    raise ValueError("rank 1 has had enough")
hvd.allreduce(torch.ones(500_000), name="never")
"""


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request):
    """Runs a command as `num_ranks` ranks; gives back what subprocess.run does."""
    launcher = shutil.which(f"mpirun.{request.param}")
    if launcher is None:
        pytest.skip(f"no mpirun.{request.param} here: apt install openmpi-bin mpich")
    built = json.loads((PACKAGE_ROOT / "dad/_lib/build_info.json").read_text())["plugins"]
    if f"mpi_{request.param}" not in built:
        pytest.skip(f"dad was built without {request.param}: apt install lib{request.param}-dev")

    def run(num_ranks, *command, **variables):
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [launcher, "-np", str(num_ranks), *command],
            env=os.environ | {"PYTHONPATH": path} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture
def contract(mpirun, source_dir, tmp_path):
    """Runs tests of tests/cpp/mpi, chosen as for --gtest_filter."""
    program = source_dir / "build/tests/cpp/mpi/mpi_contract"
    return lambda num_ranks, tests: mpirun(
        num_ranks, str(program), "--gtest_brief=1", f"--gtest_filter={tests}", DAD_TEST_DIR=str(tmp_path)
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_transport_keeps_its_contract(contract, num_ranks):
    job = contract(num_ranks, "-MpiFault.*")
    assert job.returncode == 0, job.stdout


@pytest.mark.parametrize(
    ("test", "survivors"), [("PeerThatClosesEarlyIsLost", 2), ("PeerThatStopsDoesNotHoldUpClose", 1)]
)
def test_lost_peer_does_not_hang_the_others(contract, test, survivors):
    job = contract(2, f"MpiFault.{test}")
    assert job.stdout.count("survived") == survivors, job.stdout


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_script_runs(mpirun, transport):
    pytest.importorskip("torch")
    job = mpirun(3, sys.executable, "-c", TRAIN, DAD_TRANSPORT=transport)
    assert job.returncode == 0, job.stdout
    for rank in range(3):
        assert f"rank {rank} of 3 is done" in job.stdout


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_one_raise_ends_the_job(mpirun, transport):
    pytest.importorskip("torch")
    job = mpirun(2, sys.executable, "-c", RAISE, DAD_TRANSPORT=transport)
    assert job.returncode != 0
    assert "rank 1 has had enough" in job.stdout
