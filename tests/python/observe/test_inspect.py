"""What a running job says of itself: `dad inspect`, SIGUSR1, the slowest rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback

import pytest

from dad.observe.position import describe
from dad.observe.table import table
from util import job_environment

RANKS = 3
# Rank 1 is late in every step. Then rank 2 hangs in a loop and the others in a collective, until a file comes.
SCRIPT = """
import json, os, sys, time
import dad.basics as dad
from dad._lib import _core
dad.init()
for _ in range(12):
    time.sleep(0.03 * (dad.rank() == 1))
    _core.reduce_zeros("gradient", 4, 0)
with open(f"{sys.argv[1]}/stats.{dad.rank()}", "w") as file:
    json.dump([os.getpid(), dad.stats().get("slowest")], file)
def load():
    while not os.path.exists(f"{sys.argv[1]}/go"):
        pass
if dad.rank() == 2:
    load()
_core.reduce_zeros("stuck", 4, 0)
dad.shutdown()
print("went on")
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that hangs, what its ranks say of it in all ways, and its output when it was let go."""
    folder = tmp_path_factory.mktemp("job")
    environment = job_environment(DAD_JOB_ID="night shift")
    command = [sys.executable, "-m", "dad.runner.cli", "-np", str(RANKS)]
    launcher = subprocess.Popen(
        [*command, sys.executable, "-c", SCRIPT, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        files = [folder / f"stats.{rank}" for rank in range(RANKS)]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.stat().st_size for file in files):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.05)
        stats = [json.loads(file.read_text()) for file in files]

        def inspect(*arguments):
            command = [sys.executable, "-m", "dad.cli", "inspect", *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

        # Until both have arrived in the collective, and know that of each other.
        while shown := inspect("--job", "night_shift"):
            if len(re.findall(r': allreduce "stuck", for \S+ s, waits for rank 2\n', shown.stdout)) >= 2:
                break
            assert time.monotonic() < deadline, shown
        by_pid = [inspect("--pid", str(pid)) for pid in (launcher.pid, stats[2][0])]
        unknown = inspect("--pid", "1")
        os.kill(launcher.pid, signal.SIGUSR1)
        os.kill(stats[1][0], signal.SIGUSR1)
        time.sleep(2)
        (folder / "go").touch()
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    return shown, by_pid, unknown, stats, output, launcher.returncode


def test_the_table_has_what_every_rank_does(job):
    shown, *_ = job
    text = shown.stdout
    assert shown.returncode == 0, shown.stderr
    assert "job night shift at" in text and "3 of 3 ranks have answered rank 0" in text
    for rank in (0, 1):
        assert re.search(rf'rank {rank}: allreduce "stuck", for \d+\.\d s, waits for rank 2\n', text), text
    assert 'rank 2: ranks 0, 1 have submitted "stuck", this rank has not' in text
    # It may be in what the loop calls.
    assert re.search(r"^2 .*<string>:\d+ in load( \[in .*\])?$", text, re.M), text
    assert "main thread of ranks 0, 1, the innermost line last" in text


def test_a_job_is_found_by_the_launcher_or_by_a_rank(job):
    _, by_pid, unknown, *_ = job
    for found in by_pid:
        assert found.returncode == 0, found.stderr
        assert "job night shift at" in found.stdout
    assert unknown.returncode == 1 or "several jobs" in unknown.stderr


def test_sigusr1_prints_the_table_and_the_job_goes_on(job):
    *_, output, code = job
    assert code == 0, output
    assert output.count("went on") == RANKS
    assert "3 of 3 ranks have answered rank 0" in output, "by the launcher, which asks one rank"
    assert "3 of 3 ranks have answered rank 1" in output, "by the rank itself"


def test_statistics_name_the_slowest_rank(job):
    _, _, _, stats, *_ = job
    for _, slowest in stats:
        assert slowest["rank"] == 1
        assert slowest["last_in"] >= 6
        assert 10 <= slowest["steps"] <= 12
        assert 0.01 < slowest["lag_seconds"] <= slowest["worst_seconds"]


def test_the_user_decides_what_sigusr1_means():
    code = (
        "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('mine'));"
        "import dad.basics as dad; dad.init(); os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=job_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert "ranks have answered" not in done.stderr


def snapshot(rank, **more):
    empty = {"hostname": "left", "pid": 7, "error": "", "joined": False, "last_submitted": "", "where": ""}
    times = {"since_submit": -1.0, "since_result": -1.0, "since_cycle": -1.0, "negotiations": 0}
    lists = {
        "num_requests": 0,
        "requests": [],
        "num_batches": 0,
        "batches": [],
        "num_missing": 0,
        "missing": [],
    }
    return {"rank": rank, "stack": "", **empty, **times, **lists, **more}


def test_ranks_that_do_not_answer_are_named():
    text = table([snapshot(0), snapshot(2, joined=True, error="rank 1: gone")], "j", 0, 4)
    assert "2 of 4 ranks have answered rank 0" in text
    assert "no answer from ranks 1, 3" in text
    assert "FAILED: rank 1: gone" in text
    assert "rank 2: has called join()" in text


def frame(filename, line, name, code=""):
    return traceback.FrameSummary(filename, line, name, line=code, lookup_line=False)


def test_the_line_of_the_user_is_named_and_what_it_has_called():
    user = frame("/jobs/train.py", 31, "main", "for batch in loader:")
    library = frame(json.__file__, 10, "loads")
    assert describe([user]) == "/jobs/train.py:31 in main: for batch in loader:"
    assert describe([user, library]) == (
        "/jobs/train.py:31 in main: for batch in loader: [in json/__init__.py:10, loads]"
    )
    assert describe([library]) == "json/__init__.py:10 in loads"
