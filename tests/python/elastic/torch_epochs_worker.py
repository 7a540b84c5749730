"""A worker that trains as scripts of users do: data loaders with processes of their own, epochs of which ranks
have unequally many batches and that end with join(), sums inside of each host first, and checkpoints from
which a job of which nobody is left begins again.

An epoch has even steps by lossy methods, whose gradients are known from step and rank (as in torch_worker.py),
and uneven ones of a dense model. At its end all ranks commit and save.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import dad.torch as hvd
from dad.state.states import saved_shares
from dad.torch.checkpoint import as_arrays

OUT, IN, ROWS, EVEN_STEPS = 24, 40, 3, 3
METHODS = ["int8", "rank_dad:rank=2,combine=owner", "vgc:alpha=1.0,error_feedback=True", "topk:ratio=0.05"]

plan = json.loads(sys.argv[1])
folder = Path(plan["folder"])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
torch.set_num_threads(1)
hvd.init()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((IN,), float(index)) / len(self), torch.utils.data.get_worker_info().id


def factors(step, rank, number):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + 100000 * number)
    x = torch.randn(ROWS, IN, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64)


models, optimizers = [], []
for method in METHODS:
    torch.manual_seed(1)
    models.append(nn.Linear(IN, OUT).double())
    optimizers.append(
        hvd.DistributedOptimizer(
            torch.optim.SGD(models[-1].parameters(), lr=1.0),
            named_parameters=models[-1].named_parameters(),
            compression=method,
        )
    )
start = models[0].weight.detach().clone()
torch.manual_seed(2)
dense = nn.Linear(IN, 2)
adam = hvd.DistributedOptimizer(torch.optim.Adam(dense.parameters()), dense.named_parameters())
sampler = hvd.elastic.ElasticSampler(Samples())
loader = torch.utils.data.DataLoader(Samples(), 2, sampler=sampler, num_workers=1, persistent_workers=True)

state = hvd.elastic.TorchState(
    **{f"model{i}": model for i, model in enumerate(models)},
    **{f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers)},
    dense=dense,
    adam=adam,
    sampler=sampler,
    epoch=0,
    sizes=[],
)


def shares(optimizer):
    """Of the weight: what this rank has still to apply."""
    share = saved_shares(as_arrays(optimizer._dad.save())).get("weight")
    return torch.zeros(OUT, IN, dtype=torch.float64) if share is None else torch.from_numpy(share.copy())


def die_if_planned(part):
    if plan["die"].get(slot) == [state.epoch, part]:
        print("DIE", state.epoch, part, flush=True)
        torch.save(state.kept, folder / f"died.{slot}.tmp")
        (folder / f"died.{slot}.tmp").rename(folder / f"died.{slot}.pt")
        os._exit(3)


def even_steps():
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for i in range(EVEN_STEPS):
            x, y = factors(EVEN_STEPS * state.epoch + i, hvd.rank(), number)
            optimizer.zero_grad()
            (model(x) * y).sum().backward()
            optimizer.step()
            if i == 1:
                die_if_planned("even")


def uneven_steps():
    """The first ranks have fewer batches."""
    for i, (x, worker) in enumerate(loader):
        if i == 1 + hvd.rank():
            break
        assert worker.tolist() == [0] * len(worker)  # of the loader's own process
        adam.zero_grad()
        dense(x).square().mean().backward()
        adam.step()
    die_if_planned("uneven")
    last = hvd.join()  # that one has taken all steps
    hvd.broadcast_parameters(dense.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(adam, root_rank=last)
    sampler.set_epoch(sampler.epoch + 1)


def save():
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        more = {"epoch": state.epoch, "sizes": state.sizes}
        hvd.save(folder / f"run{number}.pt", model=model, optimizer=optimizer, **more)


def load():
    """On all ranks, none of which has trained."""
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        more = hvd.load(folder / f"run{number}.pt", model=model, optimizer=optimizer)
    state.epoch, state.sizes = more["epoch"], more["sizes"]
    state.commit()


@hvd.elastic.run
def train(state):
    print("ROUND", hvd.rank(), "of", hvd.size(), "epoch", state.epoch, flush=True)
    if state.epoch == 0 and hvd.broadcast_object((folder / "run0.pt").exists()):
        load()
        print("LOADED", state.epoch, flush=True)
    state.kept = [shares(optimizer) for optimizer in optimizers]
    while state.epoch < plan["epochs"]:
        if name := plan.get("hold", {}).get(str(state.epoch)):
            print("HOLD", state.epoch, flush=True)
            while not (folder / name).exists():
                time.sleep(0.02)
        even_steps()
        uneven_steps()
        state.sizes = [*state.sizes, hvd.size()]
        state.epoch += 1
        state.kept = [shares(optimizer) for optimizer in optimizers]
        state.commit()
        save()


train(state)
hvd.check_replicas(dense)
for number, (method, model, optimizer) in enumerate(zip(METHODS, models, optimizers, strict=True)):
    gradients = torch.zeros(OUT, IN, dtype=torch.float64)
    for epoch, size in enumerate(state.sizes):
        for step in range(EVEN_STEPS * epoch, EVEN_STEPS * (epoch + 1)):
            for rank in range(size):
                x, y = factors(step, rank, number)
                gradients += y.T @ x / size
    hvd.check_replicas(model)
    kept = hvd.allreduce(shares(optimizer), op=hvd.Sum)
    for file in folder.glob("died.*.pt"):
        kept += torch.load(file)[number]
    applied = start - model.weight.detach()
    error = float((applied + kept - gradients).abs().max() / gradients.abs().max())
    print("METHOD", method, "error", error, "kept", float(kept.norm()), flush=True)
print("DONE", slot, hvd.rank(), json.dumps(state.sizes), flush=True)
hvd.shutdown()
