"""A worker that is started again finds its libraries imported, and nothing else is different."""

import re
import sys
from pathlib import Path

import psutil
import pytest

from dad.runner.elastic.nursery import leading_imports
from dad.runner.elastic.warm import is_worth_it
from elastic_job import WORKER, wait_until

# A fresh interpreter and a fork must find the same.
FACTS = """
import json, os, random, signal, sys, threading
def facts():
    volatile = ("TINY_", "DAD_SECRET_", "DAD_RANK", "HOROVOD_RANK", "DAD_CROSS", "HOROVOD_CROSS", "_")
    return json.dumps({
        "name": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
        "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
        "environ": {k: v for k, v in sorted(os.environ.items()) if not k.startswith(volatile)},
        "signals": [str(signal.getsignal(n)) for n in (2, 13, 15, 17)],
        "stdin": os.readlink("/proc/self/fd/0"), "thread": threading.current_thread().name,
        "stdout": sys.stdout.line_buffering, "excepthook": callable(sys.excepthook),
        "group": os.getpgid(0) == os.getpid(), "sid": os.getsid(0) != os.getpid(),
    }, sort_keys=True)
"""


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (
            "'''doc'''\nfrom __future__ import annotations\nimport os, torch\nimport dad.torch as hvd\nx = 1\nimport y",
            3,
        ),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch", 1),
        ("import os\nimport mine\nimport torch", 1),
        ("import torch\nimport tensorflow as tf", 1),
        ("import dad.tensorflow as hvd", 0),
        ("from . import mine", 0),
        ("if True:\n import torch", 0),
    ],
)
def test_only_imports_that_come_first_are_made_in_advance(source, count):
    assert len(leading_imports(source)) == count


def test_commands_that_are_no_script_or_import_little_are_left_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    assert is_worth_it(["python3.11", str(script), "--fast"], {})
    assert is_worth_it([sys.executable, str(script)], {})
    assert not is_worth_it(["python", str(script)], {"DAD_WARM_START": "0"})
    assert not is_worth_it(["python", "-m", "train"], {})
    assert not is_worth_it(["bash", str(script)], {})
    assert not is_worth_it(["python", "/nowhere.py"], {})
    script.write_text("import os\nimport json\n")
    assert not is_worth_it(["python", str(script)], {})


def nursery_of(job):
    """The process that forks workers, as soon as it is ready."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if job.mark in (process.info["cmdline"] or []) and process.info["cmdline"][1].endswith("nursery.py")
    ]
    if found and found[0].info["cmdline"][2] in Path("/proc/net/unix").read_text():
        return found[0]
    return None


def test_successor_is_a_fork_and_finds_what_a_fresh_interpreter_finds(start, tmp_path):
    script = tmp_path / "warm.py"
    source = Path(WORKER).read_text()
    body = source.replace("\n\nmain()\n", "")
    script.write_text(
        f"import dad\n{body}\n{FACTS}\nsay('facts', facts())\nsay('draws', random.random())\nmain()\n"
    )
    job = start("-np", "2", "--min-np", "1", command=(sys.executable, str(script)))
    job.until("meets 2", 2)
    wait_until(lambda: nursery_of(job))
    first = job.workers()["localhost:1"]
    first.kill()
    job.until("localhost:1 meets 2")
    second = job.workers()["localhost:1"]
    assert second.parent().parent().pid == nursery_of(job).pid
    facts = re.findall(r"localhost:1 facts (.*)", job.text)
    assert len(facts) == 2
    assert facts[0] == facts[1]
    draws = re.findall(r"draws (.*)", job.text)
    assert len(set(draws)) == 3

    # The nursery's end is none of the workers' business: the next one starts in the usual way.
    nursery = nursery_of(job)
    nursery.kill()
    wait_until(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE)
    assert second.is_running()
    second.kill()
    job.until("localhost:1 starts")
    job.until("meets 2", 2)
    assert job.finish() == 0, job.text
    assert not job.processes()


def test_error_of_a_fork_is_shown_as_that_of_a_script(start, tmp_path):
    script = tmp_path / "warm.py"
    source = Path(WORKER).read_text().replace("\n\nmain()\n", "")
    script.write_text(
        f"import dad\n{source}\n"
        "if ME == 'localhost:1' and os.path.exists(FOLDER + '/again'): raise ValueError('on purpose')\n"
        "main()\n"
    )
    job = start("-np", "2", "--min-np", "1", command=(sys.executable, str(script)))
    job.until("meets 2", 2)
    wait_until(lambda: nursery_of(job))
    (tmp_path / "again").touch()
    job.workers()["localhost:1"].kill()
    job.until(r"the new worker on localhost:1 was lost: exit code 1; it is started again in 1 s")
    (tmp_path / "again").unlink()
    job.until("meets 2", 2)
    assert job.finish() == 0, job.text
    trace = job.text[job.text.index("Traceback") : job.text.index("ValueError")]
    assert "warm.py" in trace
    assert "nursery.py" not in trace
