"""DAD_PACK: dense gradients and factors travel packed, with the same bits and fewer bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from util import job_environment

NUM_RANKS = 4
STEPS = 3
PROBE = 100_000

# Of each rank: a digest of all gradients of all steps, what was sent, and what the plan says of it.
JOB = f"""
import hashlib, json, sys, torch
import dad.torch as hvd
from dad._lib import _core

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=getattr(hvd.Compression, sys.argv[2]),
)
torch.manual_seed(1 + hvd.rank())
digest = hashlib.sha256()
for _ in range({STEPS}):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 300).relu()), torch.randint(10, (8,)))
    loss.backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    with optimizer.skip_synchronize():
        optimizer.step()
_core.reduce_zeros("probe", {PROBE}, 0)
plan = {{row["name"]: row for row in optimizer.plan()}}
tensors = hvd.stats()["tensors"]
(name,) = [name for name in tensors if name.endswith("0.weight")]
with open(f"{{sys.argv[1]}}/{{hvd.rank()}}.json", "w") as file:
    json.dump(
        {{
            "digest": digest.hexdigest(),
            "tensor": tensors[name],
            "row": plan["0.weight"],
            "probe": tensors["probe"],
        }},
        file,
    )
"""


def run(folder, method, **environment):
    """What the ranks wrote."""
    command = [sys.executable, "-m", "dad.runner.cli", "-np", str(NUM_RANKS), sys.executable, "-c", JOB]
    done = subprocess.run(
        [*command, str(folder), method],
        env=job_environment(**environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Of dense gradients, by the value of DAD_PACK."""
    return {pack: run(tmp_path_factory.mktemp("pack"), "none", DAD_PACK=pack) for pack in ("0", "1")}


@pytest.fixture(scope="module")
def factor_jobs(tmp_path_factory):
    """Of factors."""
    return {pack: run(tmp_path_factory.mktemp("pack"), "dad", DAD_PACK=pack) for pack in ("0", "1")}


def test_gradients_have_the_same_bits(jobs):
    assert len({rank["digest"] for ranks in jobs.values() for rank in ranks}) == 1


def test_stats_count_what_was_sent(jobs):
    dense = STEPS * 2 * (NUM_RANKS - 1) * 300 * 200 * 4 // NUM_RANKS
    for plain, packed in zip(jobs["0"], jobs["1"], strict=True):
        assert plain["tensor"]["wire_bytes_sent"] == dense
        assert packed["tensor"]["wire_bytes_sent"] < 0.9 * dense
        assert plain["tensor"]["dense_bytes"] == packed["tensor"]["dense_bytes"] == dense


def test_a_probe_of_the_link_is_not_packed(jobs):
    for ranks in jobs.values():
        for rank in ranks:
            assert rank["probe"]["wire_bytes_sent"] == 2 * (NUM_RANKS - 1) * PROBE * 4 // NUM_RANKS


def test_the_plan_says_what_was_sent(jobs):
    for ranks in jobs.values():
        for rank in ranks:
            assert rank["row"]["bytes"] == round(rank["tensor"]["wire_bytes_sent"] / STEPS)
    assert jobs["0"][0]["row"]["ratio"] == 1.0
    assert jobs["1"][0]["row"]["ratio"] > 1.1


def test_factors_have_the_same_bits_with_fewer_bytes(factor_jobs):
    assert len({rank["digest"] for ranks in factor_jobs.values() for rank in ranks}) == 1
    for plain, packed in zip(factor_jobs["0"], factor_jobs["1"], strict=True):
        assert plain["row"]["method"] == packed["row"]["method"] == "dad"
        assert packed["tensor"]["wire_bytes_sent"] < 0.9 * plain["tensor"]["wire_bytes_sent"]
        assert packed["row"]["bytes"] < 0.9 * plain["row"]["bytes"]
