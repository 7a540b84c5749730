"""PyTorch in elastic jobs as users write them: loaders with processes, join(), sums inside of hosts, checkpoints.

A rank is lost in the middle of an epoch, another one where its peers have joined, ranks are added, all are killed,
and a job of another size goes on from the checkpoint.
"""

import json

import pytest

from dad.elastic.wire import HostUpdateResult
from scripted_launcher import Launcher, python

pytest.importorskip("torch")
WORKER = "torch_epochs_worker.py"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One of which all ranks are killed at last, and one that goes on from its checkpoint."""
    folder = tmp_path_factory.mktemp("epochs")
    die = {"b:1": [1, "even"], "b:0": [2, "uneven"]}
    plan = {"folder": str(folder), "epochs": 6, "die": die, "hold": {"3": "grown", "5": "goes on"}}
    environment = {"OMP_NUM_THREADS": "1", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}
    slots = ["a:0", "a:1", "b:0", "b:1"]
    with Launcher(python(WORKER, json.dumps(plan)), slots, **environment) as killed:
        killed.wait_for_line("HOLD 3", 2, timeout=200)
        killed.change(["a:0", "a:1", "c:0", "c:1"], HostUpdateResult.added)
        (folder / "grown").touch()
        killed.wait_for_line("HOLD 5", 4, timeout=120)
    (folder / "goes on").touch()
    plan = {**plan, "die": {}}
    with Launcher(python(WORKER, json.dumps(plan)), ["a:0", "a:1", "b:0"], **environment) as last:
        last.wait(timeout=200)
        yield killed, last


def test_losses_in_a_loader_and_in_a_join_are_survived(jobs):
    killed, _ = jobs
    assert len(killed.lines("DIE 1 even")) == len(killed.lines("DIE 2 uneven")) == 1, killed.output()
    rounds = {line.partition(" of ")[2] for line in killed.lines("ROUND")}
    assert rounds == {"4 epoch 0", "3 epoch 1", "2 epoch 2", "4 epoch 4"}, killed.output()


def test_a_job_of_another_size_goes_on_from_the_checkpoint_of_a_lost_one(jobs):
    _, last = jobs
    assert set(last.exits.values()) == {0}, last.output()
    assert len(last.lines("LOADED 5")) == len(last.lines("[4, 3, 2, 2, 4, 3]")) == 3, last.output()


def test_applied_and_kept_are_all_gradients_over_losses_growth_and_a_restart(jobs):
    _, last = jobs
    lines = [line.split() for line in last.lines("METHOD")]
    assert len(lines) == 3 * 4, last.output()
    assert max(float(line[3]) for line in lines) < 1e-12, last.output()
    assert min(float(line[5]) for line in lines) > 0, last.output()
