"""`dad plan` and what dad.plan() prints: all methods for one model on one line."""

import os
import re
import subprocess
import sys

import pytest

import dad
from dad.cli import main
from dad.planning.compare import METHODS, Comparison, Result, fold_layers, layer_of, line_text
from dad.planning.link import Line, line_of
from util import job_environment, needs_torch

LINE = Line(bytes_per_second=12.5e6, delay=0.025)

TORCH = """
import sys
import torch
import dad.torch as hvd
hvd.init()
print("arguments", sys.argv[1:], "size", hvd.size(), "rank", hvd.rank())
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64),
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=2,
    compression="rank_dad:rank=2",
)
hvd.broadcast_parameters(model.state_dict(), 0)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(4, 32)).square().mean().backward()
    norms = [float(parameter.grad.norm()) for parameter in model.parameters()]  # all are there
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("the script came to its end" if norms else "")
"""

KERAS = """
import keras
import numpy as np
import dad.keras as hvd
hvd.init()
model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(4)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.fit(np.ones((4000, 32)), np.ones((4000, 4)), batch_size=4, epochs=100, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""


def run_plan(tmp_path, script, *arguments, **environment):
    file = tmp_path / "train.py"
    file.write_text(script)
    command = [sys.executable, "-m", "dad.cli", "plan", "--size", "4", "--link", "100mbit,25ms"]
    command += ["--width", "400", str(file), *arguments]
    return subprocess.run(
        command, env=job_environment(**environment), capture_output=True, text=True, timeout=240
    )


def row(text, name):
    """The cells of the first line that begins with this name."""
    lines = (re.split(r" {2,}", line) for line in text.splitlines())
    return next(cells for cells in lines if cells[0] == name)


def test_a_script_is_run_for_a_few_steps_and_all_methods_are_compared(tmp_path):
    needs_torch()
    done = run_plan(tmp_path, TORCH, "100000")
    assert done.returncode == 0, done.stderr
    assert "arguments ['100000'] size 4 rank 0" in done.stdout
    assert "came to its end" not in done.stdout
    for method in METHODS:
        assert any(line.split()[:1] == [method] for line in done.stdout.splitlines()), method
    assert "* what the script asks for: rank_dad:rank=2" in done.stdout
    assert "{2,4} ×2" in done.stdout and "layer: ms" in done.stdout
    assert "measured here, and the exchange" in done.stdout
    assert "Recommendation: " in done.stdout
    # 2 · 3/4 · 4 bytes of (32·64 + 64) and 2 · (64·64 + 64) elements.
    assert row(done.stdout, "none")[1] == "62.6 kB", done.stdout


def test_a_script_that_ends_before_it_was_timed_still_has_bytes(tmp_path):
    needs_torch()
    done = run_plan(tmp_path, TORCH, "1")
    assert done.returncode == 0 and "62.6 kB" in done.stdout
    assert "measured here" not in done.stdout


def test_a_script_without_an_optimizer_is_told_what_is_missing(tmp_path):
    done = run_plan(tmp_path, "raise SystemExit(3)")
    assert done.returncode == 1
    assert "has ended with 3 before an optimizer of dad had seen a step" in done.stderr
    done = run_plan(tmp_path, "1 / 0")
    assert "ZeroDivisionError" in done.stderr and "has failed" in done.stderr


def test_a_script_of_keras(tmp_path):
    pytest.importorskip("keras")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    pytest.importorskip(backend)
    done = run_plan(tmp_path, KERAS, KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sequential/dense_1" in done.stdout and "Recommendation: " in done.stdout
    # 2 · 3/4 · 4 bytes of (32·64 + 64) + (64·4 + 4) elements.
    assert row(done.stdout, "none *")[1] == "14.2 kB", done.stdout


@pytest.mark.parametrize("size", [2, 8])
def test_every_method_has_the_bytes_that_its_own_plan_has(size):
    needs_torch()
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 80)
    )
    batch = torch.randn(4, 64)
    comparison = dad.plan(model, batch, size=size, link="100mbit,25ms").comparison
    assert {result.method for result in comparison.results} == set(METHODS)
    for method in METHODS:
        rows = dad.plan(model, batch, size=size, link="100mbit,25ms", compression=method)
        expected = sum(one["predicted_bytes"] for one in rows)
        assert comparison.result(method).num_bytes == pytest.approx(expected, abs=len(rows)), method
    assert comparison.compute_seconds > 0
    # Twice the delay is in every time.
    assert comparison.result("none").exchange_seconds > 0.05


def test_a_model_of_keras_is_compared_and_not_changed():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the dry run of Keras is that of TensorFlow")
    import numpy as np

    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(64)]
    )
    before = [np.array(weight) for weight in model.get_weights()]
    rows = dad.plan(model, np.ones((4, 8), np.float32), size=2)
    comparison = rows.comparison
    assert comparison.result("none").num_bytes == 4 * (8 * 64 + 64 + 16)
    assert comparison.compute_seconds > 0 and "batch_normalization" in str(rows)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def comparison(compute, none, exact, auto, size=8):
    results = tuple(
        Result(method, {"a": (100.0 * seconds, seconds)}, seconds)
        for method, seconds in (("none", none), ("exact", exact), ("auto", auto))
    )
    return Comparison(size, LINE, compute, results)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 0.05, 0.05, 0.01), "no compression"),
        ((0.1, 1.0, 0.11, 0.1), "--compression exact. It sends"),
        ((0.1, 1.0, 0.5, 0.01), "--compression auto. It sends"),
        (
            (0.1, 1.0, 0.5, 0.01),
            "10 times faster. If no gradient may change: dadrun --compression exact, 1.83",
        ),
        ((0.1, 1.0, 1.0, 0.01), "No method that leaves gradients as they are is faster"),
        ((0.1, 1.0, 1.0, 0.3), "Most of that is still the exchange"),
        ((1.0, 1.0, 1.0, 0.95), "local steps"),
        ((None, 1.0, 1.0, 0.95), "--compression auto, or"),
    ],
)
def test_the_recommendation_follows_the_times(seconds, said):
    assert said in comparison(*seconds).recommendation()


def test_one_rank_needs_nothing():
    assert "nothing" in comparison(1.0, 0.0, 0.0, 0.0, size=1).recommendation()


def test_layers_that_repeat_are_one_line_with_their_sum():
    by_layer = {f"h.{i}.fc": (10.0, 0.5) for i in range(12)} | {"head": (7.0, 0.1)}
    ((name, [(num_bytes, seconds)]), (head, _)) = fold_layers([Result("none", by_layer, 1.0)])
    assert (name, num_bytes, seconds, head) == ("h.{0-11}.fc ×12", 120.0, 6.0, "head")


def test_the_table_of_layers_is_cut_into_blocks_that_fit():
    results = tuple(Result(method, {"layer": (1.0, 1.0)}, 1.0) for method in METHODS)
    text = Comparison(8, LINE, 1.0, results).layers(width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert all(f" {method}" in text for method in METHODS)


def test_a_tensor_belongs_to_its_layer():
    names = ("fc1.weight", "h.0.attn.bias", "sequential/dense/kernel", "weight")
    assert [layer_of(name) for name in names] == ["fc1", "h.0.attn", "sequential/dense", "weight"]


def test_a_line_has_a_rate_and_perhaps_a_delay():
    assert line_of("100mbit") == Line(bytes_per_second=12.5e6, delay=0.0)
    assert line_of("1gbit, 500us") == Line(bytes_per_second=125e6, delay=500e-6)
    assert line_text(line_of("100mbit,25ms")) == "100 Mbit/s with 25 ms each way"
    for wrong in ("100mbit,", "100mbit,25", "25ms", "100mbit,-1ms", "100mbit,25ms,1"):
        with pytest.raises(ValueError, match="is not possible"):
            line_of(wrong) if wrong != "100mbit," else line_of("mbit,")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a script"),
        (["--", "-m", "train"], "give a script"),
        (["no_such_file.py"], "there is no such script"),
        (["--size", "0", __file__], "--size 0 is not possible"),
        (["--link", "fast", __file__], "link='fast' is not possible"),
        (["--methods", "vgcc", "--", __file__], "vgcc"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(arguments, said, capsys):
    try:
        code = main(["plan", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err
