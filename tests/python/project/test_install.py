"""The wheel where there is no compiler, and what setup.py packs and says.

The wheel is made once, from what build/ has; nothing is compiled again.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
FRAMEWORKS = ["torch", "tensorflow"] if HAS_TENSORFLOW else ["torch"]
# What a wheel for manylinux may expect of every machine, and what of these frameworks and MPI.
OF_THE_MACHINE = r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux-x86-64\.so\.2"
OF_OTHERS = (
    r"lib(torch|torch_cpu|torch_python|c10)\.so|libtensorflow_framework\.so\.2|lib(mpi|mpich)\.so\.\d+"
)


def run(*command, timeout=300, **environment):
    """Output and errors together, as a user sees them."""
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def wheel(pytestconfig, tmp_path_factory):
    root = pytestconfig.rootpath
    if not (root / "build/CMakeCache.txt").exists() or importlib.util.find_spec("auditwheel") is None:
        pytest.skip("make build, and the packages of requirements-dev.txt")
    folder = tmp_path_factory.mktemp("wheel")
    make_wheel = root / "scripts/make_wheel.py"
    done = run(sys.executable, make_wheel, "-d", folder, timeout=800, PYTHONPATH="")
    assert done.returncode == 0, done.stdout
    return next(folder.glob("*.whl")), done.stdout


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """A virtual environment with dad from the wheel; it sees the frameworks of this one, but not its dad."""
    path, _ = wheel
    place = tmp_path_factory.mktemp("bare")
    done = run(sys.executable, "-m", "venv", "--without-pip", place)
    assert done.returncode == 0, done.stdout
    site = Path(next(place.glob("lib/python*/site-packages")))
    # Below this one's own packages; .pth files there, such as that of dad, do not count.
    (site / "frameworks.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")
    done = run(sys.executable, "-m", "pip", "install", *options, "--target", site, path)
    assert done.returncode == 0, done.stdout
    for name in ("dadrun", "dad"):
        text = (site / "bin" / name).read_text()
        (place / "bin" / name).write_text(re.sub(r"^#!.*", f"#!{place}/bin/python", text))
        (place / "bin" / name).chmod(0o755)
    return place


def in_bare(place, *command, **environment):
    """Runs with nothing in PATH but the environment: no compiler, no CMake."""
    environment = {"PYTHONPATH": "", "PATH": f"{place}/bin", "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    return run(place / "bin" / command[0], *command[1:], **environment)


def test_the_wheel_is_small_and_for_manylinux(wheel):
    path, output = wheel
    import torch

    assert re.search(r"-cp\d+-cp\d+-manylinux_2_\d+_\w+\.whl$", path.name)  # by auditwheel repair
    assert path.stat().st_size < 15e6
    assert re.search(rf"torch +{re.escape(torch.__version__)}", output)
    assert re.search(r"transports +gloo", output)


def test_the_wheel_carries_what_it_needs(wheel):
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    path, _ = wheel
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        inside = {Path(name).name for name in names}
        libraries = [name for name in names if re.search(r"\.so(\.|$)", name)]
        assert {"libdad_core.so", "libdad_gloo.so", "libdad_nccl.so"} <= inside
        for name in libraries:
            elf = ELFFile(io.BytesIO(archive.read(name)))
            assert elf.get_section_by_name(".symtab") is None, f"{name} is not stripped"
            for section in elf.iter_sections():
                tags = section.iter_tags() if isinstance(section, DynamicSection) else ()
                for tag in tags:
                    if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in inside:
                        assert re.fullmatch(f"{OF_THE_MACHINE}|{OF_OTHERS}", tag.needed), (name, tag.needed)
                    if tag.entry.d_tag in ("DT_RUNPATH", "DT_RPATH"):
                        path_there = getattr(tag, "runpath", None) or tag.rpath
                        assert all(part.startswith("$ORIGIN") for part in path_there.split(":")), name
        assert {"dad/py.typed", "dad/_lib/_core.pyi", "dad/_lib/licenses/libgloo0.txt"} <= set(names)
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    for line in (
        "License-Expression: Apache-2.0",
        "Provides-Extra: tensorflow",
        "Description-Content-Type: text",
    ):
        assert line in metadata


TORCH_JOB = """
import torch, dad.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(hvd.rank()))
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
"""
TENSORFLOW_JOB = """
import tensorflow as tf, dad.tensorflow as hvd
hvd.init()
weight = tf.Variable(tf.zeros([8, 1]))
x = tf.random.stateless_normal([16, 8], [hvd.rank(), 0])
losses = []
for _ in range(20):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean((x @ weight - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    losses.append(float(loss))
assert losses[-1] < losses[0] / 2, losses
"""
REPORT = "\nprint('trained by', hvd.__file__, hvd.size(), flush=True)\n"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_processes_train_without_a_compiler(bare, tmp_path, framework):
    script = tmp_path / "train.py"
    script.write_text({"torch": TORCH_JOB, "tensorflow": TENSORFLOW_JOB}[framework] + REPORT)
    done = in_bare(bare, "dadrun", "-np", 2, "python", script)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(rf"trained by {bare}/lib/.*/dad/{framework}/__init__.py 2", done.stdout)) == 2, (
        done.stdout
    )


def test_check_build_says_what_is_there(bare):
    done = in_bare(bare, "dadrun", "--check-build")
    assert "[X] Gloo" in done.stdout and "[X] PyTorch" in done.stdout, done.stdout


class Changed:
    """The package with another version in build_info.json: that of torch or TensorFlow is none of its own."""

    def __init__(self, place, framework, version):
        self._path = next(place.glob("lib/python*/site-packages/dad/_lib/build_info.json"))
        self._right = self._path.read_text()
        self._changed = json.dumps({**json.loads(self._right), framework: version})

    def __enter__(self):
        self._path.write_text(self._changed)

    def __exit__(self, *_):
        self._path.write_text(self._right)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_version_without_a_compiler_is_one_clear_line(bare, framework):
    installed = importlib.import_module(framework).__version__
    with Changed(bare, framework, "1.2.3"):
        done = in_bare(bare, "python", "-c", f"import dad.{framework}")
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    for part in (
        f"built for {framework} 1.2.3",
        f"{framework} {installed} is loaded",
        "install a C++20 compiler",
    ):
        assert part in last, done.stdout


# In the place of g++: takes objects that build/ has, as a compiler cache would; one file it compiles.
COMPILER = """#!/bin/sh
for last; do
  case $last in */tf_ops/*.cc | */torch_ops/*.cc) source=$last ;; esac
done
echo "$source" >> {log}
object=$(ls {build}/CMakeFiles/dad_t*.dir/${{source#*/src/}}.o 2> /dev/null | head -n 1)
case $source in
  "" | */{compiled}) exec {compiler} "$@" ;;
  *) exec cp "$object" "$last" ;;
