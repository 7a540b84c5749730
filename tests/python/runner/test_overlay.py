"""The package `horovod` that puts dad in Horovod's place, and the real horovodrun on top of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dad
from dad.runner.check_build import plugin_status

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
OVERLAY = str(Path(dad.__file__).parent / "_overlay")


def run_python(code, *path, **variables):
    """With the overlay in front of the path, as `dad overlay` prints it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([OVERLAY, *path, PACKAGE_ROOT])} | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


def check(code, *path):
    done = run_python(code, *path)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def other_horovod(tmp_path):
    """What a real installation has, as far as the launcher uses it."""
    for name, text in {
        "__init__.py": "raise AssertionError('hidden by the overlay')",
        "torch/__init__.py": "raise AssertionError('hidden by the overlay')",
        "runner/__init__.py": "def run(): return 'theirs'",
        "runner/common/util/secret.py": "name = 'theirs'",
        "tensorflow/__init__.py": "raise AssertionError('hidden by the overlay')",
        "tensorflow/data/__init__.py": "",
        "tensorflow/data/compute_service.py": "import horovod.tensorflow as hvd\nname = 'theirs'",
        "common/__init__.py": "",
        "common/util.py": "from horovod.common.exceptions import Extra\nname = 'theirs'",
        "common/exceptions.py": "class HorovodInternalError(Exception): pass\nclass Extra(Exception): pass",
    }.items():
        file = tmp_path / "horovod" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(tmp_path)


def test_command_prints_the_path_and_keeps_what_is_on_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, "/mine"])}
    command = [sys.executable, "-m", "dad.cli", "overlay"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout == os.pathsep.join([OVERLAY, PACKAGE_ROOT, "/mine"]) + "\n"


def test_horovod_torch_is_dad_torch():
    check(
        "import horovod.torch as hvd, dad.torch, horovod\n"
        "assert hvd is dad.torch is horovod.torch\n"
        "assert dad.torch.__spec__.name == 'dad.torch'\n"
        "from horovod.torch import DistributedOptimizer, Compression\n"
        "assert DistributedOptimizer is dad.torch.DistributedOptimizer\n"
        "from horovod.torch.mpi_ops import allreduce, Average\n"
        "assert allreduce is dad.torch.allreduce\n"
    )


def test_exceptions_are_dads():
    check(
        "import dad\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
        "assert HorovodInternalError is dad.HorovodInternalError\n"
        "assert HostsUpdatedInterrupt is dad.HostsUpdatedInterrupt\n"
    )


def test_without_a_real_horovod_run_is_dads():
    check("import horovod, dad\nassert horovod.run is dad.run\nassert horovod.__version__")


def test_what_does_not_exist_is_not_found():
    done = run_python("import horovod.torch.nothing")
    assert "ModuleNotFoundError: No module named 'dad.torch.nothing'" in done.stderr
    assert (
        "AttributeError: module 'horovod' has no attribute" in run_python("import horovod; horovod.x").stderr
    )


def test_what_dad_does_not_have_needs_a_real_horovod():
    for name in ("horovod.runner", "horovod.spark"):
        last = run_python(f"import {name}").stderr.splitlines()[-1]
        assert last.startswith(f"ModuleNotFoundError: No module named {name!r}: dad takes the place of")
        assert "HOROVOD_SKIP_COMPILE=1 pip install horovod==0.28.1" in last
        assert "dadrun" in last


def test_data_service_is_that_of_a_real_horovod(other_horovod):
    pytest.importorskip("tensorflow")
    check(
        "import dad.tensorflow, horovod.runner.common.util.secret as secret\n"
        "from horovod.tensorflow.data import compute_service\n"
        "assert compute_service.name == secret.name == 'theirs'\n"
        "assert compute_service.hvd is dad.tensorflow\n"
        "try:\n"
        "    import horovod.tensorflow.data.nothing\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'the one that is installed has no such module' in str(error), error\n",
        other_horovod,
    )


def test_launcher_of_a_real_horovod_keeps_working(other_horovod):
    check(
        "import horovod, horovod.torch, horovod.common.util, dad\n"
        "from horovod.common.exceptions import Extra, HorovodInternalError\n"
        "assert horovod.run() == 'theirs'\n"
        "assert horovod.common.util.name == 'theirs'\n"
        "assert HorovodInternalError is dad.HorovodInternalError\n",
        other_horovod,
    )


def test_import_in_a_forked_child():
    """horovodrun's gate asks this way."""
    check(
        "import os\n"
        "if os.fork() == 0:\n"
        "    import horovod.torch\n"
        "    os._exit(0 if horovod.torch.gloo_built() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_real_horovodrun_launches_a_script_on_dad(real_horovod, tmp_path, controller):
    if controller == "--mpi" and not (shutil.which("mpirun") and plugin_status("mpi")[0]):
        pytest.skip("no mpirun, or dad has no MPI plug-in")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "assert hvd.__name__ == 'dad.torch'\n"
        "total = hvd.allreduce(torch.arange(4.0) + hvd.rank(), op=hvd.Sum)\n"
        "print(f'rank {hvd.rank()} of {hvd.size()}, here {hvd.local_size()}: {total.tolist()}\\n', end='')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([OVERLAY, str(real_horovod), PACKAGE_ROOT])}
    command = [
        sys.executable,
        real_horovod / "bin" / "horovodrun",
        controller,
        "-np",
        "2",
        sys.executable,
        script,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"<stdout>:rank {rank} of 2, here 2: [1.0, 3.0, 5.0, 7.0]" in done.stdout


def test_function_of_a_real_horovod_run_is_run_on_dad(real_horovod, tmp_path):
    # Its ranks get HOROVOD_CYCLE_TIME=(None,), which Horovod's own C++ does not mind.
    script = tmp_path / "run.py"
    script.write_text(
        "import horovod\n"
        "def add(value):\n"
        "    import torch, horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    assert hvd.__name__ == 'dad.torch'\n"
        "    return hvd.rank(), hvd.allreduce(torch.tensor([value + hvd.rank()]), op=hvd.Sum).tolist()\n"
        "if __name__ == '__main__':\n"
        "    assert horovod.run.__module__ == 'horovod.runner'\n"
        "    print(horovod.run(add, args=(3,), np=2, use_gloo=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([OVERLAY, str(real_horovod), PACKAGE_ROOT])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=180
    )
    assert "[(0, [7]), (1, [7])]" in done.stdout, done.stderr
