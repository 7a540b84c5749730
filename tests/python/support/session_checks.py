"""What a planning session promises, whatever adapter it has. test_session.py runs these checks on ranks that
are threads, on dad.torch and on dad.tensorflow."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from dad.planning.session import Session

SHAPES = {"0.weight": (40, 30), "1.weight": (20, 40)}
here = threading.local()  # has `make` and `gather` where ranks are threads


def training(method: str, extra: bool = False) -> Any:
    """An optimizer of the adapter under test. extra: with one more tensor."""
    shapes = {**SHAPES, "2.weight": (10, 20)} if extra else SHAPES
    if hasattr(here, "make"):
        return here.make(method, shapes)
    from framework_trainings import TRAININGS

    return TRAININGS[os.environ["DAD_TEST_ADAPTER"]](method, shapes)


def rank() -> int:
    if hasattr(here, "rank"):
        return here.rank
    from dad import basics

    return basics.rank()


def all_ranks(value: Any) -> list[Any]:
    """What every rank has of this."""
    mine = json.dumps(value).encode()
    if hasattr(here, "gather"):
        return [json.loads(one) for one in here.gather("test", mine)]
    from dad._lib import _core

    return [json.loads(one) for one in _core.gather_bytes("test", mine, 0)]


def join() -> None:
    """This rank has no more data. Returns when all ranks have joined."""
    if hasattr(here, "join"):
        here.join()
        return
    from dad._lib import _core

    _core.join()


def assert_one_plan(train: Any, method: str) -> None:
    """All ranks follow the same plan, by this method."""
    texts = all_ranks([choice.text for choice in train.choices])
    assert texts[0] and all(one == texts[0] for one in texts), texts
    assert all(text.startswith(method) for text in texts[0]), texts[0]


def check_all_ranks_make_one_plan_in_the_first_step():
    train = training("rank_dad:rank=2")
    train.step()
    assert_one_plan(train, "low_rank")
    plan = train.session.plan
    train.step()
    train.step()
    assert train.session.plan is plan, "a plan is made once"


def check_no_plan_is_made_during_the_warm_up():
    train = training("vgc:warmup_steps=2")
    for _ in range(2):
        train.step()
        assert train.session.plan is None
    train.step()
    assert_one_plan(train, "sparse")


def check_all_ranks_are_told_which_one_failed_to_observe_a_step():
    train = training("rank_dad:rank=2")
    with pytest.raises(train.errors, match="rank 1 failed in the step that all ranks observe") as raised:
        train.step(fails=rank() == 1)
    assert "cannot see" in str(raised.value)
    assert train.session.plan is None
    train.step()
    train.step()
    assert_one_plan(train, "low_rank")


def check_a_plan_that_only_one_rank_wants_is_made_by_all():
    """Before a plan ranks compare which tensors each of them would make it for, and whether it wants one: a
    rank that wanted another plan alone would wait for the others in vain."""
    train = training("rank_dad:rank=2")
    train.step()
    old = train.session.plan
    train.session.replan_wanted = rank() == 1  # as a checkpoint of rank 1 may say
    train.session.doubt()
    train.step()
    train.step()
    assert_one_plan(train, "low_rank")
    assert train.session.plan is not old
    assert not train.session.replan_wanted


def check_a_checkpoint_that_only_one_rank_has_loaded():
    train = training("rank_dad:rank=2")
    for _ in range(3):
        train.step()
    saved = train.save()
    other = training("rank_dad:rank=2")
    if rank() == 0:
        other.load(saved)
    other.step()
    other.step()
    assert_one_plan(other, "low_rank")
    assert set(all_ranks(other.save()["steps"])) == {5}


def check_a_run_goes_on_with_its_plan():
    train = training("rank_dad:rank=2")
    for _ in range(3):
        train.step()
    saved = train.save()
    texts = [choice.text for choice in train.choices]
    other = training("rank_dad:rank=2")
    other.load(saved)
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(here, "make"):  # threads share the class
            make_plan = Session.make_plan
            patch.setattr(Session, "make_plan", lambda *of: made.append(of) or make_plan(*of))
        other.step()
    assert [choice.text for choice in other.choices] == texts and not made
    assert other.save()["steps"] == 4


def check_a_plan_of_another_number_of_ranks_is_not_followed():
    train = training("rank_dad:rank=2")
    train.step()
    saved = train.save()
    saved["size"] += 1
    saved["plan"] = {**saved["plan"], "size": saved["size"]}
    other = training("rank_dad:rank=2")
    other.load(saved)
    assert other.session.plan is None
    other.step()
    other.step()
    assert_one_plan(other, "low_rank")


# The last ones: tapes of TensorFlow that ranks made unlike are numbered unlike ever after.


def check_other_tensors_are_an_error_on_all_ranks():
    train = training("rank_dad:rank=2", extra=rank() == 1)
    with pytest.raises(train.errors, match='"2.weight"'):
        train.step()


def check_another_method_is_an_error_on_all_ranks():
    train = training("rank_dad:rank=3" if rank() == 1 else "rank_dad:rank=2")
    with pytest.raises(train.errors, match="compression"):
        train.step()


def check_ranks_that_may_have_diverged_compare_before_they_review():
    """After an uneven join() ranks are at different steps, of which one may be that of a review: a rank that
    went to it at once would wait there for those that compare."""
    for before in (0, 1):  # adapters count a step when it begins, or when it ends
        train = training("auto")
        while train.session.plan is None:  # auto begins with dense steps
            train.step()
        to_review = train.session.next_review() - train.session.steps - before
        for _ in range(to_review if rank() == 0 else to_review - 3):
            train.step()
        join()
        for _ in range(6):
            train.step()
        assert len(set(all_ranks(train.save()["steps"]))) == 1
