"""The table of kinds: what a new method needs in Python, and what an unknown one ends with."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from dad.methods.compression import _METHODS, Quantiser
from dad.methods.kinds import KINDS, Kind, Sends
from dad.planning import planner
from dad.planning.types import Costs, Layer, Observation, Plan

ROOT = Path(__file__).parents[3]


@pytest.fixture
def signsgd(monkeypatch):
    """A method that dad does not have: a class and a row."""
    monkeypatch.setattr("dad.methods.compression._METHODS", dict(_METHODS))

    @dataclass(frozen=True)
    class SignSgd(Quantiser):
        name = "signsgd"

        def core_text(self, seed: int) -> str:
            return "signsgd;step=0.01"

        def bytes_sent(self, elements: int, size: int) -> float:
            return (size - 1) * -(-elements // 8)

    monkeypatch.setitem(KINDS, "signsgd", Kind("signsgd", Sends.TENSOR, lossy=True))
    return SignSgd()


def chosen(method, out=64, columns=64):
    layer = Layer("w", out, columns, 4, True, method, (Observation(dense=True),) * 4)
    (choice,) = planner.make_plan([layer], Costs(4, 1e7, 1e10)).choices
    return choice


def test_a_new_method_is_planned_by_its_class_and_its_row(signsgd):
    choice = chosen(signsgd)
    assert (choice.kind, choice.text) == ("signsgd", "signsgd;step=0.01")
    assert choice.num_bytes == 3 * 64 * 64 / 8 and planner.describe(choice) == "signsgd"
    assert Plan.from_dict(Plan([choice], 4).as_dict()).choices == [choice]


def test_a_new_method_is_sent_compressed_by_both_frameworks(signsgd):
    layer_units = pytest.importorskip("dad.torch.layer_units")
    choice = chosen(signsgd)
    assert type(layer_units.make_unit(choice, [], [])) is layer_units.QuantisedUnit
    board = pytest.importorskip("dad.tensorflow.board")
    way = board._way(choice)
    assert (way.by_layer, way.as_rows, way.keeps) == (False, False, True)
    assert way.method.decode() == choice.text


def test_an_unknown_kind_is_an_error_and_never_dense():
    choice = chosen(_METHODS["int8"]())
    saved = Plan([choice], 4).as_dict()
    saved["choices"][0]["kind"] = "signsgd"
    with pytest.raises(ValueError, match='"w".*signsgd.*dense, factor, low_rank, int8, sparse, qsgd'):
        Plan.from_dict(saved)
    with pytest.raises(ValueError, match="signsgd"):
        planner.replace(choice, kind="signsgd")


def test_a_method_without_a_plan_is_an_error_and_never_dense():
    with pytest.raises(TypeError, match='"w".*Fp16'):
        chosen(_METHODS["fp16"]())


def test_python_and_the_core_have_the_same_kinds():
    table = (ROOT / "dad_core/exchange/method_table.cc").read_text()
    names = re.findall(r'\.name = "(\w+)"', table)
    assert {"dense", *names} == set(KINDS)


def test_no_module_of_a_framework_names_a_kind():
    names = "|".join(KINDS)
    compared = re.compile(rf'\bkind\b[^\n]*["\'](?:{names})["\']')
    for folder in ("torch", "tensorflow", "keras", "_keras"):
        for path in (ROOT / "python/dad" / folder).rglob("*.py"):
            assert not compared.search(path.read_text()), path
