"""Every example, on two ranks and at a small size. Ranks run one after the other in one process each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(script, *arguments):
    """What rank 0 of an example prints; empty on the others."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def on_first(printed, *words):
    import dad.basics

    if dad.basics.rank() == 0:
        for word in words:
            assert word in printed, printed


def needs_torch_backend():
    if os.environ["KERAS_BACKEND"] != "torch":
        pytest.skip("runs beside Keras' torch backend")


def torch_example(script, *arguments, words=("loss",)):
    needs_torch_backend()
    on_first(run(script, *arguments), *words)


def check_torch_mlp():
    torch_example("torch_mlp.py", "--steps", "3", words=("step 3: loss", "MB sent"))


def check_torch_cnn():
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cnn.pt")
        arguments = ("--epochs", "1", "--images", "256", "--checkpoint", file)
        torch_example("torch_cnn.py", *arguments, words=("epoch 0: loss", "test accuracy"))
        import dad.torch as hvd

        assert hvd.rank() > 0 or Path(file).exists()


def check_torch_transformer():
    torch_example(
        "torch_transformer.py", "--steps", "2", "--compression", "auto", words=("step 2/2", "In the")
    )


def check_torch_gru():
    torch_example("torch_gru.py", "--steps", "8", "--compression", "exact", words=("step 8: loss",))


def check_torch_lora():
    printed = ("training: 203530 parameters", "fine-tuning: 5224 parameters")
    torch_example("torch_lora.py", "--steps", "3", words=printed)


def check_per_layer():
    torch_example(
        "per_layer.py", "--steps", "8", words=("embed.weight", "hidden.2.weight", "rank_dad", "head")
    )


def check_two_sites():
    torch_example(
        "two_sites.py", "--steps", "10", "--local-steps", "4", words=("10 steps", "MB sent by rank 0")
    )


def check_elastic_torch():
    torch_example("elastic_torch.py", "--epochs", "1", "--samples", "256", words=("epoch 0: loss",))


def check_fashion_mnist():
    needs_torch_backend()
    import dad.torch as hvd

    printed = run("fashion_mnist.py", "--batch-size", "4000", "--compression", "none", "auto")
    hvd.init()  # the script ends with shutdown()
    on_first(printed, "fewer bytes", "test accuracy")


def check_resnet50():
    """On images in folders, made here; every rank has its own copy."""
    needs_torch_backend()
    image = pytest.importorskip("PIL.Image")
    with tempfile.TemporaryDirectory() as folder:
        for label in ("cats", "dogs"):
            (Path(folder) / label).mkdir()
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 255, (40, 48, 3), dtype=np.uint8)
                image.fromarray(pixels).save(Path(folder) / label / f"{number}.png")
        small = ("--epochs", "1", "--batch-size", "2", "--size", "32", "--width", "4", "--workers", "0")
        files = ("--data", folder, "--checkpoint", str(Path(folder) / "net.pt"))
        torch_example("resnet50.py", *small, *files, words=("epoch 0: loss", "images/s"))


def check_bert():
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
        small = ("--layers", "1", "--width", "32", "--heads", "2", "--length", "32", "--batch-size", "2")
        files = ("--data", str(text), "--checkpoint", str(Path(folder) / "bert.pt"))
        torch_example("bert.py", *small, *files, "--steps", "2", "--passes", "2", words=("step 2: loss",))


def check_notebook():
    """Rank 0 alone runs the cells, which start a job of their own."""
    needs_torch_backend()
    import dad.basics

    if dad.basics.rank() > 0:
        return
    notebook = json.loads((EXAMPLES / "effective_rank.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, STEPS="20", MPLBACKEND="agg", PYTHONPATH=paths):
        names = {"__name__": "__main__"}
        for cell in cells:
            exec(cell, names)
    steps, losses, ranks = zip(*names["history"], strict=True)
    assert steps == (10, 20) and all(np.isfinite(losses))
    assert len(ranks[-1]) == 2  # of the large layers
    assert all(1 <= rank <= 64 for rank in ranks[-1].values())


def check_keras_fit():
    """On both backends of Keras."""
    on_first(run("keras_fit.py", "--epochs", "1", "--images", "512"), "accuracy")


def check_tensorflow_loop():
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        pytest.skip("needs TensorFlow")
    on_first(run("tensorflow2_mnist.py", "--steps", "3"), "step 3: loss", "MB sent")
