"""What local steps accept, and how a model is cut into fragments: no ranks needed."""

import logging

import pytest

from dad.local_steps.fragments import offset, split
from dad.local_steps.outer import Outer
from dad.local_steps.settings import LocalSteps, parse, resolve


def test_the_defaults_are_off():
    assert not parse().is_on
    for option in ({"local_steps": 2}, {"local_steps": "1s"}, {"outer": Outer()}, {"delay": 1}):
        assert parse(**option).is_on


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("8", 8, 0), (8, 8, 0), ("5s", 0, 5), ("500ms", 0, 0.5), (" 1.5 min", 0, 90), (".5s", 0, 0.5)],
)
def test_a_round_is_a_count_or_a_time(text, steps, seconds):
    assert parse(text) == LocalSteps(steps, seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps=0 is not possible; a whole number of steps from 1, or a time"),
        ({"local_steps": "0s"}, "local_steps='0s'"),
        ({"local_steps": 2.5}, "local_steps=2.5"),
        ({"local_steps": True}, "local_steps=True"),
        ({"local_steps": "5 days"}, "local_steps='5 days'"),
        ({"fragments": 0}, "fragments=0 is not possible; a whole number from 1"),
        ({"local_steps": 4, "fragments": 5}, "fragments=5 is not possible with local_steps=4"),
        ({"delay": 2}, "delay=2 is not possible; a whole number from 0 to 1"),
        ({"outer": 0.7}, "outer=0.7 is not possible; hvd.Outer"),
        ({"outer": "rate=1"}, "'rate=1' should be one of lr, momentum, nesterov"),
    ],
)
def test_a_bad_option_names_itself_its_value_and_its_range(options, message):
    with pytest.raises(ValueError) as error:
        parse(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("options", [{"lr": 0}, {"lr": "fast"}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_an_outer_optimizer_refuses_what_is_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"Outer: {name}={value!r} is not possible; a number"):
        Outer(**options)


def test_an_outer_optimizer_is_read_as_it_is_written():
    for outer in (Outer(), Outer(lr=0.5, nesterov=False), Outer(1.0, 0.0)):
        assert Outer.parse(outer.spec()) == outer
    assert Outer.parse("default") == Outer()
    assert Outer.parse("momentum=0.5") == Outer(momentum=0.5)


def test_options_from_outside_are_for_scripts_that_choose_none(monkeypatch, caplog):
    monkeypatch.setenv("DAD_LOCAL_STEPS", "16")
    monkeypatch.setenv("DAD_OUTER", "default")
    assert resolve() == LocalSteps(16, outer=Outer())
    with caplog.at_level(logging.WARNING, "dad"):
        logging.getLogger("dad").addHandler(caplog.handler)
        assert resolve(local_steps=4) == LocalSteps(4)
        logging.getLogger("dad").removeHandler(caplog.handler)
    assert "DAD_LOCAL_STEPS=16 is not used" in caplog.text
    monkeypatch.setenv("DAD_LOCAL_STEPS", "soon")
    with pytest.raises(ValueError, match="DAD_LOCAL_STEPS: local_steps='soon' is not possible"):
        resolve()


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_fragments_hold_every_tensor_once_and_are_of_similar_size(fragments):
    sizes = [10, 1, 1, 300, 5, 200, 7, 90, 90, 90]
    parts = split(sizes, fragments)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert len(parts) == fragments
    totals = [sum(sizes[i] for i in part) for part in parts]
    assert max(totals) <= sum(sizes) / fragments + max(sizes)


def test_there_are_no_more_fragments_than_tensors():
    assert split([4, 4], 3) == [[0], [1]]
    assert split([1, 1, 100], 3) == [[0], [1], [2]]


def test_fragments_go_at_places_of_their_own_and_the_last_one_at_the_end():
    for fragments in range(1, 6):
        for steps in range(fragments, 13):
            offsets = [offset(i, fragments, steps) for i in range(fragments)]
            assert offsets == sorted(set(offsets)) and offsets[0] >= 1 and offsets[-1] == steps
