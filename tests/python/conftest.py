"""What all Python tests share: an environment in which nothing was launched yet."""

import os
import subprocess
import sys

import pytest

# By which a launcher tells a worker its place (docs/launching.md), and settings of dad.
LAUNCHERS = ("DAD_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC_")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_configure(config):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in TORCHRUN:
            del os.environ[name]
    # Ranks share the cores of one machine.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Open MPI refuses both by default: tests run as root in containers, with more ranks than cores.
    os.environ["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
    os.environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    os.environ["OMPI_MCA_rmaps_base_oversubscribe"] = "1"


@pytest.fixture
def source_dir(pytestconfig):
    return pytestconfig.rootpath


@pytest.fixture(scope="session")
def real_horovod(pytestconfig):
    """The launcher of horovod 0.28.1, fetched once and kept in pytest's cache."""
    place = pytestconfig.cache.mkdir("horovod-0.28.1")
    if not (place / "bin" / "horovodrun").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--disable-pip-version-check", "--target", str(place), "horovod==0.28.1"]
        environment = os.environ | {"HOROVOD_SKIP_COMPILE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        if done.returncode != 0:
            pytest.skip(f"horovod cannot be fetched: {done.stderr[-300:]}")
    return place
