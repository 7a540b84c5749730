"""dadrun and dad.torch.elastic together: a rank is killed, the others go on, its successor gets their state."""

import re
import sys

import pytest

SCRIPT = """
import hashlib, os, time
import torch
import dad.torch as hvd

SLOT = os.environ["HOROVOD_LOCAL_RANK"]
FINISH = os.environ["TINY_FOLDER"] + "/finish"
print(f"localhost:{SLOT} starts here {os.getpid()}", flush=True)
hvd.init()
torch.manual_seed(int(SLOT))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    finished = False
    while not finished:
        torch.manual_seed(state.step * 10 + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        state.step += 1
        if state.step % 5 == 0:
            print("step", state.step, "of", hvd.size(), "slot", SLOT, flush=True)
            state.commit()
        here = torch.tensor(float(os.path.exists(FINISH)))
        finished = bool(hvd.allreduce(here, op=hvd.Max, name="finish"))

state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("result", state.step, hashlib.sha256(weights).hexdigest(), flush=True)
"""


def test_killed_rank_comes_back_with_the_state_of_the_others(start, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = start("-np", "3", "--min-np", "2", command=(sys.executable, str(script)), seconds=120)
    job.until(r"step \d+ of 3", 6)
    job.workers()["localhost:0"].kill()
    shrunk = int(job.until(r"step (\d+) of 2").group(1))
    grown = int(job.until(r"step (\d+) of 3 slot 0").group(1))
    assert grown > shrunk > 5
    assert job.finish() == 0, job.text
    results = re.findall(r"result (\d+) (\S+)", job.text)
    assert len(results) == 3
    assert len(set(results)) == 1
    assert int(results[0][0]) >= grown
