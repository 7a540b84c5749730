"""Runs the check_* functions of a test file on several ranks in one launch.

Importing torch takes seconds per rank, so a test file launches once and every check of it is one
pytest case: ranks run the checks one after the other and write down how each went.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(__file__).parents[3] / "python"


def check_names(files: str) -> list[str]:
    """The checks in a file, or in several (joined()), in order, without importing them."""
    lines = [line for file in files.split(os.pathsep) for line in Path(file).read_text().splitlines()]
    return [line[4 : line.index("(")] for line in lines if line.startswith("def check_")]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, below those that the kernel gives to whoever
    connects."""
    for first in random.sample(range(10_000, 32_000), 1000):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise AssertionError("no free ports")


def joined(*files: str) -> str:
    """Files whose checks share a launch."""
    return os.pathsep.join(files)


def load_checks(files: str) -> dict[str, Any]:
    """The module of each check."""
    modules = {}
    for file in files.split(os.pathsep):
        sys.path.append(str(Path(file).parent))  # checks that use those of another file
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules |= dict.fromkeys(check_names(file), module)
    return modules


class Results:
    """How the checks of one launch went, by rank."""

    def __init__(self, by_rank: list[dict[str, str]], output: str) -> None:
        self._by_rank = by_rank
        self.output = output

    def assert_passed(self, check: str) -> None:
        problems = {
            rank: results.get(check, "did not finish; output of the job:\n" + self.output[-4000:])
            for rank, results in enumerate(self._by_rank)
            if results.get(check) != "passed"
        }
        assert not problems, "\n".join(f"rank {rank}: {text}" for rank, text in problems.items())


def launch(
    file: str, num_ranks: int, timeout: float = 240, runner: str = __file__, **environment: str
) -> Results:
    """Runs all checks of `file`, or of several (joined()), under dadrun. Runner: the script that runs them on a rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dad.runner.cli", "-np", str(num_ranks)]
        command += [sys.executable, runner, file, folder]
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=job_environment(**environment),
        )
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.terminate()
            output, _ = job.communicate()
            output += f"\nthe job was stopped after {timeout} s"
        finally:
            if job.poll() is None:  # pytest's own limit has ended this test
                job.terminate()
        results = []
        for rank in range(num_ranks):
            path = Path(folder) / f"{rank}.json"
            lines = path.read_text().splitlines() if path.exists() else []
            results.append(dict(json.loads(line) for line in lines))
        return Results(results, output)


def job_environment(**environment: str) -> dict[str, str]:
    """Ours, with the source tree in front where dad is not installed."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("dad") is None:
        paths.insert(0, str(PYTHON))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}


def needs_torch() -> None:
    pytest.importorskip("torch")


def launched_once(file: str, num_ranks: int, **environment: str) -> Any:
    """The fixture `results` of a test file."""

    @pytest.fixture(scope="module")
    def results() -> Results:
        needs_torch()
        return launch(file, num_ranks, **environment)

    return results


@contextlib.contextmanager
def slow_link(bytes_per_second: float = 1e5):
    """The planner sees a link on which bytes count, or another one."""
    from dad.planning import link

    measure = link.measure
    link.measure = lambda process_set, multiply: link.Measured(0.0, bytes_per_second, 1e10, 1e10, False)
    try:
        yield
    finally:
        link.measure = measure


class Warnings(logging.Handler):
    """What dad has warned of within it, as far as it contains `text`."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._text = text
        self.messages: list[str] = []

    def __enter__(self) -> list[str]:
        logging.getLogger("dad").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dad").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.messages.append(record.getMessage())


def hvd() -> Any:
    """dad.torch, which only the ranks import."""
    import dad.torch

    return dad.torch


def imitate_hosts() -> None:
    """DAD_TEST_HOSTS=left,left,right: on which host each rank believes to be."""
    if hosts := os.environ.get("DAD_TEST_HOSTS"):
        os.environ["DAD_HOSTNAME"] = hosts.split(",")[int(os.environ["HOROVOD_RANK"])]


def run_checks(file: str, folder: str) -> None:
    """One rank: runs the checks and appends [name, outcome] lines to a file of its own."""
    import torch

    import dad.torch as hvd

    imitate_hosts()
    checks = load_checks(file)
    torch.set_num_threads(1)
    hvd.init()
    with slow_link(), (Path(folder) / f"{hvd.rank()}.json").open("w", buffering=1) as out:
        for name, module in checks.items():
            torch.manual_seed(0)
            try:
                getattr(module, name)()
                outcome = "passed"
            except BaseException:
                outcome = traceback.format_exc()
                print(outcome, file=sys.stderr, flush=True)
            out.write(json.dumps([name, outcome]) + "\n")
            try:
                hvd.barrier()
            except hvd.HorovodInternalError:
                # The check has killed the engine on all ranks; the next ones get a new one.
                hvd.shutdown()
                hvd.init()
    hvd.shutdown()


if __name__ == "__main__":
    run_checks(sys.argv[1], sys.argv[2])
