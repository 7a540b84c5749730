"""`dadrun --doctor --gpu`: checks step by step what CUDA tensors need, and runs a job on the GPUs.

The steps build on each other: after the first that fails the rest is not tried, and the next command is
named. Marks are those of the doctor. docs/gpu.md lists what has never run on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dad.libraries import LIB_DIR
from dad.runner.check_build import framework_status, plugin_status, rebuild_command

_OK, _MISSING, _NOTE = "✓", "✗", "–"
_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_NCCL = "libnccl.so.2"


@dataclass(frozen=True)
class _Trial:
    """A job of doctor_gpu_worker."""

    what: str
    stage: str
    variables: dict[str, str] = field(default_factory=dict)
    seconds: int = 600


_NO_NCCL = {"DAD_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}
_TRIALS = (
    _Trial("collectives by NCCL", "collectives"),
    _Trial("collectives by way of the host", "collectives", _NO_NCCL),
    _Trial("exactness of the methods", "exactness"),
    # Streams that are not ordered correctly give other results only if they overlap.
    _Trial("exactness, one kernel at a time", "exactness", {"CUDA_LAUNCH_BLOCKING": "1"}),
    _Trial("speed against dense NCCL (torch.distributed)", "speed", seconds=1800),
)


def examine_gpu(num_proc: int | None = None) -> int:
    """Prints the findings; returns 0 if everything that could be tried works. `num_proc`: one GPU each; None:
    all GPUs."""
    for step in (_driver, _runtime, _nccl, _plugin, _kernels, _torch):
        there, text = step()
        print(f"{_OK if there else _MISSING} {text}", flush=True)
        if not there:
            print("stopped at the first thing that is missing; docs/gpu.md has the list")
            return 1
    num_proc = num_proc or _num_devices()
    if num_proc < 2:
        print(f"{_NOTE} one GPU: a job needs two; on a machine with more: dadrun --doctor --gpu -np 2")
        print("everything that can be looked at is there; next: build/tests/cpp/gpu/dad_gpu_tests")
        return 0
    return _try(num_proc, sys.executable, "cuda")


def _try(num_proc: int, python: str, device: str, *more: str) -> int:
    """Runs the trials on `num_proc` GPUs, until one fails."""
    for trial in _TRIALS:
        worker = [python, "-m", "dad.runner.doctor_gpu_worker", trial.stage, "--device", device, *more]
        command = [python, "-m", "dad.runner.cli", "-np", str(num_proc), *worker]
        line = shlex.join([*(f"{k}={v}" for k, v in trial.variables.items()), *command])
        print(f"{_NOTE} {trial.what}, {num_proc} processes: {line}", flush=True)
        variables = {**os.environ, **trial.variables}
        try:
            code = subprocess.run(command, env=variables, timeout=trial.seconds).returncode
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"no end within {trial.seconds} s"
        if problem:
            print(f"{_MISSING} {trial.what}: {problem}")
            print(f"stopped there; next, with more to read: DAD_LOG_LEVEL=debug NCCL_DEBUG=INFO {line}")
            return 1
    print("everything works; please report it, with the versions above: docs/gpu.md")
    return 0


def _driver() -> tuple[bool, str]:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return False, f"driver: {error}; install NVIDIA's driver until this works: nvidia-smi"
    count = _num_devices()
    if count == 0:
        return False, "driver: no device; look at: nvidia-smi, echo $CUDA_VISIBLE_DEVICES"
    return True, f"driver: {count} device{'s' if count != 1 else ''}{_names()}"


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
        return False, f"kernels: not built; with nvcc in PATH: make build, or {rebuild_command()}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return False, f"kernels: {error}; {rebuild_command()}"
    version = library.dad_cuda_version()
    text = f"kernels: compiled by CUDA {version // 1000}.{version % 1000 // 10}"
    if code := library.dad_cuda_check():
        remedy = f"install one for CUDA {version // 1000}, or with an older nvcc in PATH {rebuild_command()}"
        return False, f"{text} do not run with this driver (CUDA error {code}); {remedy}"
    return True, text


def _torch() -> tuple[bool, str]:
    """Runs in a process of its own, because it loads CUDA."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        why = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return False, f"torch: {why}; pip install torch, then {rebuild_command()}"
    version, cuda, usable = answer.stdout.split()
    if usable != "True":
        why = "is for the CPU" if cuda == "None" else "finds no GPU"
        return False, f"torch {version} {why}; install one for CUDA (pytorch.org), then {rebuild_command()}"
    there, why = framework_status("torch")
    text = f"torch {version} for CUDA {cuda}; dad: {why}"
    return there, text if there else f"{text}; {rebuild_command()}"


def _num_devices() -> int:
    count = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    return count.value if not (driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))) else 0


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
    """Looks in the nvidia-* packages of this interpreter, which no loader knows."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for pattern in patterns:
            yield from map(str, sorted(Path(folder).glob(pattern)))


def _version(ask: Callable[..., int], major: int, minor: int) -> str:
    number = ctypes.c_int(0)
    if ask(ctypes.byref(number)) != 0:
        return "version unknown"
    return f"{number.value // major}.{number.value % major // minor}"
