"""What setup.py builds, and what it says."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(1200)  # a whole build, where there is no ccache
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


def run(*command, **environment):
    """Output and errors together, as a user sees them."""
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def installed(pytestconfig, tmp_path_factory):
    """A folder with dad installed by pip, as a user does, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    source = str(pytestconfig.rootpath)
    done = run(
        *(sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check"),
        *("--no-build-isolation", "--no-deps", "--target", str(target), source),
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return target, done.stdout


def test_pip_says_what_it_built(installed):
    import torch

    _, output = installed
    assert re.search(rf"torch +{re.escape(torch.__version__)}", output)
    assert re.search(r"transports +gloo", output)


def test_the_installed_package_is_complete(installed):
    target, _ = installed
    libraries = {path.name.split(".")[0] for path in (target / "dad/_lib").glob("*.so")}
    assert {"libdad_core", "libdad_gloo", "_core", "_torch"} <= libraries
    assert ("libdad_tensorflow" in libraries) == HAS_TENSORFLOW
    assert (target / "dad/py.typed").exists()
    assert {"dad", "dadrun"} <= {path.name for path in (target / "bin").iterdir()}
    code = "import dad.torch as hvd; hvd.init(); print(hvd.__file__, hvd.rank(), hvd.size())"
    done = run(sys.executable, "-c", code, PYTHONPATH=str(target))
    assert done.stdout.splitlines()[-1] == f"{target}/dad/torch/__init__.py 0 1", done.stdout


def test_another_torch_than_the_one_built_for_is_one_clear_line(installed):
    import torch

    target, _ = installed
    path = target / "dad/_lib/build_info.json"
    right = path.read_text()
    path.write_text(json.dumps({**json.loads(right), "torch": "1.2.3"}))
    try:
        done = run(sys.executable, "-c", "import dad.torch", PYTHONPATH=str(target))
    finally:
        path.write_text(right)
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "1.2.3" in last and torch.__version__ in last, done.stdout


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="tensorflow is not there")
def test_another_tensorflow_than_the_one_built_for_is_one_clear_line(installed):
    target, output = installed
    path = target / "dad/_lib/build_info.json"
    right = path.read_text()
    version = json.loads(right)["tensorflow"]
    assert re.search(rf"tensorflow +{re.escape(version)}", output)
    last_lines = []
    for wrong in ("1.2.3", None):
        path.write_text(json.dumps({**json.loads(right), "tensorflow": wrong}))
        try:
            done = run(sys.executable, "-c", "import dad.tensorflow", PYTHONPATH=str(target))
        finally:
            path.write_text(right)
        assert done.returncode != 0
        last_lines.append(done.stdout.splitlines()[-1])
    assert "1.2.3" in last_lines[0] and version in last_lines[0], last_lines
    assert "built without tensorflow" in last_lines[1], last_lines


def test_a_bad_answer_about_a_framework_is_refused(source_dir):
    done = run(sys.executable, str(source_dir / "setup.py"), "build_ext", DAD_WITH_TORCH="maybe")
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
