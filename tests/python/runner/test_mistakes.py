"""The likeliest mistakes: what a person reads, the exit code, and that nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

import psutil
import pytest

import mistake_checks
from util import check_names, job_environment, launched_once

IN_SCRIPTS = mistake_checks.__file__
scripts = launched_once(IN_SCRIPTS, 2)

TRAIN = ("python", "train.py")
# The command line, the words of the message: cause and cure.
COMMANDS = {
    "no number of processes": (("python", "train.py"), ["how many processes?", "dadrun -np 2"]),
    "no command": (("-np", "2"), ["no command given", "dadrun -np 2 python train.py"]),
    "misspelt flag": (("-np", "2", "--compresssion", "auto", *TRAIN), ["did you mean --compression?"]),
    "misspelt method": (
        ("-np", "2", "--compression", "atuo", *TRAIN),
        ["no method 'atuo'", "did you mean auto?"],
    ),
    "option out of range": (
        ("-np", "2", "--compression", "rank_dad:rank=0", *TRAIN),
        ["rank=0", "from 1 to 255"],
    ),
    "more ranks than slots": (
        ("-np", "4", "-H", "localhost:2", *TRAIN),
        ["2 slots", "raise the slots", "-np 2"],
    ),
    "hosts that do not parse": (
        ("-np", "2", "-H", "localhost:two", *TRAIN),
        ["localhost:two", "expected NAME:SLOTS, for example"],
    ),
    "hostfile that is not there": (
        ("-np", "2", "-hostfile", "nodes", *TRAIN),
        ["hostfile nodes", "No such file"],
    ),
    "host that does not exist": (
        ("-np", "1", "-H", "nowhere.invalid:1", *TRAIN),
        ["nowhere.invalid", "try: ssh"],
    ),
    "interface that is not there": (
        ("-np", "2", "--network-interfaces", "eth99", *TRAIN),
        ["eth99", "it has", "lo"],
    ),
    "elastic flag alone": (("-np", "2", "--max-np", "4", *TRAIN), ["is for elastic jobs", "--min-np"]),
    "config file that is not there": (
        ("-np", "2", "--config-file", "job.yaml", *TRAIN),
        ["job.yaml", "No such file"],
    ),
    "file to report in a folder that is not there": (
        ("-np", "2", "--report", "no/run", *TRAIN),
        ["no/run", "folder"],
    ),
    "no mpirun": (("-np", "2", "--mpi", *TRAIN), ["no mpirun on PATH", "install one"]),
}

# The script of two ranks, the exit code, the words.
JOBS = {
    "script that is not there": (None, 2, ["can't open file", "No such file", "rank 0"]),
    "script that does not compile": ("def f(:\n", 1, ["SyntaxError", "train.py", "line 1"]),
    "module that is not installed": (
        "import nowhere_to_be_found",
        1,
        ["No module named 'nowhere_to_be_found'"],
    ),
    "init() was forgotten": (
        "import dad.basics as hvd\nhvd.rank()",
        1,
        ["dad has not been initialized", "call init() first"],
    ),
    "variable that does not parse": (
        "import os\nos.environ['DAD_FUSION_BYTES'] = 'many'\nimport dad.basics as hvd\nhvd.init()",
        1,
        ['DAD_FUSION_BYTES="many"', "expected a whole number"],
    ),
    "one rank fails while the other waits for it": (
        "import dad.basics as hvd\nfrom dad._lib import _core\nhvd.init()\n"
        "if hvd.rank() == 1:\n    raise ValueError('my own mistake')\n_core.barrier()",
        1,
        ["my own mistake", "rank 1 on", "failed: exit code 1"],
    ),
    "one rank has fewer steps": (
        "import dad.basics as hvd\nfrom dad._lib import _core\nhvd.init()\n"
        "for step in range(3 - hvd.rank()):\n    _core.barrier()",
        1,
        ["rank 1 has shut down or ended", "give all ranks equally many batches, or call join()"],
    ),
    "one rank exits with a code": (
        "import sys\nimport dad.basics as hvd\nhvd.init()\nif hvd.rank() == 1:\n    sys.exit(7)\n"
        "import time\ntime.sleep(60)",
        7,
        ["rank 1 on", "exit code 7"],
    ),
    "one rank needs more memory than there is": (
        "import os, signal, time\nimport dad.basics as hvd\nhvd.init()\nif hvd.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
        137,
        ["killed by signal 9", "runs out", "dmesg"],
    ),
}


def left_running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DAD_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def dadrun(*arguments: str, folder: str, **environment: str) -> tuple[int, str]:
    """The exit code and the output; nothing that it has started is left."""
    mark = uuid.uuid4().hex
    job = subprocess.run(
        [sys.executable, "-m", "dad.runner.cli", *arguments],
        cwd=folder,
        env=job_environment(DAD_TEST_MARK=mark, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    end = time.monotonic() + 5
    while (left := left_running(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"left running: {left}"
    return job.returncode, job.stdout


@pytest.mark.parametrize("mistake", COMMANDS)
def test_command_line(tmp_path, mistake):
    arguments, words = COMMANDS[mistake]
    path = "/nowhere" if mistake == "no mpirun" else os.environ["PATH"]
    code, output = dadrun(*arguments, folder=tmp_path, PATH=path)
    assert code == 2, output
    assert "Traceback" not in output
    assert all(word in output for word in words), output


@pytest.mark.parametrize("mistake", JOBS)
def test_job(tmp_path, mistake):
    script, expected, words = JOBS[mistake]
    if script is not None:
        (tmp_path / "train.py").write_text(script)
    code, output = dadrun("-np", "2", sys.executable, "train.py", folder=tmp_path)
    assert code == expected, output
    assert all(word in output for word in words), output


@pytest.mark.parametrize("check", check_names(IN_SCRIPTS))
def test_script(scripts, check):
    scripts.assert_passed(check)
