"""`dadrun --doctor --gpu`: what CUDA tensors need, step by step, with the next command.

The steps build on each other: after the first that is missing the rest is not tried. Marks are
those of the doctor. See docs/gpu.md for what of this has never run on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from dad.runner.check_build import LIB_DIR, plugin_status, rebuild_command

_OK, _MISSING, _NOTE = "✓", "✗", "–"
_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_NCCL = "libnccl.so.2"


def examine_gpu() -> int:
    """Prints the findings; 0 if CUDA tensors could be exchanged as far as this can tell."""
    for step in (_driver, _runtime, _nccl, _plugin, _kernels):
        there, text = step()
        print(f"{_OK if there else _MISSING} {text}", flush=True)
        if not there:
            print("stopped at the first thing that is missing; docs/gpu.md has the list")
            return 1
    print(f"{_NOTE} CUDA tensors are taken, but none of this has run on a GPU: docs/gpu.md has what to try")
    print("everything that can be looked at is there; next: build/tests/cpp/gpu/dad_gpu_tests")
    return 0


def _driver() -> tuple[bool, str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return False, f"driver: {error}; install NVIDIA's driver until this works: nvidia-smi"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value == 0:
        return False, f"driver: no device (error {code}); look at: nvidia-smi, echo $CUDA_VISIBLE_DEVICES"
    return True, f"driver: {count.value} device{'s' if count.value != 1 else ''}{_names()}"


def _names() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = list(dict.fromkeys(answer.stdout.strip().splitlines()))
    return f" ({'; '.join(lines)})" if answer.returncode == 0 and lines else ""


def _runtime() -> tuple[bool, str]:
    library, where = _load(
        "DAD_CUDART_LIBRARY", _RUNTIMES, "cu*/lib/libcudart.so.1*", "cuda_runtime/lib/libcudart.so.1*"
    )
    if library is None:
        return False, f"CUDA runtime: {where}; pip install nvidia-cuda-runtime"
    return True, f"CUDA runtime: {_version(library.cudaRuntimeGetVersion, 1000, 10)} ({where})"


def _nccl() -> tuple[bool, str]:
    library, where = _load("DAD_NCCL_LIBRARY", (_NCCL,), f"nccl/lib/{_NCCL}")
    if library is None:
        return False, f"NCCL: {where}; pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
    return True, f"NCCL: {_version(library.ncclGetVersion, 10000, 100)} ({where})"


def _plugin() -> tuple[bool, str]:
    there, text = plugin_status("nccl")
    return there, f"plug-in: {text}" if there else f"plug-in: {text}; {rebuild_command()}"


def _kernels() -> tuple[bool, str]:
    path = LIB_DIR / "libdad_cuda.so"
    if not path.exists():
        return False, f"kernels: dad was built without nvcc; with it in PATH: {rebuild_command()}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return False, f"kernels: {error}; {rebuild_command()}"
    version = library.dad_cuda_version()
    return True, f"kernels: compiled by CUDA {version // 1000}.{version % 1000 // 10}"


def _load(variable: str, names: tuple[str, ...], *patterns: str) -> tuple[ctypes.CDLL | None, str]:
    """The library and where it was found, or nothing and why."""
    given = os.environ.get(variable)
    reason = ""
    for name in [given] if given else [*names, *_in_packages(patterns)]:
        try:
            return ctypes.CDLL(name), name
        except OSError as error:
            reason = reason or str(error)
    return None, reason


def _in_packages(patterns: tuple[str, ...]) -> Iterator[str]:
    """In the packages nvidia-* of this interpreter, which no loader knows."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for pattern in patterns:
            yield from map(str, sorted(Path(folder).glob(pattern)))


def _version(ask: Callable[..., int], major: int, minor: int) -> str:
    number = ctypes.c_int(0)
    if ask(ctypes.byref(number)) != 0:
        return "version unknown"
    return f"{number.value // major}.{number.value % major // minor}"
