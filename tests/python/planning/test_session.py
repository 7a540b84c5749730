"""One planning session: the same checks on ranks that are threads, on dad.torch and on dad.tensorflow."""

from __future__ import annotations

from pathlib import Path

import pytest

import session_checks
import tf_util
import util
from dad.errors import MismatchError
from dad.methods.compression import parse
from thread_ranks import FakeTraining, Job, ThreadRanks, run_on_threads

CHECKS = Path(session_checks.__file__)
NAMES = util.check_names(str(CHECKS))


def make_here(ranks: ThreadRanks, job: Job):
    FakeTraining.errors = MismatchError
    session_checks.here.make = lambda method, shapes: FakeTraining(ranks, parse(method), shapes)
    session_checks.here.rank = ranks.rank
    session_checks.here.gather = ranks.gather
    session_checks.here.join = lambda: job.join(ranks.rank)


@pytest.fixture(scope="module")
def on_torch():
    util.needs_torch()
    return util.launch(str(CHECKS), 2, DAD_TEST_ADAPTER="torch")


@pytest.fixture(scope="module")
def on_tensorflow():
    tf_util.needs("tensorflow")
    environment = {**tf_util.ENVIRONMENT, "DAD_TEST_ADAPTER": "tensorflow"}
    return tf_util.launch(str(CHECKS), 2, runner=tf_util.__file__, **environment)


class TestSessions:
    """Of adapters: what differs between the classes below is the adapter."""

    @pytest.mark.parametrize("check", NAMES)
    def test_on_threads(self, check):
        def work(ranks: ThreadRanks, job: Job) -> None:
            make_here(ranks, job)
            getattr(session_checks, check)()

        run_on_threads(3, work)

    @pytest.mark.parametrize("check", NAMES)
    def test_on_torch(self, on_torch, check):
        on_torch.assert_passed(check)

    @pytest.mark.parametrize("check", NAMES)
    def test_on_tensorflow(self, on_tensorflow, check):
        on_tensorflow.assert_passed(check)


def test_nothing_is_planned_while_a_rank_has_joined():
    """Who has joined would not know of the plan. It is made when all are back, also one that was wanted while
    a rank was away."""

    def work(ranks: ThreadRanks, job: Job) -> tuple[object, int]:
        train = FakeTraining(ranks, parse("rank_dad:rank=2"), session_checks.SHAPES)
        train.step()
        ranks.gather("ready", b"")
        if ranks.rank != 2:
            job.wait_until_one_has_joined()
            train.session.replan_wanted = True
            train.step()
            train.step()
            assert train.plans_made == 2, "a plan was tried more than once"
            assert train.session.replan_wanted
        job.join(ranks.rank)
        plan = train.session.plan
        train.step()
        train.step()
        assert train.session.plan is not plan and not train.session.replan_wanted
        return [choice.text for choice in train.choices], train.session.steps

    results = run_on_threads(3, work)
    assert all(one == results[0] for one in results)


def test_a_plan_is_made_of_what_all_ranks_saw():
    def work(ranks: ThreadRanks, job: Job) -> list[int]:
        train = FakeTraining(ranks, parse("dad"), session_checks.SHAPES)
        train.rows = 1 + ranks.rank
        train.step()
        return [choice.rows for choice in train.choices]

    assert run_on_threads(3, work) == [[3, 3]] * 3
