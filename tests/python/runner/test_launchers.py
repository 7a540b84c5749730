"""The same script under every launcher: the ranks meet and add up."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import dad
from dad.runner.check_build import plugin_status

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
DADRUN = [sys.executable, "-m", "dad.runner.cli"]
SCRIPT = """
import torch
import dad.torch as hvd

for repetition in range(3):
    hvd.init()
    total = hvd.allreduce(torch.arange(5) + hvd.rank(), op=hvd.Sum).tolist()
    size = hvd.size()
    expected = [size * i + size * (size - 1) // 2 for i in range(5)]
    assert total == expected, (total, expected)
    print(f"rank {hvd.rank()} of {size}, local {hvd.local_rank()} of {hvd.local_size()}", flush=True)
    hvd.shutdown()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "add.py"
    path.write_text(SCRIPT)
    return str(path)


def environment(**more):
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, **more}


def run(*command, **variables):
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120, errors="replace"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output, size):
    for rank in range(size):
        assert output.count(f"rank {rank} of {size}, local {rank} of {size}") == 3


def run_with_variables(script, environments):
    """One process per set of variables, as a launcher without a launcher."""
    processes = [
        subprocess.Popen(
            [sys.executable, script], env=environment(**variables), stdout=subprocess.PIPE, text=True
        )
        for variables in environments
    ]
    output = "".join(process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * len(processes)
    return output


def test_dadrun(script):
    check(run(*DADRUN, "-np", "3", sys.executable, script), 3)


def test_torchrun(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    check(run(*command), 2)


def test_plain_torch_variables(script):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    check(run_with_variables(script, [{"RANK": str(rank), **common} for rank in range(2)]), 2)


def test_slurm_variables(script):
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3"}
    common["SLURM_STEP_NODELIST"] = "localhost"
    environments = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **common} for rank in range(2)]
    check(run_with_variables(script, environments), 2)


def test_shared_directory(script, tmp_path):
    report = tmp_path / "report"
    common = {"DAD_SIZE": "2", "DAD_RENDEZVOUS": f"file://{tmp_path}", "DAD_REPORT": str(report)}
    check(run_with_variables(script, [{"DAD_RANK": str(rank), **common} for rank in range(2)]), 2)
    # Three times init() and shutdown() on two ranks, and all of one job.
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(line["rank"] for line in lines) == [0, 0, 0, 1, 1, 1]
    assert len({line["job"] for line in lines}) == 1 and lines[0]["job"]


needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or not plugin_status("mpi")[0],
    reason="no mpirun, or dad has no MPI plug-in",
)


@needs_mpi
@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_mpirun(script, transport):
    command = ["mpirun", "-np", "2", "--host", "localhost:2", sys.executable, script]
    check(run(*command, DAD_TRANSPORT=transport), 2)


@needs_mpi
def test_dadrun_with_mpi(script):
    check(run(*DADRUN, "--mpi", "-np", "2", sys.executable, script), 2)


def test_function_on_every_rank():
    def add():
        import torch

        import dad.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()

    assert dad.run(add, num_proc=2) == [(0, [2.0, 2.0]), (1, [2.0, 2.0])]


def test_doctor_finds_nothing_broken():
    output = run(*DADRUN, "--doctor")
    assert "✗" not in output
    assert "an allreduce between 2 processes: the result is right" in output


def test_doctor_names_what_is_broken_and_how_to_mend_it():
    done = subprocess.run(
        [*DADRUN, "--doctor", "-H", "no-such-host.invalid:1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "✗ no-such-host.invalid: " in done.stdout
    assert "try: ssh " in done.stdout
