"""A dadrun of an elastic job, with workers that speak its protocol and have no framework (tiny_worker.py)."""

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import dad

WORKER = str(Path(__file__).parents[1] / "elastic" / "tiny_worker.py")
PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
SECONDS = 40.0


class Job:
    """A dadrun; its lines, of both streams, in order."""

    def __init__(self, folder, *args, command=(sys.executable, WORKER), events=(), env=None, seconds=SECONDS):
        self.seconds = seconds
        self.folder = folder
        path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        self.mark = f"mark-{os.getpid()}-{folder.name}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dad.runner.cli", *args, *command, *events, self.mark],
            env={**os.environ, "PYTHONPATH": path, "TINY_FOLDER": str(folder), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, pattern, count=1):
        """Reads on until so many new lines match; the last match."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no {pattern!r} within {self.seconds} s:\n" + "\n".join(self.lines))
            if line is None:
                pytest.fail(f"the job has ended without {pattern!r}:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if found := re.search(pattern, line):
                count -= 1
                if count == 0:
                    return found

    def finish(self):
        (self.folder / "finish").touch()
        return self.end()

    def end(self):
        """The exit code; all lines are read."""
        code = self.process.wait(self.seconds)
        while (line := self._queue.get(timeout=self.seconds)) is not None:
            self.lines.append(line)
        return code

    @property
    def text(self):
        return "\n".join(self.lines)

    def workers(self):
        """Those that have said that they start, as far as they still run."""
        found = {}
        for slot, pid in re.findall(r">:(\S+:\d) starts .* (\d+)$", self.text, re.MULTILINE):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE and self.mark in process.cmdline():
                    found[slot] = process
        return found

    def processes(self):
        """Whatever belongs to the job, but for dadrun itself."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            command = process.info["cmdline"] or []
            if self.mark in command and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return [process for process in found if process.pid != self.process.pid]


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(*args, **options):
        jobs.append(Job(tmp_path, *args, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
