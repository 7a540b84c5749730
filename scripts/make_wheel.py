"""Makes the wheel: `make wheel`, `make wheels`.

The libraries come from build/, without their symbols. auditwheel puts what gloo needs beside them, so
that nothing but glibc and libstdc++ has to be on the machine, and finds out how old these may be. The
libraries of torch, TensorFlow and MPI are those of the machine where the wheel is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
from dad.compile_ops import TORCH_LIBRARIES, digest  # noqa: E402

TOOLS = Path(sys.executable).parent
NOT_PACKED = ("libtorch*.so", "libc10.so", "libtensorflow_*.so.*", "libmpi.so.*", "libmpich.so.*")
ON_EVERY_MACHINE = ("libdad_core", "libc.", "libm.", "libstdc++", "libgcc_s", "ld-linux", "linux-vdso")
NEEDED = {  # to compile and link an op library
    "torch": ("torch/include/", *(f"torch/lib/lib{name}.so" for name in TORCH_LIBRARIES)),
    "tensorflow": ("tensorflow/include/", "tensorflow/libtensorflow_framework"),
}


def run(*command: str | Path, **environment: str) -> str:
    environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-4000:]}\nwheel: failed: {' '.join(map(str, command))}")
    return done.stdout


def other_versions() -> list[list[str]]:
    """Rows of wheel_versions.txt: framework, package, version."""
    lines = (ROOT / "scripts/wheel_versions.txt").read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def op_library(framework: str, package: str, version: str) -> Path | None:
    """The folder with the op library for that version, compiled now if build/ops has none; or none."""
    folder = ROOT / "build/ops" / digest(ROOT) / f"{framework}-{version}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        print(f"wheel: fetching {package} {version}", flush=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", place]
        if subprocess.run([*fetch, f"{package}=={version}"]).returncode != 0:
            print(f"wheel: {package} {version} cannot be had; it is left out")
            return None
        with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
            names = [name for name in archive.namelist() if name.startswith(NEEDED[framework])]
            archive.extractall(place / "unpacked", names)
        print(f"wheel: compiling the op library for {framework} {version}", flush=True)
        root = place / "unpacked" / framework
        new = place / "ops"
        command = [sys.executable, "-m", "dad.compile_ops", framework, root, new]
        if subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "python")}).returncode != 0:
            print(f"wheel: dad does not compile for {framework} {version}; it is left out")
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(new, folder)
    return folder


def complete(lib_dir: Path, op_folders: list[Path]) -> None:
    """Adds op libraries of other versions. MPI is looked for where pip puts it, too."""
    for folder in op_folders:
        shutil.copytree(folder, lib_dir / "ops" / folder.name)
    for plugin in lib_dir.glob("libdad_mpi_*.so"):
        # From site-packages/dad/_lib to the lib folder of the environment.
        run(TOOLS / "patchelf", "--set-rpath", "$ORIGIN:$ORIGIN/../../../..", plugin)
    add_licenses(lib_dir / "libdad_gloo.so", lib_dir / "licenses")


def add_licenses(gloo: Path, target: Path) -> None:
    """Those of the libraries that the wheel will contain, as Debian's packages have them."""
    target.mkdir()
    for line in run("ldd", gloo).splitlines():
        name, _, path = line.strip().partition(" => ")
        if not path or name.startswith(ON_EVERY_MACHINE):
            continue
        owner = run("dpkg", "-S", f"*/{name}").split(":")[0]
        shutil.copy2(f"/usr/share/doc/{owner}/copyright", target / f"{owner}.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every version in wheel_versions.txt")
    parser.add_argument("-d", "--directory", type=Path, default=ROOT / "dist", help="where the wheel goes")
    args = parser.parse_args()
    folders = [op_library(*row) for row in other_versions()] if args.all else []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
        output = run(sys.executable, "-c", code, place)
        print(
            *re.findall(r"^dad .* was built for:$|^  (?:torch|tensorflow|transports|CUDA) .*$", output, re.M),
            sep="\n",
        )
        plain = next(place.glob("*.whl"))
        run(sys.executable, "-m", "wheel", "unpack", "--dest", place / "tree", plain)
        plain.unlink()
        tree = next((place / "tree").iterdir())
        complete(tree / "dad/_lib", [folder for folder in folders if folder is not None])
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", place, tree)
        exclude = [part for name in NOT_PACKED for part in ("--exclude", name)]
        args.directory.mkdir(parents=True, exist_ok=True)
        run(*(TOOLS / "auditwheel", "repair", "--strip", "-w", place / "fixed"), *exclude, plain)
        fixed = next((place / "fixed").glob("*.whl"))
        shutil.copy2(fixed, args.directory)
    print(f"wheel: {args.directory / fixed.name}")


if __name__ == "__main__":
    main()
