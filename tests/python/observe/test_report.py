"""`dad report` and `dad env`: a page from a real job, and from one with many layers."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from dad.cli import main
from dad.observe.environment import environment
from dad.observe.files import live_path
from dad.observe.page import ReportError, page, read_report
from dad.observe.samples import MOST, Samples
from dad.observe.top import TopError, show, top
from util import job_environment, needs_torch

TRAIN = """
import time
import torch
import dad.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), 0)
end = time.monotonic() + 4.5
while hvd.allreduce(torch.tensor(end - time.monotonic()), op=hvd.Min, name="left") > 0:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
"""


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, or on something to be fetched."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        assert not any(name in ("src", "href") for name, _ in attributes), (tag, attributes)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(text):
    parser = Balanced()
    parser.feed(text)
    assert not parser.open


def test_a_page_shows_methods_bytes_and_effective_ranks_of_a_job(tmp_path, capsys):
    needs_torch()
    (tmp_path / "train.py").write_text(TRAIN)
    file, out = tmp_path / "run.jsonl", tmp_path / "report.html"
    command = [sys.executable, "-m", "dad.runner.cli", "-np", "2", "--report", str(file)]
    command += ["--compression", "rank_dad:rank=4", sys.executable, str(tmp_path / "train.py")]
    with subprocess.Popen(command, env=job_environment()) as job:
        assert main(["top", str(file), "--once", "--wait", "100"]) == 0
        live = capsys.readouterr().out
        assert job.wait(120) == 0
    assert ": 2 ranks, 0:0" in live and "rank 0 sends" in live
    assert not live_path(file).exists()
    assert main(["top", str(file)]) == 1
    assert "no job with this report is running" in capsys.readouterr().err

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["rank"] for line in lines) == [0, 1]  # a line of each rank, as before
    (first,) = (line for line in lines if line["rank"] == 0)
    samples = first["samples"]
    assert len(samples) >= 3
    assert [s["steps"] for s in samples] == sorted(s["steps"] for s in samples)
    assert samples[-1]["steps"] == first["stats"]["steps"]
    assert samples[-1]["effective"]["0.weight"] > 0
    assert {row["name"]: row["method"] for row in first["plan"]}["0.weight"] == "rank_dad"

    (plan,) = first["events"]
    assert plan["kind"] == "plan" and "step 1: the first step without a plan" in plan["text"]
    step = {row[0]: row[1:] for row in first["step"]["tensors"]}
    submitted, began, ended, last = step["0.weight"]
    assert 0 <= submitted <= began < ended and last in (0, 1)

    assert main(["report", str(file), "-o", str(out)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    text = out.read_text()
    check_page(text)
    row = re.search(r"<tr><td>0\.weight</td>.*", text)[0]
    assert "Beyond the gradient veil" in text and "the first step without a plan" in text
    assert "rank_dad" in row and "polyline" in row and "rank 4" in row


def line_of(rank, tensors, **others):
    stats = {
        "steps": 5,
        "wire_bytes_sent": 10,
        "wire_bytes_received": 10,
        "messages_sent": 1,
        "dense_bytes": 99,
    }
    return {"job": "j", "rank": rank, "size": 2, "stats": {**stats, "tensors": tensors}, **others}


def test_a_page_of_500_layers_has_them_all_and_escapes_their_names():
    tensor = {"steps": 5, "wire_bytes_sent": 7, "dense_bytes": 70, "ratio": 10.0, "effective": 0.25}
    tensors = {f"<layer>{i}": dict(tensor) for i in range(500)}
    samples = [
        {"seconds": t, "steps": t, "wire_bytes_sent": t, "effective": dict.fromkeys(tensors, 0.5)}
        for t in (1, 2, 3)
    ]
    text = page("j", [line_of(0, tensors, samples=samples), line_of(1, tensors, ended_by="SIGTERM")])
    check_page(text)
    assert text.count("&lt;layer&gt;") == 500 and "<layer>" not in text
    assert "25 %" in text and "SIGTERM" in text


def test_a_file_that_is_no_report_is_named_with_its_line(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(line_of(0, {})) + "\n{}\n")
    with pytest.raises(ReportError, match=":2: not a line of a report"):
        read_report(file)
    assert main(["report", str(file)]) == 1
    assert "x.jsonl:2" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 1


def test_samples_of_a_long_job_stay_few_and_span_it():
    samples = Samples()
    for second in range(10_000):
        samples.note(float(second), {"steps": second, "wire_bytes_sent": 0, "tensors": {}})
    seconds = [sample["seconds"] for sample in samples.stop()]
    assert len(seconds) < MOST
    assert seconds == sorted(seconds) and seconds[0] == 0 and seconds[-1] > 9_000


def state(seconds, steps, events=()):
    tensors = {
        f"layer{i}.weight": {"wire_bytes_sent": steps * i, "ratio": 4.0, "effective": 0.25, "worst": {}}
        for i in range(100)
    }
    tensors["late"] = {
        "wire_bytes_sent": 10**6 * steps,
        "ratio": None,
        "worst": {"seconds": 0.02, "last_rank": 3},
    }
    stats = {
        "steps": steps,
        "wire_bytes_sent": 2000 * steps,
        "wire_bytes_received": 0,
        "dense_bytes": 8000 * steps,
    }
    return {
        "job": "j",
        "pid": os.getpid(),
        "size": 8,
        "seconds": seconds,
        "stats": {**stats, "tensors": tensors},
        "methods": {"late": "vgc"},
        "events": list(events),
    }


def test_top_shows_rates_of_the_last_second_and_fits_the_screen():
    warning = {"seconds": 9.0, "kind": "warning", "text": "not finite " * 30}
    screen = show(state(3700.0, 520, [warning]), state(3698.0, 500), 80, 20, colour=False)
    lines = screen.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    assert lines[0] == "j: 8 ranks, 1:01:40, step 520, 10 steps/s"
    assert "sends 20 kB/s" in lines[1] and "4x fewer" in lines[1]
    late = next(line for line in lines if line.startswith("late"))
    assert late.split() == ["late", "vgc", "10", "MB", "520", "MB", "20", "3"]
    assert lines.index(late) < lines.index(next(line for line in lines if line.startswith("layer99")))
    assert "more tensors" in lines[-1]


def test_top_ends_with_the_job_and_tells_one_that_was_killed(tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    live_path(file).write_text(json.dumps(state(5.0, 50)))
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            live_path(file).unlink()  # as the rank does at its end

    top(str(file), pause=pause)
    assert capsys.readouterr().out.endswith(f"the job has ended: dad report {file}\n")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    live_path(file).write_text(json.dumps({**state(5.0, 50), "pid": ended.pid}))
    with pytest.raises(TopError, match="was killed at step 50"):
        top(str(file))


def test_env_hides_what_may_be_secret(monkeypatch, capsys):
    monkeypatch.setenv("DAD_SECRET_FILE", "somewhere")
    monkeypatch.setenv("DAD_LOG_LEVEL", "debug")
    found = environment()
    assert found["DAD_SECRET_FILE"] == "(set)" and found["DAD_LOG_LEVEL"] == "debug"
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "built for torch" in printed and "somewhere" not in printed
