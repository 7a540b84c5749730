"""dadrun's elastic jobs with real processes of a worker without a framework (tiny_worker.py)."""

import re
import signal
import sys
import time

import pytest

from elastic_job import SECONDS, wait_until


def write_hosts(folder, text):
    """What the discovery script prints."""
    (folder / "hosts.new").write_text(text)
    (folder / "hosts.new").replace(folder / "hosts")
    script = folder / "discover.sh"
    if not script.exists():
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)
    return str(script)


def test_lost_worker_is_started_again_and_joins(start):
    job = start("-np", "3", "--min-np", "2", events=["localhost:1@10=kill"])
    job.until(r"meets 3", 3)
    job.until(r"rank 1 on localhost was lost: killed by signal 9 \(SIGKILL\); it is started again")
    # A worker that is quick to start again is back before the others have met without it.
    if job.until(r"(\d) ranks are in training \(before: 3\)")[1] == "2":
        job.until(r"told \[2\]")
        job.until(r"3 ranks are in training \(before: 2\)")
    job.until(r"meets 3", 3)
    assert job.finish() == 0, job.text
    # Each has kept its rank, and its slot on the host.
    places = re.findall(r"localhost:(\d) place (\d) (\d) (\d) (\d) 0 1", job.text)
    assert {rank for slot, rank, *_ in places if slot == "0"} == {"0"}
    assert all(slot == local for slot, _, _, local, _ in places)
    # The number of ranks was not known when they started.
    assert re.search(r"localhost:0 starts 0 1 None", job.text)


def test_worker_that_ends_before_its_first_place_does_not_hold_the_others_up(start):
    job = start("-np", "2", "--min-np", "1", events=["localhost:1@0=exit-3"])
    job.until(r"localhost:0 meets 1")
    job.until(r"localhost:1 place")
    job.until(r"meets 2", 2)
    assert job.finish() == 0, job.text
    assert "rank 1 on localhost was lost: exit code 3; it is started again" in job.text


def test_hosts_of_a_script_come_and_go(start, tmp_path):
    script = write_hosts(tmp_path, "localhost:1\n")
    job = start("--min-np", "1", "--max-np", "3", "--slots", "2", "--host-discovery-script", script)
    job.until("localhost:0 meets 1")
    write_hosts(tmp_path, "localhost:1\n127.0.0.1\n")  # which has two slots, by --slots
    job.until("told")
    job.until("meets 3", 3)
    write_hosts(tmp_path, "127.0.0.1:2\n")
    job.until("localhost:0 place -1 -1 -1 -1 -1 -1")
    job.until("meets 2", 2)
    (tmp_path / "hosts").unlink()
    job.until(r"discover.sh ended with code 1: cat: .*; the hosts stay as they were")
    write_hosts(tmp_path, "127.0.0.1:2\n")
    job.until("discover.sh works again")
    assert job.finish() == 0, job.text
    assert job.text.count("stay as they were") == 1
    assert "was lost" not in job.text


def test_job_that_cannot_go_on_ends_with_every_reason(start):
    again = [f"localhost:1@{step}@{n}=exit-5" for n, step in ((1, 4), (2, 0), (3, 0))]
    job = start("-np", "2", "--min-np", "2", events=again)
    assert job.end() == 1
    assert "1 rank is left where --min-np is 2: waiting up to 600 s for more" in job.text
    assert "3 workers in a row have failed on localhost" in job.text
    block = job.text[job.text.rindex("dadrun: rank 1 on localhost failed: exit code 5") :]
    assert "there is no host on which another could be started" in block
    assert not job.processes()


def test_job_that_stays_too_small_ends_after_its_timeout_with_every_reason(start):
    events = ["localhost:1@5=exit-6", "localhost:1@0@2=stop"]  # and the next one does not come
    job = start("-np", "2", "--min-np", "2", "--elastic-timeout", "2", events=events)
    assert job.end() == 1
    assert "1 rank is left where --min-np is 2: waiting up to 2 s for more" in job.text
    assert re.search(r"1 rank is left where --min-np is 2, also after \d s \(--elastic-timeout\)", job.text)
    assert "dadrun: rank 1 on localhost failed: exit code 6" in job.text
    assert not job.processes()


def test_job_without_survivors_fails_with_the_first_to_fail(start):
    job = start("-np", "2", "--min-np", "1", events=["localhost:0@20=exit-4", "localhost:1@5=stop"])
    job.until("localhost:1 does stop")
    job.until("localhost:0 does exit-4")
    # The other is still there, and goes on when it can.
    assert "no rank is left" not in job.text
    job.workers()["localhost:1"].kill()
    assert job.end() == 137
    assert "dadrun: no rank is left that has the state of the training" in job.text
    assert not job.processes()


def test_elastic_job_with_a_limit_of_resets(start):
    job = start("-np", "2", "--min-np", "1", "--reset-limit", "0", events=["localhost:1@5=kill"])
    assert job.end() == 1
    assert "dadrun: the job was reset 1 times, and --reset-limit is 0" in job.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_launcher_ends_its_workers(start, number):
    job = start("-np", "2", "--min-np", "1")
    job.until("meets 2", 2)
    workers = job.workers()
    assert len(workers) == 2
    workers["localhost:1"].suspend()  # one that hears of nothing
    began = time.monotonic()
    job.process.send_signal(number)
    code = job.process.wait(SECONDS)
    wait_until(lambda: not job.processes())
    assert time.monotonic() - began < 10.0
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_restarts_start_a_whole_job_again(start, tmp_path):
    code = "import os, sys; n = int(os.environ['DAD_RESTART_COUNT']); print('run', n); sys.exit(3 if n < 2 else 0)"
    job = start("-np", "2", "--restarts", "5", command=(sys.executable, "-c", code))
    assert job.end() == 0
    assert "dadrun: restart 2 of 5" in job.text and "restart 3 of 5" not in job.text
    job = start("-np", "1", "--restarts", "1", command=(sys.executable, "-c", "import sys; sys.exit(7)"))
    assert job.end() == 7