esac
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_op_library_for_another_version_is_compiled_once(bare, tmp_path, pytestconfig, framework):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    log = tmp_path / "compiled"
    compiled = {"torch": "ops/handles.cc", "tensorflow": "kernels/part.cc"}[framework]
    fake = tmp_path / "fake-g++"
    build = pytestconfig.rootpath / "build"
    fake.write_text(COMPILER.format(log=log, build=build, compiler=compiler, compiled=compiled))
    fake.chmod(0o755)
    one = {
        "torch": "import torch\none = lambda: torch.ones(1)",
        "tensorflow": "import tensorflow as tf\none = lambda: tf.ones([1])",
    }[framework]
    script = tmp_path / "job.py"
    script.write_text(
        f"{one}\nimport dad.{framework} as hvd\nhvd.init()\nprint('sum', float(hvd.allreduce(one(), op=hvd.Sum)[0]))\n"
    )
    environment = {
        "CXX": str(fake),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": f"{bare}/bin:/usr/bin:/bin",
    }
    with Changed(bare, framework, None):
        first = in_bare(bare, "dadrun", "-np", 2, "python", script, **environment)
        sources = log.read_text().split()
        second = in_bare(bare, "dadrun", "-np", 2, "python", script, **environment)
    assert first.stdout.count("sum 2.0") == 2, first.stdout
    assert first.stdout.count("compiling one into") == 1, first.stdout  # one rank, the other waited
    assert len(sources) == len(set(sources)) > 5
    assert second.stdout.count("sum 2.0") == 2 and "compil" not in second.stdout, second.stdout
    assert len(log.read_text().split()) == len(sources)


def test_the_source_distribution_has_all_that_the_build_reads(pytestconfig, tmp_path):
    root = pytestconfig.rootpath
    if not (root / "build/build.ninja").exists():
        pytest.skip("dad was not built with ninja here")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    deps = subprocess.run(["ninja", "-C", root / "build", "-t", "deps"], capture_output=True, text=True)
    # Relative to build/ where the compiler cache has made them so.
    paths = [
        os.path.normpath(root / "build" / line.strip())
        for line in deps.stdout.splitlines()
        if line[:1] == " "
    ]
    read = {os.path.relpath(path, root) for path in paths if path.startswith(f"{root}/")}
    read = {name for name in read if not name.startswith((".venv/", "build/"))}
    assert len(read) > 100
    assert not read - inside
    assert {"setup.py", "CMakeLists.txt", "cmake/torch.cmake", "scripts/build_progress.py"} <= inside
    assert not [name for name in inside if name.endswith(".so") or name.startswith("build/")]


def test_a_bad_answer_about_a_framework_is_refused(source_dir):
    done = run(sys.executable, source_dir / "setup.py", "build_ext", DAD_WITH_TORCH="maybe")
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "DAD_WITH_TORCH=maybe: expected 0 or 1"


def test_a_framework_that_is_asked_for_and_not_there_is_an_error(source_dir):
    without_it = (
        "import runpy, sys; sys.modules['tensorflow'] = None; sys.argv = ['setup.py', 'build_ext']; "
        f"runpy.run_path({str(source_dir / 'setup.py')!r}, run_name='__main__')"
    )
    done = run(sys.executable, "-c", without_it, DAD_WITH_TENSORFLOW="1")
    assert done.returncode != 0
    assert "cannot import tensorflow" in done.stdout.splitlines()[-1]
