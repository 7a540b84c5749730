"""The examples run on two ranks: those of torch and Keras' torch backend in one launch, the rest in another."""

import importlib.util
import shutil
from pathlib import Path

import pytest

import example_checks
from tf_util import launched_once
from util import check_names

CHECKS = example_checks.__file__
EVERY = check_names(CHECKS)
ON_TENSORFLOW = ["check_keras_fit", "check_tensorflow_loop"]
ON_TORCH = [check for check in EVERY if check != "check_tensorflow_loop"]


@pytest.fixture(scope="module", autouse=True)
def data():
    spec = importlib.util.spec_from_file_location("idx_files", example_checks.EXAMPLES / "idx_files.py")
    idx_files = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(idx_files)
    if not idx_files.FASHION_MNIST.exists():
        pytest.skip("needs the package dataset-fashion-mnist")


def launched(backend, checks, *modules):
    return launched_once(CHECKS, 2, *modules, KERAS_BACKEND=backend, CHECKS=",".join(checks))


on_torch = launched("torch", ON_TORCH, "torch", "keras")
on_tensorflow = launched("tensorflow", ON_TENSORFLOW)


@pytest.mark.parametrize("check", ON_TORCH)
def test_with_torch(on_torch, check):
    if check == "check_torch_transformer" and not shutil.which("bible"):
        pytest.skip("needs the package bible-kjv")
    on_torch.assert_passed(check)


@pytest.mark.parametrize("check", ON_TENSORFLOW)
def test_with_tensorflow(on_tensorflow, check):
    on_tensorflow.assert_passed(check)


def test_every_example_is_run(source_dir):
    helpers = {"datasets.py", "idx_files.py"}
    files = [*source_dir.glob("examples/*.py"), *source_dir.glob("examples/*.ipynb")]
    checks = Path(CHECKS).read_text()
    assert len(files) > 12
    assert not [file.name for file in files if file.name not in helpers and f'"{file.name}"' not in checks]
