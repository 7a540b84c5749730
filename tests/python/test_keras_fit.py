"""dad.keras on the TensorFlow backend of Keras 3."""

import pytest

import keras_checks
from tf_util import launched_once
from util import check_names

results_on_two = launched_once(keras_checks.__file__, 2, KERAS_BACKEND="tensorflow")


@pytest.mark.parametrize("check", check_names(keras_checks.__file__))
def test_on_two_ranks(results_on_two, check):
    results_on_two.assert_passed(check)
