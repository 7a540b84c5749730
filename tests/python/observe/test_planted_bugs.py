"""Bugs that users make: what dad says names the rank, the line and the cure.

The scripts are functions of support/planted.py. Each row has the parts of the message that ranks get; LINE
stands for the file and number of the line that is marked there. Other bugs have tests of their own:

- a process that is killed or stopped: runner/test_faults.py, runner/test_launch.py
- an exception or an exit code on one rank, no memory, init() that was forgotten, wrong flags and hosts:
  runner/test_mistakes.py; a rank that leaves early: runner/test_launch.py
- a forgotten broadcast, a learning rate or scheduler by rank, a module outside the optimizer, statistics of a
  batch norm that drift, other models, options or orders of parameters: torch/test_torch_agreement.py
- NaN on one rank: torch/test_torch_optimizer.py, tensorflow/test_tf_training.py
- a misspelt variable: runner/test_world.py
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import planted
from util import job_environment

RANKS = 3
SHUTDOWN = "DAD_STALL_SHUTDOWN_TIME_SECONDS"
CIRCLE = "They wait for each other: they call collectives in different orders, or took different branches"
BRANCH = "took another branch than the others, or had fewer batches"


@dataclass(frozen=True)
class Bug:
    """says: parts of the error on a rank that waits (the first of `ranks`); cure: what to do about it."""

    function: str
    says: tuple[str, ...]
    cure: str
    ranks: tuple[int, ...] = (0,)


HANGS = (
    Bug("a_branch_on_one_rank", ('allreduce "metric"', "rank 1", "LINE"), CIRCLE),
    Bug("another_order", ("first", "second", "LINE"), CIRCLE),
    Bug("a_stuck_data_loader", ('allreduce "gradient"', "by rank 2 within", "LINE", "in batches"), BRANCH),
    Bug("a_loop_without_end", ("by rank 0 within", "in a_loop_without_end"), BRANCH, ranks=(1,)),
    Bug("a_collective_on_rank_0_only", ("ranks 1, 2", "LINE", "gradient"), CIRCLE),
    Bug("a_file_that_never_comes", ("by rank 1 within", "LINE"), BRANCH),
    Bug("a_lock_that_is_taken_twice", ("by rank 2 within", "LINE"), BRANCH),
    Bug(
        "a_call_into_c_that_keeps_the_lock",
        ("by rank 1 within", "a call into C code may hold Python's lock"),
        BRANCH,
    ),
    Bug("an_exception_that_is_swallowed", ("gradient", "rank 1", "LINE"), CIRCLE),
    Bug("one_more_unnamed_collective", ("loss.", "LINE"), CIRCLE),
    Bug("another_number_of_layers_in_the_loop", ("ranks 1, 2", "LINE"), CIRCLE),
    Bug("early_stopping_by_the_own_loss", ("epoch.1", "rank 2", "LINE"), CIRCLE),
)
ERRORS = (
    Bug(
        "unequal_epochs",
        ("rank 1 has shut down or ended",),
        "give all ranks equally many batches, or call join()",
    ),
    Bug(
        "another_shape",
        ('"gradient"', "shape [4] on rank 0, [5] on rank 1"),
        "ranks disagree",
        ranks=(0, 1, 2),
    ),
    Bug(
        "another_collective",
        ('"metric"', "collective allreduce on rank 0", "allgather on rank 2"),
        "ranks disagree",
        ranks=(0, 1, 2),
    ),
    Bug(
        "a_process_set_that_does_not_exist",
        ('"gradient"', "process set 7"),
        "there is no process set",
        ranks=(1,),
    ),
    Bug("another_process_set_on_one_rank", ("[0,1]", "[0,2]"), "ranks disagree", ranks=(0, 1, 2)),
)


def line_of(function: str) -> str:
    """`planted.py:31` of the line with the mark."""
    lines, first = inspect.getsourcelines(getattr(planted, function))
    number = next((first + i for i, line in enumerate(lines) if "# here" in line), 0)
    return f"planted.py:{number}"


@pytest.fixture(scope="module")
def outcomes():
    """What each rank has got of each bug, and the output of the job: all in one launch."""
    with tempfile.TemporaryDirectory() as folder:
        names = [bug.function for bug in (*HANGS, *ERRORS)]
        command = [sys.executable, "-m", "dad.runner.cli", "-np", str(RANKS)]
        done = subprocess.run(
            [*command, sys.executable, planted.__file__, folder, *names],
            env=job_environment(DAD_STALL_CHECK_TIME_SECONDS="0.4", DAD_STALL_SHUTDOWN_TIME_SECONDS="0.8"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        by_rank = []
        for rank in range(RANKS):
            path = Path(folder) / f"{rank}.json"
            lines = path.read_text().splitlines() if path.exists() else []
            by_rank.append(dict(json.loads(line) for line in lines))
    return by_rank, done.stdout


@pytest.mark.parametrize("bug", (*HANGS, *ERRORS), ids=lambda bug: bug.function)
def test_the_error_names_rank_line_and_cure(outcomes, bug):
    by_rank, output = outcomes
    for rank in bug.ranks:
        said = by_rank[rank].get(bug.function)
        assert said is not None, f"rank {rank} did not finish: {output[-4000:]}"
        for part in (*bug.says, bug.cure):
            part = line_of(bug.function) if part == "LINE" else part
            assert part in said, f"rank {rank}: {part!r} is missing in: {said}"


@pytest.mark.parametrize("bug", HANGS, ids=lambda bug: bug.function)
def test_no_rank_is_left_waiting(outcomes, bug):
    by_rank, output = outcomes
    for rank in range(RANKS):
        assert bug.function in by_rank[rank], output[-4000:]


def test_the_warning_comes_before_the_error_and_says_when_the_job_ends(outcomes):
    _, output = outcomes
    assert re.search(r'WARNING: allreduce "gradient" has waited for 0 s for rank 2\n', output), output[:4000]
    assert re.search(rf"The job ends in 0 s \({SHUTDOWN}\)", output)


# In torch: what optimizers see. Rank 1 has another version of the script, as on a host that was forgotten.
TRAINING = """
import os, sys, torch
import dad.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(8):
    if hvd.rank() == 1 and step == 5:
        with torch.no_grad():
            model[1].weight.mul_(1.5)
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4) * (1 + hvd.rank())).square().mean()
    if step == 7 and hvd.rank() == 1:
        break  # VERSION
    loss.backward()
    optimizer.step()
