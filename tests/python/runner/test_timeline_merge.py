"""`dad timeline merge`."""

import json

import pytest

from dad.cli import main
from dad.timeline import TimelineError, merge


def clock(rank, start, offset=0.0):
    args = {"rank": rank, "start_unix_us": start, "offset_to_rank0_us": offset}
    return {"name": "dad_clock", "ph": "M", "pid": rank, "args": args}


def span(rank, ts, **more):
    return {"name": "ALLREDUCE", "ph": "X", "pid": rank, "tid": 1, "ts": ts, "dur": 5, **more}


def write(path, events):
    path.write_text(json.dumps(events))
    return str(path)


def times_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    return {event["pid"]: event["ts"] for event in events if event["name"] == "ALLREDUCE"}


def test_times_are_those_of_rank_0s_clock(tmp_path):
    # Rank 1 started 1000 us later by its clock, which is 300 us ahead of rank 0's.
    a = write(tmp_path / "a", [clock(0, 5_000_000), span(0, 100)])
    b = write(tmp_path / "b", [clock(1, 5_001_000, -300), span(1, 100)])
    out = tmp_path / "out.json"
    assert main(["timeline", "merge", str(out), b, a]) == 0
    assert times_of(out) == {0: 100, 1: 800}


def test_earliest_rank_is_time_zero(tmp_path):
    a = write(tmp_path / "a", [clock(0, 5_000_000), span(0, 0)])
    b = write(tmp_path / "b", {"traceEvents": [clock(1, 4_999_000), span(1, 0)]})
    merge(str(tmp_path / "out"), [a, b])
    assert times_of(tmp_path / "out") == {0: 1000, 1: 0}


def test_events_are_in_order_of_time_after_the_metadata(tmp_path):
    a = write(tmp_path / "a", [clock(0, 0), span(0, 50), span(0, 10)])
    b = write(tmp_path / "b", [clock(1, 0), span(1, 30)])
    merge(str(tmp_path / "out"), [a, b])
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    assert [event.get("ts", -1) for event in events] == [-1, -1, -1, -1, 10, 30, 50]


def test_trace_cut_off_in_the_middle_is_read_as_far_as_it_goes(tmp_path):
    whole = json.dumps([clock(0, 0), span(0, 10), span(0, 20)])
    (tmp_path / "a").write_text(whole[: whole.rindex("{") + 8])
    merge(str(tmp_path / "out"), [str(tmp_path / "a")])
    assert times_of(tmp_path / "out") == {0: 10}


def test_processes_and_ids_of_different_ranks_stay_apart(tmp_path):
    name = {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "fc.weight"}}
    files = []
    for rank in (0, 1):
        events = [clock(rank, 0), name, {**span(7, 1), "id": 3}]
        files.append(write(tmp_path / str(rank), events))
    merge(str(tmp_path / "out"), files)
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "ALLREDUCE"]
    assert len({event["pid"] for event in spans}) == 2
    assert {event["id"] for event in spans} == {"0:3", "1:3"}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0: fc.weight", "rank 1: fc.weight"}


def test_the_same_rank_twice_is_an_error(tmp_path):
    a = write(tmp_path / "a", [clock(0, 0)])
    with pytest.raises(TimelineError, match="rank 0"):
        merge(str(tmp_path / "out"), [a, a])


@pytest.mark.parametrize(
    "content", ["hello", "[]", '{"traceEvents": 3}', '[{"name": "dad_clock", "args": {}}]']
)
def test_file_that_is_no_trace_is_named(tmp_path, capsys, content):
    (tmp_path / "a").write_text(content)
    assert main(["timeline", "merge", str(tmp_path / "out"), str(tmp_path / "a")]) == 1
    assert str(tmp_path / "a") in capsys.readouterr().err
