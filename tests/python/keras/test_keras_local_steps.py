"""Local steps in Keras 3 on 2 ranks: on the TensorFlow and on the torch backend."""

import pytest

import keras_local_checks
from tf_util import launched_once
from util import check_names

CHECKS = keras_local_checks.__file__
EVERY = check_names(CHECKS)

on_tensorflow = launched_once(CHECKS, 2, KERAS_BACKEND="tensorflow")
on_torch = launched_once(CHECKS, 2, "torch", "keras", KERAS_BACKEND="torch")


@pytest.mark.parametrize("check", EVERY)
def test_on_tensorflow(on_tensorflow, check):
    on_tensorflow.assert_passed(check)


@pytest.mark.parametrize("check", EVERY)
def test_on_torch(on_torch, check):
    on_torch.assert_passed(check)
