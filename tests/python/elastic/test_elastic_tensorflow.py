"""TensorFlow and Keras in elastic jobs that lose ranks."""

import json

import pytest

from scripted_launcher import Launcher, python

pytest.importorskip("tensorflow")
QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def test_a_peer_lost_in_a_function_or_eagerly_is_an_error_that_run_handles(tmp_path):
    """And nothing that tapes keep is lost but what died."""
    plan = {"steps": 9, "folder": str(tmp_path), "die": {"a:1": ["graph", 3], "b:0": ["eager", 6]}}
    slots = ["a:0", "a:1", "b:0", "b:1"]
    with Launcher(python("tensorflow_worker.py", json.dumps(plan)), slots, **QUIET) as launcher:
        exits = launcher.wait(timeout=280)
        assert exits == {"a:0": 0, "a:1": 3, "b:0": 3, "b:1": 0}, launcher.output()
        done = launcher.lines("DONE")
        assert len(done) == 2
        assert all("[4, 4, 4, 3, 3, 3, 2, 2, 2]" in line for line in done), launcher.output()


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_fit_goes_on_and_a_new_rank_takes_part_from_the_last_commit(tmp_path, backend):
    pytest.importorskip(backend)
    plan = {"folder": str(tmp_path), "die": {"a:0": [1, 3]}}
    environment = {**QUIET, "KERAS_BACKEND": backend}
    command = python("keras_worker.py", json.dumps(plan))
    with Launcher(command, ["a:0", "a:1"], respawn=True, **environment) as launcher:
        exits = launcher.wait(timeout=280)
        assert exits == {"a:0": 0, "a:1": 0}, launcher.output()
        done = [line.split(" ", 2)[2] for line in launcher.lines("DONE")]
        assert len(done) == 2 and done[0] == done[1], launcher.output()
        assert done[0].startswith("2 3 "), launcher.output()
        # The commit was after two batches of the second epoch.
        assert len(launcher.lines("of 2 epoch 1 batch 1")) == 2, launcher.output()
