"""Methods in TensorFlow with sums from host to host: three ranks that believe they are on two hosts."""

import numpy as np
import pytest

import test_tf_methods_use as methods
from tf_util import hvd, launched_once, tf
from util import check_names

results = launched_once(__file__, 3, HOROVOD_HIERARCHICAL_ALLREDUCE="1", DAD_TEST_HOSTS="left,left,right")
before_check = methods.before_check


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_three_ranks(results, check):
    results.assert_passed(check)


def check_fit_keeps_replicas_bit_equal():
    for method in ("dad", "rank_dad:rank=2", "int8", "vgc:alpha=0.5"):
        methods.assert_replicas_are_equal(methods.trained(method), method)


def check_what_is_applied_and_what_is_kept_add_up():
    methods.check_what_is_applied_and_what_is_kept_add_up()


def check_state_is_saved_and_restored():
    methods.check_state_is_saved_and_restored()


def check_a_plan_names_the_hosts():
    model = methods.trained("int8")
    rows = [row for row in model.optimizer.plan() if row["method"] == "int8"]
    assert rows and all("between 2 hosts" in row["why"] for row in rows), rows


def check_a_rank_that_leads_its_host_may_join():
    if hvd().rank() == 0:
        assert int(hvd().join()) != 0
        return
    mean = hvd().allreduce(tf.fill([50], 3.0 * hvd().rank()), name="mean")
    np.testing.assert_allclose(mean.numpy(), np.full(50, 3.0))
    hvd().join()
