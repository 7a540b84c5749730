"""The same bits, bytes and messages as recorded, for every method in both frameworks on 2 and 3 ranks.

golden.json has what golden_job.py printed for each kind of CPU, since the frameworks and dad choose their
kernels by CPU and other kernels round differently. After a change that is meant to change bits or bytes,
record it again on this machine, and say in the commit why they changed:

    PYTHONPATH=tests/python/support .venv/bin/python tests/python/project/test_golden.py --record
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tf_util import ENVIRONMENT
from util import job_environment

GOLDEN = Path(__file__).with_name("golden.json")
JOB = Path(__file__).with_name("golden_job.py")
JOBS = [("torch", 2), ("torch", 3), ("tensorflow", 2), ("tensorflow", 3)]
PACKAGES = {"torch": "torch", "tensorflow": "tensorflow-cpu"}


def kind_of_machine(framework: str) -> str:
    """What the bits of a result depend on beside dad."""
    info = Path("/proc/cpuinfo").read_text()
    vendor = re.search(r"vendor_id\s*: (\w+)", info)
    flags = re.search(r"^flags\s*: (.*)$", info, re.MULTILINE)
    known = flags[1].split() if flags else []
    level = next((flag for flag in ("avx512vl", "avx2") if flag in known), "baseline")
    version = importlib.metadata.version(PACKAGES[framework])
    return f"{vendor[1] if vendor else '?'} {level} {framework} {version}"


def run(framework: str, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote."""
    # Packing and rings are chosen by the measured line; comparing replicas sends bytes of its own.
    settings = {"DAD_PACK": "0", "DAD_RING_BYTES": "0", "DAD_CHECK_REPLICAS": "0", "OMP_NUM_THREADS": "1"}
    environment = job_environment(**ENVIRONMENT, **settings)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dad.runner.cli", "-np", str(num_ranks)]
        command += [sys.executable, str(JOB), framework, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def by_method(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One digest, since replicas are equal, and what each rank sent: bytes and messages per step."""
    recorded = {}
    for method in ranks[0]:
        digests = {rank[method]["digest"] for rank in ranks}
        assert len(digests) == 1, f"{method}: replicas differ: {digests}"
        sent = [[rank[method]["bytes"], rank[method]["messages"]] for rank in ranks]
        recorded[method] = [digests.pop(), *sent]
    return recorded


@pytest.mark.parametrize(("framework", "num_ranks"), JOBS)
def test_every_method_has_the_recorded_bits_bytes_and_messages(framework, num_ranks):
    pytest.importorskip(framework)
    seen = by_method(run(framework, num_ranks))
    machine = kind_of_machine(framework)
    golden = json.loads(GOLDEN.read_text())
    if machine not in golden:
        pytest.skip(
            f"nothing is recorded for {machine}: run {Path(__file__).name} --record on the main branch"
        )
    expected = golden[machine][str(num_ranks)]
    differing = {
        method: {"recorded": expected.get(method), "seen": seen.get(method)}
        for method in {**expected, **seen}
        if not same(expected.get(method), seen.get(method))
    }
    assert not differing


def same(recorded: list[Any] | None, seen: list[Any] | None) -> bool:
    """Bits and bytes are equal. Messages may be twice as many: the timing of the first steps decides which
    tensors share a batch."""
    if recorded is None or seen is None or recorded[0] != seen[0]:
        return False
    return all(
        was_bytes == now_bytes and now_messages <= 2 * was_messages
        for (was_bytes, was_messages), (now_bytes, now_messages) in zip(recorded[1:], seen[1:], strict=True)
    )


def record() -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for framework, num_ranks in JOBS:
        ranks = golden.setdefault(kind_of_machine(framework), {})
        ranks[str(num_ranks)] = by_method(run(framework, num_ranks))
    GOLDEN.write_text(as_text(golden))


def as_text(golden: dict[str, Any]) -> str:
    """JSON with a method a line, so that a diff shows which of them changed."""
    lines = []
    for machine, jobs in golden.items():
        for num_ranks, methods in jobs.items():
            rows = [f"    {json.dumps(method)}: {json.dumps(row)}" for method, row in methods.items()]
            lines.append((machine, f"  {json.dumps(num_ranks)}: {{\n" + ",\n".join(rows) + "\n  }"))
    machines = [
        f"{json.dumps(machine)}: {{\n" + ",\n".join(job for name, job in lines if name == machine) + "\n}"
        for machine in golden
    ]
    return "{\n" + ",\n".join(machines) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(__doc__)
    record()
