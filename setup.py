"""Builds the libraries of dad with CMake; pyproject.toml has the rest.

For which frameworks: those that the running interpreter can import. Hence
`pip install --no-build-isolation .`; a package that was built without them compiles its op library
at the first import. To decide otherwise:

    DAD_WITH_TORCH=1    an error if torch is not there
    DAD_WITH_TORCH=0    leave torch out (the core and the launcher are built)

and the same with DAD_WITH_TENSORFLOW.

`python setup.py build_ext --inplace` is the development build: it works in build/ and puts the
libraries into python/dad/_lib. The other transports and the CUDA kernels are not part of it (`make
build`), nor are the C++ tests (`make test`). A package is made from the same folders.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
import build_progress  # noqa: E402


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


def interpreter_of(build_dir: Path) -> str:
    """The interpreter that a build folder was configured for; empty if it was not."""
    cache = build_dir / "CMakeCache.txt"
    found = re.search(r"^Python_EXECUTABLE:\w+=(.*)$", cache.read_text(), re.M) if cache.exists() else None
    return found[1] if found else ""


class Build(build):
    def run(self):
        # Modules that are no longer there would be packed, too.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    def run(self):
        # An editable install is an in-place build, too.
        in_place = self.inplace or getattr(self, "editable_mode", False)
        build_dir, lib_dir = ROOT / "build", ROOT / "python/dad/_lib"
        if not in_place and interpreter_of(build_dir) not in ("", sys.executable):
            # Beside build/, not in it: the compiler cache compares paths relative to the build folder.
            build_dir, lib_dir = ROOT / "build-package", ROOT / "build-package/lib"
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "DAD_LIB_DIR": lib_dir,
            "DAD_PYTHON": "ON",
            "DAD_TORCH": "ON" if wanted("torch") else "OFF",
            "DAD_TENSORFLOW": "ON" if wanted("tensorflow") else "OFF",
        }
        if in_place or not (build_dir / "CMakeCache.txt").exists():
            options["DAD_TESTS"] = "ON" if in_place else "OFF"
        configure = ["cmake", "-S", str(ROOT), "-B", str(build_dir)]
        if shutil.which("ninja") and not (build_dir / "Makefile").exists():
            configure += ["-G", "Ninja"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        build_dir.mkdir(exist_ok=True)
        configured = subprocess.run(configure, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if configured.returncode != 0:
            sys.exit(f"{configured.stdout}dad: failed: {' '.join(configure)}")
        for target in ["libraries"] if in_place else ["libraries", "optional_libraries"]:
            if build_progress.build(build_dir, target, build_dir / "build.log") != 0:
                sys.exit(1)
        if not in_place:
            self.copy_to_package(build_dir, Path(self.build_lib) / "dad/_lib")
        self.report(json.loads((build_dir / "build_info.json").read_text()), lib_dir)

    def copy_to_package(self, build_dir, lib_dir):
        """The libraries, and what dad/compile_ops.py makes op libraries from."""
        lib_dir.mkdir(parents=True, exist_ok=True)
        libraries = (build_dir / "libraries.txt").read_text().splitlines()
        for path in [*libraries, build_dir / "build_info.json"]:
            shutil.copy2(path, lib_dir)
        for folder in ("torch_ops", "tf_ops", "dad_core/include"):
            for source in sorted((ROOT / folder).rglob("*.*")):
                target = lib_dir / "src" / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def report(self, info, lib_dir):
        def built(name):
            return (lib_dir / f"libdad_{name}.so").exists()

        print(f"dad {info['dad']} was built for:")
        for framework in ("torch", "tensorflow"):
            print(f"  {framework:12} {info[framework] or 'no'}")
        print(f"  transports   {', '.join(filter(built, info['plugins'])) or 'none: one process only'}")
        kernels = info["cuda"] if built("cuda") else "no"
        print(f"  CUDA kernels {kernels if info['cuda'] else 'no: nvcc is not here'}")
        if later := [
            name for name in [*info["plugins"], *(["cuda"] if info["cuda"] else [])] if not built(name)
        ]:
            print(f"  make build adds {', '.join(later)}")

    # CMake knows what it made and puts it in place.
    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


setup(
    ext_modules=[Extension("dad._lib._core", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
)
