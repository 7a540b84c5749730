"""`dadrun --doctor --gpu`: stops at the first thing that is missing, with the next command; its trials
are made here on the host."""

import ctypes
import sys

import pytest

from dad.runner import doctor_gpu
from dad.runner.cli import main

FAKE = doctor_gpu.LIB_DIR.parents[2] / "build/tests/cpp/gpu/libdad_fake_gpu.so"


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def pretend(monkeypatch, *steps):
    for step in steps:
        monkeypatch.setattr(doctor_gpu, f"_{step}", lambda step=step: (True, f"{step}: a fake"))


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_without_a_driver_the_first_step_is_named(capsys):
    assert main(["--doctor", "--gpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗ driver: ")
    assert "nvidia-smi" in lines[0]
    assert len(lines) == 2


@pytest.mark.skipif(not FAKE.exists(), reason="the C++ tests are not built")
def test_with_a_fake_in_place_of_the_libraries_all_steps_are_made(capsys, monkeypatch):
    pretend(monkeypatch, "driver", "kernels", "torch")
    monkeypatch.setattr(doctor_gpu, "_num_devices", lambda: 1)
    monkeypatch.setenv("DAD_CUDART_LIBRARY", str(FAKE))
    monkeypatch.setenv("DAD_NCCL_LIBRARY", str(FAKE))
    assert doctor_gpu.examine_gpu() == 0
    out = capsys.readouterr().out
    assert "✓ CUDA runtime: 13.0" in out
    assert "✓ NCCL: 2.32" in out
    assert "✓ plug-in: " in out
    assert "– one GPU: a job needs two" in out


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
@pytest.mark.skipif(not (doctor_gpu.LIB_DIR / "libdad_cuda.so").exists(), reason="built without nvcc")
def test_kernels_that_the_driver_does_not_run_are_said():
    there, text = doctor_gpu._kernels()
    assert not there
    assert "do not run with this driver (CUDA error " in text
    assert "nvcc in PATH" in text


def test_a_library_that_is_named_and_not_there_is_said(capsys, monkeypatch):
    pretend(monkeypatch, "driver")
    monkeypatch.setenv("DAD_CUDART_LIBRARY", "/nowhere/libcudart.so")
    assert doctor_gpu.examine_gpu() == 1
    out = capsys.readouterr().out
    assert "✗ CUDA runtime: " in out
    assert "/nowhere/libcudart.so" in out
    assert "pip install nvidia-cuda-runtime" in out


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_a_torch_for_the_cpu_is_said_with_what_to_do(capsys, monkeypatch):
    pretend(monkeypatch, "driver", "runtime", "nccl", "plugin", "kernels")
    assert doctor_gpu.examine_gpu() == 1
    assert "install one for CUDA (pytorch.org)" in capsys.readouterr().out


def test_every_stage_of_the_trials_passes_on_the_host(capfd, monkeypatch):
    monkeypatch.setattr(doctor_gpu, "_TRIALS", doctor_gpu._TRIALS[::2])
    more = ("--steps", "3", "--largest-mb", "0.05")
    assert doctor_gpu._try(2, sys.executable, "cpu", *more) == 0
    out = capfd.readouterr().out
    for line in (
        "✓ allreduce, Sum: by way of the host",
        "✓ 40 tensors in one buffer",
        "✓ allgather of unequal rows",
        "✓ alltoall with splits",
        "✓ reducescatter",
        "✓ dad: as one process with the whole batch",
        "✓ vgc: near it, replicas bit-equal",
        "allreduce 0.032 MB",
        "everything works",
    ):
        assert line in out, line
    assert "✗" not in out


def test_a_trial_that_fails_is_named_with_the_next_command(capfd, monkeypatch):
    trial = doctor_gpu._Trial("a stage that is not there", "nonsense", {"SOME": "thing"})
    monkeypatch.setattr(doctor_gpu, "_TRIALS", (trial,))
    assert doctor_gpu._try(2, sys.executable, "cpu") == 1
    out = capfd.readouterr().out
    assert "✗ a stage that is not there: exit code " in out
    assert "next, with more to read: DAD_LOG_LEVEL=debug NCCL_DEBUG=INFO SOME=thing " in out
