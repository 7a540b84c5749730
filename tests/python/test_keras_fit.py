"""dad.keras on Keras 3: on its TensorFlow backend with 1, 2 and 4 ranks, and on its torch backend."""

import pytest

import keras_checks
from tf_util import launched_once
from util import check_names

CHECKS = keras_checks.__file__
EVERY = check_names(CHECKS)
# A launch takes longer than most checks: each runs on one number of ranks, and all of them on torch too.
ON_FOUR = [
    "check_mixed_precision_skips_a_step_on_all_ranks_or_none",
    "check_broadcast_callback_and_local_variables",
    "check_early_stopping_and_plateaus_are_the_same_on_all_ranks",
    "check_uneven_data_with_join",
]
ON_ONE = ["check_fit_equals_plain_keras_on_the_joined_batch", "check_learning_rate_callbacks", "check_values"]
ON_TWO = [check for check in EVERY if check not in ON_FOUR]


def launched(num_ranks, backend, checks, *modules):
    return launched_once(CHECKS, num_ranks, *modules, KERAS_BACKEND=backend, CHECKS=",".join(checks))


alone = launched(1, "tensorflow", ON_ONE)
two = launched(2, "tensorflow", ON_TWO)
four = launched(4, "tensorflow", ON_FOUR)
two_on_torch = launched(2, "torch", EVERY, "torch", "keras")


@pytest.mark.parametrize("check", ON_ONE)
def test_one_rank_on_tensorflow(alone, check):
    alone.assert_passed(check)


@pytest.mark.parametrize("check", ON_TWO)
def test_two_ranks_on_tensorflow(two, check):
    two.assert_passed(check)


@pytest.mark.parametrize("check", ON_FOUR)
def test_four_ranks_on_tensorflow(four, check):
    four.assert_passed(check)


@pytest.mark.parametrize("check", EVERY)
def test_two_ranks_on_torch(two_on_torch, check):
    two_on_torch.assert_passed(check)
