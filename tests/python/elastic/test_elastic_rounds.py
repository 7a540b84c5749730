"""Ranks come and go: who goes on from what. Workers without a framework, and a launcher that the test scripts."""

import json

from dad.elastic.wire import HostUpdateResult
from scripted_launcher import Launcher, python


def job(tmp_path, slots, respawn=False, **plan):
    plan = {"steps": 8, "folder": str(tmp_path), **plan}
    return Launcher(python("plain_worker.py", json.dumps(plan)), slots, respawn, OMP_NUM_THREADS="1")


def test_survivors_give_their_state_to_a_newcomer_also_if_that_is_rank_0(tmp_path):
    slots = ["a:0", "a:1", "b:0"]
    with job(tmp_path, slots, respawn=True, die={"a:0": 3}) as launcher:
        assert launcher.wait() == {"a:0": 0, "a:1": 0, "b:0": 0}
        done = launcher.lines("DONE")
        # 3 ranks in each of 8 steps, from the zeros of rank 0: nothing twice, nothing left out.
        assert len(done) == 3, launcher.output()
        assert all("8 [24.0, 24.0, 24.0] [3, 3, 3, 3, 3, 3, 3, 3]" in line for line in done), done
        again = [line for line in launcher.logs["a:0"] if line.startswith("ROUND")]
        assert again == [
            "ROUND 0 of 3 step 0 [0.0, 0.0, 0.0]",
            "ROUND 0 of 3 step 3 [9.0, 9.0, 9.0]",
        ]
        assert launcher.lines("rank 1 has given its state to rank 0")


def test_a_job_shrinks_and_grows_in_order_without_going_back(tmp_path):
    hold = {"3": "shrunk", "5": "grown"}
    with job(tmp_path, ["a:0", "a:1", "b:0"], hold=hold, process_set=[0, 2]) as launcher:
        launcher.wait_for_line("HOLD 3", 3)
        launcher.change(["a:1", "b:0"], HostUpdateResult.removed)
        (tmp_path / "shrunk").touch()
        launcher.wait_for_line("HOLD 5", 2)
        launcher.change(["a:1", "b:0", "b:1"], HostUpdateResult.added)
        (tmp_path / "grown").touch()
        assert launcher.wait() == {"a:0": 1, "a:1": 0, "b:0": 0, "b:1": 0}
        done = launcher.lines("DONE")
        assert len(done) == 3, launcher.output()
        # The step in which hosts changed was committed.
        assert all("[22.0, 22.0, 22.0] [3, 3, 3, 3, 2, 2, 3, 3]" in line for line in done), launcher.output()
        assert any("a[0] is not in this job any more" in line for line in launcher.logs["a:0"])
        assert launcher.lines("SET ProcessSet(process_set_id=None, ranks=[0, 2]")[0].endswith(
            "rank 2 of it are gone; the job has 2 now"
        )
        assert len([line for line in launcher.lines("SET 1") if line == "SET 1"]) == 2


def test_less_than_half_of_the_last_group_does_not_go_on(tmp_path):
    slots = ["a:0", "a:1", "b:0", "b:1", "c:0"]
    with job(tmp_path, slots, die={"a:1": 3, "b:0": 3, "b:1": 3}) as launcher:
        exits = launcher.wait()
        assert exits["a:0"] == exits["c:0"] == 1, launcher.output()
        assert not launcher.lines("DONE")
        assert launcher.lines("ranks 0, 1 of this round are all that is left of the 5 ranks")


def test_nobody_goes_on_where_all_that_had_the_state_are_gone(tmp_path):
    with job(tmp_path, ["a:0", "a:1"], hold={"3": "never"}) as launcher:
        launcher.wait_for_line("HOLD 3", 2)
        store = dict(launcher._store)
        assert store["/dad_elastic/has_state"] == b"1"
        for worker in launcher.workers.values():
            worker.kill()
        launcher.wait()
        with launcher._lock:
            launcher.slots = ["a:0", "a:1"]
            launcher.exits.clear()
            launcher.workers.clear()
            launcher._begin_round()
            launcher._store["/dad_elastic/has_state"] = b"1"
        assert set(launcher.wait().values()) == {1}
        assert launcher.lines("no rank of this round has the state of the job")
