"""When replicas are compared, and what ranks tell each other about their scripts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dad.state import replicas
from dad.state.replicas import CURES_OF_VARIABLES, ReplicaCheck
from util import Warnings


def checks(monkeypatch, *every):
    """Those of ranks that were started with these values of DAD_CHECK_EVERY, after they have agreed."""
    made = []
    for rank, value in enumerate(every):
        monkeypatch.setenv("DAD_CHECK_EVERY", value)
        made.append(ReplicaCheck(SimpleNamespace(rank=rank, rank_in_job=rank), CURES_OF_VARIABLES))
    facts = [check.facts() for check in made]
    for check in made:
        check.agree(facts)
    return made


def due_steps(check, most=20):
    found = []
    for steps in range(most):
        check.steps = steps
        if check.is_due():
            found.append(steps)
        assert (check.next_due() == steps) == check.is_due()
    return found


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (("", ""), [1, 2, 4, 8, 16]),
        (("0", "0"), [1, 2, 4, 8, 16]),
        (("1", "1"), list(range(1, 20))),
        (("5", "5"), [5, 10, 15]),
        (("", "5"), [5, 10, 15]),
        (("3", "7"), [3, 6, 9, 12, 15, 18]),
    ],
)
def test_all_ranks_compare_in_the_same_steps(monkeypatch, every, due):
    for check in checks(monkeypatch, *every):
        assert due_steps(check) == due


def test_a_value_that_is_no_number_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="DAD_CHECK_EVERY=.often.: expected a number of steps"):
        checks(monkeypatch, "often")


def test_ranks_whose_scripts_differ_are_named_once(monkeypatch, tmp_path):
    monkeypatch.setattr(replicas, "_compared_scripts", False)
    first, second = checks(monkeypatch, "", "")
    facts = [first.facts(), second.facts()]
    with Warnings("different versions") as said:
        first.agree(facts)
        assert not said, "they run the same one"
        facts[1]["script"] = "train.py 12345678"
        second.agree(facts)
        assert not said, "rank 0 speaks for all"
        monkeypatch.setattr(replicas, "_compared_scripts", False)
        first.agree(facts)
        first.agree(facts)
    assert len(said) == 1
    assert "train.py 12345678 on rank 1. Copy the same files to all hosts" in said[0]
