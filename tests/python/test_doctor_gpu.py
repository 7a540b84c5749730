"""`dadrun --doctor --gpu`: stops at the first thing that is missing, with the next command."""

import ctypes

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


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_without_a_driver_the_first_step_is_named(capsys):
    assert main(["--doctor", "--gpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗ driver: ")
    assert "nvidia-smi" in lines[0]
    assert len(lines) == 2


@pytest.mark.skipif(not FAKE.exists(), reason="the C++ tests are not built")
def test_with_a_fake_in_place_of_the_libraries_all_steps_are_made(capsys, monkeypatch):
    monkeypatch.setattr(doctor_gpu, "_driver", lambda: (True, "driver: a fake"))
    monkeypatch.setattr(doctor_gpu, "_kernels", lambda: (True, "kernels: none"))
    monkeypatch.setenv("DAD_CUDART_LIBRARY", str(FAKE))
    monkeypatch.setenv("DAD_NCCL_LIBRARY", str(FAKE))
    assert doctor_gpu.examine_gpu() == 0
    out = capsys.readouterr().out
    assert "✓ CUDA runtime: 13.0" in out
    assert "✓ NCCL: 2.32" in out
    assert "✓ plug-in: " in out


def test_a_library_that_is_named_and_not_there_is_said(capsys, monkeypatch):
    monkeypatch.setattr(doctor_gpu, "_driver", lambda: (True, "driver: a fake"))
    monkeypatch.setenv("DAD_CUDART_LIBRARY", "/nowhere/libcudart.so")
    assert doctor_gpu.examine_gpu() == 1
    out = capsys.readouterr().out
    assert "✗ CUDA runtime: " in out
    assert "/nowhere/libcudart.so" in out
    assert "pip install nvidia-cuda-runtime" in out
