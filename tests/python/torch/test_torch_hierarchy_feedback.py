"""The checks of test_torch_feedback.py with sums from host to host: what one rank keeps for all of its host,
across checkpoints, overflows and joins, is not lost either. Two hosts of two ranks, and one of three with
one of a single rank."""

from pathlib import Path

import pytest

from util import check_names, launch, needs_torch

CHECKS = str(Path(__file__).with_name("test_torch_feedback.py"))
HOSTS = ["left,left,right,right", "left,left,left,right"]


@pytest.fixture(scope="module", params=HOSTS)
def results(request):
    needs_torch()
    return launch(CHECKS, 4, HOROVOD_HIERARCHICAL_ALLREDUCE="1", DAD_TEST_HOSTS=request.param)


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_on_two_hosts(results, check):
    results.assert_passed(check)
