"""Builds the libraries of dad with CMake; pyproject.toml has the rest.

For which frameworks: those that the running interpreter can import. Hence
`pip install --no-build-isolation .`. To decide otherwise:

    DAD_WITH_TORCH=1    an error if torch is not there
    DAD_WITH_TORCH=0    leave torch out (the core and the launcher are built)

and the same with DAD_WITH_TENSORFLOW.

`python setup.py build_ext --inplace` is the development build: it works in build/
and puts the libraries into python/dad/_lib. The C++ tests are not part of it (`make test`
compiles them).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def wanted(framework: str) -> bool:
    """Whether to build for `framework`; an answer by environment variable wins."""
    variable = f"DAD_WITH_{framework.upper()}"
    answer = os.environ.get(variable, "")
    if answer not in ("", "0", "1"):
        sys.exit(f"{variable}={answer}: expected 0 or 1")
    found = importlib.util.find_spec(framework) is not None
    if answer == "1" and not found:
        sys.exit(f"{variable}=1, but {sys.executable} cannot import {framework}")
    return found and answer != "0"


class CMakeBuild(build_ext):
    def run(self):
        # An editable install is an in-place build, too.
        in_place = self.inplace or getattr(self, "editable_mode", False)
        if in_place:
            build_dir, lib_dir = ROOT / "build", ROOT / "python/dad/_lib"
        else:
            # Beside build/, not in it: the compiler cache compares paths relative to the build folder.
            build_dir, lib_dir = ROOT / "build-package", Path(self.build_lib).resolve() / "dad/_lib"
        with_torch = wanted("torch")
        with_tensorflow = wanted("tensorflow")
        if not (with_torch or with_tensorflow or os.environ.get("DAD_WITH_TORCH") == "0"):
            sys.exit(
                f"dad: {sys.executable} sees neither torch nor tensorflow. Install one first, and use "
                "pip's --no-build-isolation; DAD_WITH_TORCH=0 builds the core and the launcher only."
            )
        configure = ["cmake", "-S", str(ROOT), "-B", str(build_dir)]
        if shutil.which("ninja") and not (build_dir / "Makefile").exists():
            configure += ["-G", "Ninja"]
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "DAD_LIB_DIR": lib_dir,
            "DAD_PYTHON": "ON",
            "DAD_TORCH": "ON" if with_torch else "OFF",
            "DAD_TENSORFLOW": "ON" if with_tensorflow else "OFF",
            "DAD_TESTS": "ON" if in_place else "OFF",
        }
        configure += [f"-D{name}={value}" for name, value in options.items()]
        parallel = ["--parallel", str(os.cpu_count())]
        build = ["cmake", "--build", str(build_dir), "--target", "libraries", *parallel]
        for command in (configure, build):
            if subprocess.run(command).returncode != 0:
                sys.exit(f"dad: failed: {' '.join(command)}")
        self.report(json.loads((lib_dir / "build_info.json").read_text()))

    def report(self, info):
        print(f"dad {info['dad']} was built for:")
        print(f"  torch        {info['torch'] or 'no'}")
        print(f"  tensorflow   {info['tensorflow'] or 'no'}")
        print(f"  transports   {', '.join(info['plugins']) or 'none: one process only'}")
        print(f"  CUDA kernels {info['cuda'] or 'no: nvcc is not here'}")

    # CMake knows what it made and puts it in place.
    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


setup(ext_modules=[Extension("dad._lib._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
