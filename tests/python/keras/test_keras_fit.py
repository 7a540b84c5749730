"""dad.keras on Keras 3: on its TensorFlow backend with 1, 2 and 4 ranks, and on its torch backend."""

import pytest

import keras_callback_checks
import keras_checks
import keras_replica_checks
from tf_util import launched_once
from util import check_names, joined

CHECKS = joined(keras_checks.__file__, keras_callback_checks.__file__, keras_replica_checks.__file__)
EVERY = check_names(CHECKS)


# Four ranks on two cores take their time: in two launches, so that none comes near the limit of a test.
FIRST, SECOND = EVERY[: len(EVERY) // 2], EVERY[len(EVERY) // 2 :]


def launched(num_ranks, backend, checks, *modules):
    return launched_once(CHECKS, num_ranks, *modules, KERAS_BACKEND=backend, CHECKS=",".join(checks))


alone = launched(1, "tensorflow", EVERY)
two = launched(2, "tensorflow", EVERY)
four = launched(4, "tensorflow", FIRST)
four_again = launched(4, "tensorflow", SECOND)
two_on_torch = launched(2, "torch", EVERY, "torch", "keras")


@pytest.mark.parametrize("check", EVERY)
def test_one_rank_on_tensorflow(alone, check):
    alone.assert_passed(check)


@pytest.mark.parametrize("check", EVERY)
def test_two_ranks_on_tensorflow(two, check):
    two.assert_passed(check)


@pytest.mark.parametrize("check", FIRST)
def test_four_ranks_on_tensorflow(four, check):
    four.assert_passed(check)


@pytest.mark.parametrize("check", SECOND)
def test_four_ranks_on_tensorflow_again(four_again, check):
    four_again.assert_passed(check)


@pytest.mark.parametrize("check", EVERY)
def test_two_ranks_on_torch(two_on_torch, check):
    two_on_torch.assert_passed(check)
