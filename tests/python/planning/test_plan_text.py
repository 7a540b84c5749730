"""A plan as text: what is summed up, folded and kept apart."""

import pytest

from dad.planning.text import fold, format_bytes, format_plan, summary


def row(name, method="rank_dad", predicted=100, measured=None, dense=4000, **columns):
    return {
        "name": name,
        "shape": (10, 100),
        "rows": None,
        "method": method,
        "why": "asked for",
        "predicted_ms": 0.5,
        "measured_ms": None if measured is None else 2.0,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "dense_bytes": dense,
        "bytes": predicted if measured is None else measured,
        "ratio": None,
        **columns,
    }


def rider(name, weight):
    return row(name, predicted=0, dense=40, why=f"rides with {weight}", predicted_ms=None)


def test_the_first_line_says_what_a_step_sends():
    rows = [row("a", "rank_dad", 100), row("b", "int8", 1000), rider("a.bias", "a"), row("c", "dense", 4000)]
    assert (
        summary(rows) == "plan: 12 kB → 5.1 kB per step, 2.36x predicted; 2 by rank_dad, 1 by int8, 1 dense"
    )
    rows = [row("a", "rank_dad", 100, 150), row("b", "int8", 1000, 1050), rider("a.bias", "a")]
    assert "8.04 kB → 1.2 kB per step, 6.7x measured (1.1 kB predicted); " in summary(rows)
    assert format_plan(rows).splitlines()[0] == summary(rows)
    assert summary([]) == "plan: 0 B → 0 B per step predicted; no tensors"


def test_a_prediction_is_not_called_measured():
    text = format_plan([row("a", measured=150), row("b")], exposed_ms=1.25)
    assert text.splitlines()[0].endswith("predicted; 2 by rank_dad")
    header, a, b, total = text.splitlines()[1:]
    where = header.index("measured bytes")
    assert "150 B" in a[where:] and "100 B" not in b[where:]
    assert "B" not in total[where : where + 14] and "1.25" in total[where:]


def test_the_total_adds_bytes_and_has_the_time_that_a_step_waited():
    rows = [row("a", measured=150), row("b", measured=250)]
    total = format_plan(rows, exposed_ms=3.5).splitlines()[-1].split()
    # 8000 dense bytes; predicted bytes, ratio and ms; measured ones
    assert total[:10] == ["total", "200", "B", "40.0", "1.00", "400", "B", "20.0", "3.50", "2"]
    without = format_plan(rows).splitlines()[-1]
    assert "3.50" not in without and "4.00" not in without, "measured ms of tensors are not added"


def test_repeated_layers_are_one_line():
    rows = []
    for i in range(12):
        rows += [row(f"h.{i}.fc.weight", measured=200 + i), rider(f"h.{i}.fc.bias", f"h.{i}.fc.weight")]
    rows.append(row("head.weight", predicted=70))
    weight, bias, head = fold(rows)
    assert weight["name"] == "h.{0-11}.fc.weight ×12" and bias["name"] == "h.{0-11}.fc.bias ×12"
    assert bias["why"] == "rides with h.{0-11}.fc.weight" and weight["why"] == "asked for"
    assert (weight["predicted_bytes"], weight["measured_bytes"]) == (1200, 12 * 200 + 66)
    assert (weight["predicted_ms"], weight["measured_ms"], weight["dense_bytes"]) == (6.0, 2.0, 48000)
    assert head == rows[-1]


@pytest.mark.parametrize(
    "columns",
    [{"shape": (10, 101)}, {"method": "int8"}, {"why": "too small"}, {"rows": 3}, {"predicted": 101}],
)
def test_only_equal_layers_are_folded(columns):
    rows = [row("h.0.weight"), row("h.1.weight", **columns), row("h.2.weight")]
    assert [one["name"] for one in fold(rows)] == ["h.{0,2}.weight ×2", "h.1.weight"]


def test_names_are_folded_over_one_number():
    names = [f"block{b}.conv{c}" for b in (1, 2) for c in (1, 2, 3)]
    assert [one["name"] for one in fold([row(name) for name in names])] == [
        "block1.conv{1-3} ×3",
        "block2.conv{1-3} ×3",
    ]
    assert [one["name"] for one in fold([row("a"), row("a_1"), row("b")])] == ["a", "a_1", "b"]


def test_reasons_that_differ_in_numbers_show_their_range():
    rows = [
        row(f"h.{i}.w", why=f"alpha 0.5; {part} % sent in the last step")
        for i, part in enumerate((2.5, 0.75))
    ]
    assert fold(rows)[0]["why"] == "alpha 0.5; {0.75-2.5} % sent in the last step"


def test_bytes_have_three_digits():
    counts = (0, 812, 39_240, 1_750_000, 999_600, 2.5e9, 4e12)
    expected = ["0 B", "812 B", "39.2 kB", "1.75 MB", "1 MB", "2.5 GB", "4000 GB"]
    assert [format_bytes(count) for count in counts] == expected
