"""Compiles an op library from the sources in this package, for a version of torch or TensorFlow that the
package has none for. It needs a C++20 compiler, but neither CMake nor dad's source tree.

    python -m dad.compile_ops torch ROOT FOLDER    for the torch in ROOT, into FOLDER (`make wheels`)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from dad._version import __version__
from dad.libraries import LIB_DIR, SOURCES

TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")
# As cmake/compiler.cmake has them.
_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
_FLAGS += ["-ffp-contract=off", "-D_GLIBCXX_USE_CXX11_ABI=1", "-w"]
_SECONDS_PER_FILE = {"torch": 8, "tensorflow": 5}  # of one CPU


def compile_once(framework: str, installed: str, root: Path) -> Path:
    """The folder of the cache with the op library for this version; compiles it where it is not there.

    Processes of one host that come at the same time wait for the first of them.

    Raises:
        RuntimeError: in one line, what is missing, or where the compiler's output is.
        OSError: the cache cannot be written.
    """
    cache = _cache() / f"{__version__}-{digest(SOURCES)}"
    folder = cache / f"{framework}-{installed}-{sys.implementation.cache_tag}-{platform.machine()}"
    if folder.exists():
        return folder
    compiler = _compiler(framework)
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel opens it if this process dies
        if folder.exists():
            return folder
        from dad.log import log

        files = len(_files(SOURCES, framework))
        minutes = max(1, round(files * _SECONDS_PER_FILE[framework] / _cpus() / 60))
        log.warning(
            "no op library for %s %s in this package: compiling one into %s, once; about %d minute%s",
            *(framework, installed, folder, minutes, "s" * (minutes > 1)),
        )
        begin = time.monotonic()
        new = Path(tempfile.mkdtemp(dir=cache))
        try:
            compile_ops(framework, root, new, compiler, cache / f"{folder.name}.log")
            new.chmod(0o755)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        log.warning("compiled in %.0f s", time.monotonic() - begin)
    return folder


def compile_ops(
    framework: str, root: Path, folder: Path, compiler: list[str], log: Path, sources: Path = SOURCES
) -> None:
    """Compiles the op library for the framework in `root` into `folder`; RuntimeError if that fails."""
    with _clean_log(log) as output, tempfile.TemporaryDirectory() as objects:

        def run(*arguments: str | Path) -> None:
            command = [*compiler, *map(str, arguments)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                output.write(f"{shlex.join(command)}\n".encode() + done.stdout)
                raise RuntimeError(f"the compiler failed, its output is in {log}")

        includes = [f"-I{sources}", f"-I{sources / 'dad_core/include'}"]
        for system in _includes(framework, root):
            includes += ["-isystem", str(system)]
        flags = [*_FLAGS, *_definitions(framework), *includes]

        def compile_file(source: Path) -> Path:
            target = Path(objects) / f"{source.parent.name}_{source.stem}.o"
            run(*flags, "-c", source, "-o", target)
            return target

        files = _files(sources, framework)
        with ThreadPoolExecutor(_cpus()) as pool:
            try:
                made = dict(zip(files, pool.map(compile_file, files), strict=True))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        core = LIB_DIR / "libdad_core.so"
        if framework == "torch":
            name = f"_torch{sysconfig.get_config_var('EXT_SUFFIX')}"
            libraries = [root / "lib" / f"lib{part}.so" for part in TORCH_LIBRARIES]
            run("-shared", "-s", *made.values(), core, *libraries, "-o", folder / name)
            return
        libraries = sorted(root.glob("libtensorflow_framework.so.*"))
        ops = folder / "libdad_tensorflow.so"
        gpu = [file for file in files if file.parent.name == "gpu"]
        host = [made[file] for file in files if file not in gpu]
        run("-shared", "-s", *host, core, *libraries, f"-Wl,-soname,{ops.name}", "-o", ops)
        objects_gpu = [made[file] for file in gpu]
        run("-shared", "-s", *objects_gpu, ops, core, *libraries, "-o", folder / "libdad_tensorflow_gpu.so")


def _files(sources: Path, framework: str) -> list[Path]:
    return sorted((sources / {"torch": "torch_ops", "tensorflow": "tf_ops"}[framework]).glob("*/*.cc"))


def _includes(framework: str, root: Path) -> list[Path]:
    if framework == "tensorflow":
        return [root / "include"]
    python = Path(sysconfig.get_path("include"))
    return [root / "include", root / "include/torch/csrc/api/include", python]


def _definitions(framework: str) -> list[str]:
    return ["-DTORCH_EXTENSION_NAME=_torch"] if framework == "torch" else ["-DEIGEN_MAX_ALIGN_BYTES=64"]


def _compiler(framework: str) -> list[str]:
    """The command of a compiler; CXX chooses it."""
    names = [chosen] if (chosen := os.environ.get("CXX")) else ["g++", "c++", "clang++"]
    for name in names:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            break
    else:
        raise RuntimeError(
            f"install a C++20 compiler ({names[0]} is not in PATH), and the next import compiles "
            "what is missing"
        )
    if framework == "torch" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise RuntimeError(
            "install Python's headers (python3-dev), and the next import compiles what is missing"
        )
    return command


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dad"


def digest(sources: Path) -> str:
    """Of what op libraries are compiled from: what was compiled from something else does not fit."""
    state = hashlib.sha256()
    for folder in ("torch_ops", "tf_ops", "dad_core/include"):
        for file in sorted((sources / folder).rglob("*.*")):
            state.update(file.read_bytes())
    return state.hexdigest()[:10]


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _clean_log(path: Path) -> Iterator[BinaryIO]:
    """The file, which stays only where something went wrong."""
    with open(path, "wb") as file:
        yield file
    path.unlink()


def main(framework: str, root: str, folder: str) -> None:
    sources = SOURCES if SOURCES.exists() else Path(__file__).parents[2]  # the source tree
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    compile_ops(framework, Path(root), Path(folder), _compiler(framework), log, sources)


if __name__ == "__main__":
    main(*sys.argv[1:])
