"""A rank of a chaos round: trains a small model, with or without elastic state, and says what came out.

    python trainer.py FOLDER METHOD elastic|plain STEPS

FOLDER/do.SLOT holds what the rank in this slot does at its next step: exit0, raise, slow (ten times, for some
steps), no memory (from then on it gets none). FOLDER/pid.SLOT says who it is. Checkpoints are in FOLDER/disk.
On the hosts of lab.py, which have one slot each, SLOT is the number of the host.
"""

import hashlib
import os
import pathlib
import resource
import sys
import time

import torch

import dad.torch as hvd
from dad.errors import CheckpointError

FOLDER = pathlib.Path(sys.argv[1])
METHOD, MODE, STEPS = sys.argv[2], sys.argv[3], int(sys.argv[4])
HOST = os.environ["HOROVOD_HOSTNAME"]
SLOT = str(int(HOST.rpartition(".")[2]) - 1) if HOST.startswith("10.") else os.environ["HOROVOD_LOCAL_RANK"]
STEP_SECONDS = 0.03
SLOW_STEPS = 10
LARGE = 1 << 18  # elements that ranks exchange now and then
SAVE_EVERY = 20


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression=METHOD,
    )
    return model, optimizer


def batch(step, rank, count=16):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(count, 32, generator=generator)
    return x, x[:, :8].sin()


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def take_step(model, optimizer, step):
    global slow_steps
    do_what_is_planted()
    if step % SAVE_EVERY == 0:
        hvd.allreduce(torch.ones(LARGE + step), name="large")  # of a new length: it needs memory
    optimizer.zero_grad()
    loss_of(model, *batch(step, hvd.rank())).backward()
    optimizer.step()
    time.sleep(STEP_SECONDS * (10 if slow_steps > 0 else 1))
    slow_steps -= 1


slow_steps = 0


def do_what_is_planted():
    global slow_steps
    planted = FOLDER / f"do.{SLOT}"
    if planted.exists():
        what = planted.read_text()
        planted.unlink()
        if what == "exit0":
            os._exit(0)
        elif what == "slow":
            slow_steps = SLOW_STEPS
        elif what == "no memory":
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
        else:
            raise ValueError("planted in user code")


def save(model, optimizer, step):
    if step % SAVE_EVERY == 0:
        try:
            hvd.save(FOLDER / "disk" / "checkpoint.pt", model=model, optimizer=optimizer, step=step)
        except CheckpointError as error:
            print(f"not saved: {error}", flush=True)


def train_plain():
    model, optimizer = make()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        take_step(model, optimizer, step)
        save(model, optimizer, step)
    return model


def train_elastic():
    model, optimizer = make()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < STEPS:
            take_step(model, optimizer, state.step)
            save(model, optimizer, state.step)
            state.step += 1
            state.commit()

    train(state)
    return model


def main():
    torch.set_num_threads(1)
    (FOLDER / f"pid.{SLOT}").write_text(str(os.getpid()))
    hvd.init()
    model = train_elastic() if MODE == "elastic" else train_plain()
    with torch.no_grad():
        loss = float(loss_of(model, *batch(10**6, 0, count=512)))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"result {hvd.rank()} {hashlib.sha256(weights).hexdigest()[:16]} {loss:.6f}", flush=True)


main()
