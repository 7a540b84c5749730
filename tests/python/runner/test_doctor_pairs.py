"""`dadrun --doctor` between hosts: what a look at every pair finds, and what it says about it."""

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from dad.runner.doctor_pairs import examine_pairs, interpret
from dad.runner.doctor_pairs_worker import MARK, measure, serve
from dad.runner.findings import ABSENT, BROKEN, OK
from dad.runner.hosts import Host
from util import job_environment

HOSTS = [Host("left", 1), Host("right", 1), Host("far", 1)]
VERSIONS = {"python": "3.11.2", "dad": "0.1.0", "torch": "2.13.0"}


def job(lines=None, versions=None):
    """What three hosts find, where all is well except for `lines`."""
    fine = {"delay": 0.01, "skew": 0.002, "rate": 12.5e6}
    return [
        {
            "address": f"10.0.0.{here + 1}",
            "versions": {**VERSIONS, **(versions or {}).get(here, {})},
            "lines": {
                str(there): {**fine, **(lines or {}).get((here, there), {})}
                if "error" not in (lines or {}).get((here, there), {})
                else lines[here, there]
                for there in range(3)
                if there != here
            },
        }
        for here in range(3)
    ]


def findings(found, hosts=HOSTS):
    return [(finding.mark, finding.text) for finding in interpret(hosts, found)]


def test_hosts_without_a_problem_get_the_command_to_type_next():
    told = findings(job())
    assert {mark for mark, _ in told} == {OK}
    text = "\n".join(text for _, text in told)
    assert "each of 3 hosts reaches all others" in text and "clocks agree within 2 ms" in text
    assert "torch 2.13.0" in text and "100 Mbit/s and 10 ms each way" in text
    assert "dad plan --size 3 --link 100mbit,10ms train.py" in text
    assert "hierarchical" not in text


def test_a_pair_that_does_not_connect_is_named_with_what_to_look_at():
    told = findings(job({(2, 1): {"error": "timed out"}}))
    ((mark, text),) = [one for one in told if "reach" in one[1]]
    assert mark == BROKEN and "far does not reach right at 10.0.0.2: timed out" in text
    assert "ip route get 10.0.0.2" in text
    assert any("lines: " in text for _, text in told)  # of the others


def test_clocks_versions_and_slow_lines_are_told_with_a_cure():
    found = job(
        {(0, 2): {"skew": -7.5}, (1, 0): {"rate": 1e6}}, {1: {"torch": "2.12.0"}, 2: {"dad": "0.0.9"}}
    )
    told = findings(found)
    for mark, said in (
        (ABSENT, "the clock of far is 7.5 s behind that of left"),
        (ABSENT, "torch is 2.12.0 on right and 2.13.0 on left; on right: pip install torch==2.13.0"),
        (BROKEN, "dad is 0.0.9 on far and 0.1.0 on left"),
        (ABSENT, "right → left has 8 Mbit/s, others 100 Mbit/s"),
        (OK, "--link 8mbit,10ms"),
    ):
        assert any(one == mark and said in text for one, text in told), (said, told)


def test_hosts_with_several_ranks_are_told_of_sums_inside_them():
    told = findings(job(), [Host("left", 2), Host("right", 2), Host("far", 1)])
    assert any("2 of 3 hosts" in text and "--hierarchical-allreduce" in text for _, text in told)


def test_processes_of_this_machine_find_their_lines(tmp_path):
    command = [sys.executable, "-m", "dad.runner.cli", "-np", "3"]
    command += [sys.executable, "-m", "dad.runner.doctor_pairs_worker"]
    done = subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if MARK in line]
    found = json.loads(line.partition(MARK)[2])
    assert [sorted(one["lines"]) for one in found] == [["1", "2"], ["0", "2"], ["0", "1"]]
    for one in found:
        assert one["versions"]["dad"] and one["address"] == "127.0.0.1"
        for measured in one["lines"].values():
            assert 0 < measured["delay"] < 1 and abs(measured["skew"]) < 1 and measured["rate"] > 1e5


def test_a_line_is_measured_by_who_knows_the_token_only():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=serve, args=(server, "a" * 32), daemon=True).start()
        assert measure("127.0.0.1", port, "a" * 32)["rate"] > 0
        began = time.monotonic()
        assert "error" in measure("127.0.0.1", port, "b" * 32)
        assert time.monotonic() - began < 10
    with socket.socket() as nobody:  # listens
        nobody.bind(("127.0.0.1", 0))
        assert measure(*nobody.getsockname(), "a" * 32) == {"error": "Connection refused"}


@pytest.mark.parametrize("code", ["raise SystemExit('no luck')", ""])
def test_a_worker_that_fails_is_shown_with_the_command(code):
    (finding,) = examine_pairs(HOSTS, [sys.executable, "-c", code])
    assert finding.mark == BROKEN and "no result; try: " in finding.text
    assert "no luck" in finding.text or not code