hvd.barrier()  # here
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The output of a job whose ranks have folders of their own."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("hosts")
    for rank in range(2):
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "train.py").write_text(TRAINING.replace("VERSION", str(rank)))
    done = subprocess.run(
        [sys.executable, "-m", "dad.runner.cli", "-np", "2", "sh", "-c"]
        + [f"exec {sys.executable} {folder}/$DAD_RANK/train.py"],
        env=job_environment(
            DAD_CHECK_EVERY="1", DAD_STALL_CHECK_TIME_SECONDS="1", DAD_STALL_SHUTDOWN_TIME_SECONDS="3"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout


def test_another_version_of_the_script_is_told(training):
    assert re.search(
        r"ranks run different versions of the script: train\.py \w{8} on rank 0, train\.py \w{8} on rank 1\. "
        "Copy the same files",
        training,
    ), training


def test_the_step_after_which_a_weight_differs_is_named(training):
    """With DAD_CHECK_EVERY=1; otherwise it would be seen after step 8."""
    assert re.search(
        r'replicas differ after step 5: "1\.weight" differs between rank 0 / rank 1\. '
        "They were equal after step 4",
        training,
    ), training


def test_a_step_that_one_rank_leaves_out_is_named_with_its_line(training):
    line = 2 + TRAINING.splitlines().index("hvd.barrier()  # here") - 1
    assert re.search(
        r'WARNING: \w+ "\S+"(?: and \d more)? ha(s|ve) waited for 1 s for rank [01]\n', training
    ), training
    assert re.search(rf"main thread: \S*/1/train\.py:{line}: hvd\.barrier\(\)", training), training
    assert CIRCLE in training


def test_a_wrong_interface_is_named_with_those_that_there_are():
    code = "import dad.basics as dad; dad.init()"
    done = subprocess.run(
        [sys.executable, "-m", "dad.runner.cli", "-np", "2", sys.executable, "-c", code],
        env=job_environment(DAD_GLOO_IFACE="eth77"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert re.search(r"eth77.*\blo\b", done.stderr), done.stderr
