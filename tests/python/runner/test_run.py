"""dad.run(): a function on every rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dad
from dad.runner.api import RankTraceback
from dad.runner.payload import pack, unpack


class OddError(Exception):
    """Pickles, but does not come back."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def my_rank():
    return int(os.environ["DAD_RANK"])


def test_results_come_by_rank():
    offset = 10
    assert dad.run(lambda x, y: my_rank() + x + y + offset, (1,), {"y": 2}, num_proc=3) == [13, 14, 15]


def test_np_is_another_name_and_one_process_the_default():
    assert dad.run(lambda: my_rank(), np=2) == [0, 1]
    assert dad.run(os.getpid) != [os.getpid()]


def test_none_is_a_result():
    assert dad.run(lambda: None, num_proc=2, hosts="localhost:2") == [None, None]


def test_exception_of_a_rank_is_raised_with_rank_and_traceback():
    def fail():
        if my_rank() == 1:
            raise KeyError("missing")
        time.sleep(60)

    with pytest.raises(KeyError, match="missing") as raised:
        dad.run(fail, num_proc=2)
    cause = raised.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert "in fail" in str(cause)


def test_exception_of_the_culprit_is_preferred_to_those_of_its_victims():
    def fail():
        if my_rank() == 1:
            time.sleep(0.3)
            raise OSError("disk full")
        raise dad.HorovodInternalError("rank 1 is gone")

    with pytest.raises((OSError, RuntimeError)) as raised:
        dad.run(fail, num_proc=2)
    # Rank 1 may have been stopped before it could tell; then nobody is blamed wrongly.
    assert not isinstance(raised.value, dad.HorovodInternalError)


def test_exception_that_does_not_pickle_is_described():
    def fail():
        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        dad.run(fail)


def test_rank_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 9"):
        dad.run(lambda: os._exit(9), num_proc=2)


def test_environment_can_be_replaced_and_output_kept(tmp_path):
    def show():
        print("hello")
        return os.environ.get("COLOUR"), os.environ.get("DAD_RUN_SECRET")

    environment = {**os.environ, "COLOUR": "blue"}
    results = dad.run(show, num_proc=2, env=environment, output_filename=str(tmp_path), verbose=1)
    assert results == [("blue", None)] * 2
    assert (tmp_path / "rank.1" / "stdout").read_text() == "hello\n"


def test_script_that_is_not_a_module_can_run_its_functions(tmp_path):
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x\n")
    (tmp_path / "script.py").write_text(
        "import dad, helper\nif __name__ == '__main__':\n print(dad.run(helper.twice, (4,), num_proc=2))\n"
    )
    path = os.pathsep.join(filter(None, [str(Path(dad.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
        cwd="/",
    )
    assert done.stdout == "[8, 8]\n", done.stderr


@pytest.mark.parametrize(
    "bad",
    [{"num_proc": 0}, {"hosts": "a:0"}, {"num_proc": 3, "hosts": "localhost:1"}, {"hostfile": "/nowhere"}],
)
def test_bad_hosts_are_an_error(bad):
    with pytest.raises(RuntimeError):
        dad.run(my_rank, **bad)


@pytest.mark.parametrize(
    "bad", [{"use_gloo": True, "use_mpi": True}, {"max_np": 2}, {"hosts": "a", "hostfile": "b"}]
)
def test_arguments_that_do_not_go_together_are_an_error(bad):
    with pytest.raises(ValueError):
        dad.run(my_rank, **bad)


def test_elastic_job_has_the_results_of_the_ranks_at_its_end():
    assert dad.run(my_rank, num_proc=2, min_num_proc=1) == [0, 1]


def test_message_of_somebody_else_is_not_unpickled():
    assert unpack(pack([1, 2], "key"), "key") == [1, 2]
    with pytest.raises(ValueError, match="not signed"):
        unpack(pack([1, 2], "another key"), "key")
