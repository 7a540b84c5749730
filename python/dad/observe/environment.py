"""`dad env`: what a bug report needs to know about a machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from dad._version import __version__
from dad.libraries import build_info, is_built, op_folders

PACKAGES = ("torch", "tensorflow", "keras", "tf_keras", "numpy", "horovod", "mpi4py", "cloudpickle")
PROGRAMS = ("mpirun", "srun", "torchrun", "horovodrun", "ssh", "nvidia-smi", "g++", "cmake")
# Their values may be secrets, or reveal more of a site than a report should.
_PREFIXES = ("DAD_", "HOROVOD_", "OMP_", "MKL_", "KERAS_", "TF_", "CUDA_", "NCCL_")
_SECRET = ("SECRET", "KEY", "TOKEN", "PASSWORD")


def environment() -> dict[str, str]:
    """What is installed here, by name: versions, the build, CPUs, programs and settings.

    Example:
        >>> environment()["dad"]
        '0.1.0'
    """
    found = {"dad": __version__, "python": platform.python_version(), "system": platform.platform()}
    found |= _build()
    found["cpus"] = f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}"
    found["cpu"] = _cpu()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "no"
    found |= {program: shutil.which(program) or "no" for program in PROGRAMS}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            found[name] = "(set)" if any(word in name for word in _SECRET) else value
    return found


def _build() -> dict[str, str]:
    info = build_info()
    if not info:
        return {"built": "no: pip install ."}
    return {
        "built for torch": ", ".join(op_folders("torch")) or "no",
        "built for tensorflow": ", ".join(op_folders("tensorflow")) or "no",
        "transports": ", ".join(name for name in info["plugins"] if is_built(name)) or "none",
        "CUDA kernels": info["cuda"] if is_built("cuda") else "no",
        "compiler": info["compiler"],
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    fields = dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)
    name = fields.get("model name", platform.machine()).lstrip("\t: ")
    levels = [level for level in ("avx2", "avx512f") if level in text]
    return f"{name} ({', '.join(levels) or 'neither avx2 nor avx512f'})"
