"""A real, unmodified horovodrun launches an elastic job of dad's workers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import dad
from scripted_launcher import python

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
OVERLAY = str(Path(dad.__file__).parent / "_overlay")


def test_a_job_of_horovodrun_takes_in_a_host_and_survives_the_loss_of_the_first(real_horovod, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    plan = {"steps": 9, "folder": str(tmp_path), "hold": {"3": "grown"}, "die": {"localhost:0": 6}}
    command = [sys.executable, real_horovod / "bin" / "horovodrun", "-np", "1", "--min-np", "1"]
    command += ["--network-interface", "lo", "--host-discovery-script", script]
    job = subprocess.Popen(
        [*command, *python("plain_worker.py", json.dumps(plan))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([OVERLAY, str(real_horovod), PACKAGE_ROOT])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = threading.Timer(240, job.kill)
    limit.start()
    lines = []
    try:
        for line in job.stdout:
            lines.append(line)
            if "HOLD 3" in line:
                hosts.write_text("localhost:1\n127.0.0.1:1\n")
            if "NEWS added" in line:
                (tmp_path / "grown").touch()
    finally:
        limit.cancel()
        job.kill()
    output = "".join(lines)
    (done,) = [line for line in lines if "DONE" in line]
    # The host that came had the state when the first one was lost.
    assert "127.0.0.1:0 0 9 [11.0, 11.0, 11.0] [1, 1, 1, 1, 2, 2, 1, 1, 1]" in done, output
