"""PyTorch in an elastic job that loses a rank, shrinks in order and grows: nothing of a gradient is lost but
what died, replicas are equal, samples come once."""

import collections
import json

import pytest

from dad.elastic.wire import HostUpdateResult
from scripted_launcher import Launcher, python

pytest.importorskip("torch")
STEPS = 14


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    plan = {
        "steps": STEPS,
        "folder": str(folder),
        "die": {"b:1": 4},
        "hold": {"7": "shrunk", "10": "grown"},
    }
    slots = ["a:0", "a:1", "b:0", "b:1"]
    with Launcher(python("torch_worker.py", json.dumps(plan)), slots, OMP_NUM_THREADS="1") as launcher:
        launcher.wait_for_line("HOLD 7", 3, timeout=150)
        launcher.change(["a:0", "a:1"], HostUpdateResult.removed)
        (folder / "shrunk").touch()
        launcher.wait_for_line("HOLD 10", 2)
        launcher.change(["a:0", "a:1", "c:0"], HostUpdateResult.added)
        (folder / "grown").touch()
        launcher.wait(timeout=120)
        yield launcher


def results(job):
    done = [line.split(" ", 3)[3] for line in job.lines("DONE")]
    assert len(done) == 3 and len(set(done)) == 1, job.output()
    return json.loads(done[0])


def test_the_job_was_as_large_as_it_should_have_been_in_every_committed_step(job):
    sizes, _ = results(job)
    assert sizes == [4] * 4 + [3] * 4 + [2] * 3 + [3] * 3


def test_applied_and_kept_are_all_gradients_less_what_died_with_a_rank(job):
    results(job)
    lines = [line.split() for line in job.lines("METHOD")]
    assert len(lines) == 3 * 9
    errors = {line[1]: float(line[3]) for line in lines}
    assert max(errors.values()) < 1e-12, errors
    assert sum(float(line[5]) > 0 for line in lines) >= 3 * 8  # most of them do keep something


def test_the_log_says_what_died_with_a_rank(job):
    (line,) = job.lines("is lost, and with it what it had kept")
    assert line.startswith("[dad rank 0] WARNING: b[1] is lost")
    assert float(line.rpartition("norm ")[2].split()[0]) > 0
    assert job.lines("b[0] has left the job")


def test_each_sample_of_an_epoch_comes_once(job):
    """But for those that fill up the last batches of an epoch."""
    _, seen = results(job)
    of_first = collections.Counter(i for epoch, indices in seen if epoch == 0 for i in indices)
    assert set(of_first) == set(range(60))
    assert sum(of_first.values()) - 60 < 8
