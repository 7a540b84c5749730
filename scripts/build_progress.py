"""Runs a build, says beforehand how long it takes, and shows how far it is.

    python scripts/build_progress.py LOG BUILD_DIR TARGET    cmake --build, its output into LOG

On a terminal one line changes; elsewhere there is a line now and then. Under pip, which shows no
output, the lines go to the terminal behind it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

SECONDS_BETWEEN_LINES = 20
LONG = 30  # seconds of one CPU; of less than this little is said
# Seconds of one CPU; headers of the frameworks are most of it.
SECONDS = {"/torch_ops/": 7, "/tf_ops/": 5, "/tests/": 7, "/bindings/": 10}
STEP = re.compile(r"^\[ *(\d+)/(\d+)\] (.*)")
PERCENT = re.compile(r"^\[ *(\d+)%\]")


def seconds_of(step: str) -> float:
    if "Building" not in step and " -c " not in step:
        return 1
    return next((seconds for part, seconds in SECONDS.items() if part in step), 2)


def duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"


class Display:
    """Where the lines go."""

    def __init__(self) -> None:
        self._file = sys.stdout
        under_pip = any(name.endswith("BUILD_BACKEND") for name in os.environ)
        if under_pip and not self._file.isatty():
            with contextlib.suppress(OSError):
                self._file = open("/dev/tty", "w")  # noqa: SIM115  as long as the process
        self._changes = sys.stdout.isatty()
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        print(f"dad: {text}", file=self._file, flush=True)
        self._last = time.monotonic()

    def update(self, text: str) -> None:
        if self._changes:
            print(f"\rdad: {text}\033[K", end="", file=self._file, flush=True)
        elif time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self.say(text)

    def end(self) -> None:
        if self._changes:
            print("\r\033[K", end="", file=self._file, flush=True)


def seconds_per_step(build_dir: Path, target: str) -> float:
    """The mean over all steps of the target; 0 with another generator than ninja."""
    if not (build_dir / "build.ninja").exists() or shutil.which("ninja") is None:
        return 0
    command = ["ninja", "-C", build_dir, "-t", "commands", target]
    steps = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return sum(map(seconds_of, steps)) / max(len(steps), 1)


def build(build_dir: Path, target: str, log: Path) -> int:
    """Builds the target; where that fails, prints what the compiler said."""
    cpus = len(os.sched_getaffinity(0))
    display = Display()
    mean = seconds_per_step(build_dir, target)
    command = ["cmake", "--build", str(build_dir), "--target", target, "--parallel", str(cpus)]
    begin = time.monotonic()
    done = total = 0.0
    with open(log, "w") as file:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.stdout is not None
        for line in job.stdout:
            file.write(line)
            if match := PERCENT.match(line):  # of make
                display.update(f"{match[1]} % of the files")
            if not (match := STEP.match(line)):
                continue
            before, total = total, int(match[2]) * mean
            done += seconds_of(match[3])
            if total > LONG and total > 1.5 * before:  # the first steps may be CMake's own
                expected = duration(total / cpus)
                display.say(f"compiling takes about {expected} on {cpus} cores, less with a compiler cache")
            elapsed = time.monotonic() - begin
            left = (total - done) * elapsed / done if done > total / 10 else total / cpus
            display.update(f"step {match[1]} of {match[2]}, about {duration(max(left, 0))} left")
    display.end()
    if job.wait() != 0:
        text = log.read_text()
        print(text[text.find("FAILED") :] if "FAILED" in text else text[-4000:])
        print(f"dad: the build failed; the whole log is {log}", file=sys.stderr)
    elif total > LONG:
        display.say(f"compiled in {duration(time.monotonic() - begin)}")
    return job.returncode


if __name__ == "__main__":
    log_name, folder, target_name = sys.argv[1:]
    sys.exit(build(Path(folder), target_name, Path(log_name)))
