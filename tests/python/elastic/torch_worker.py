"""A worker that trains with PyTorch, by every method that keeps something of gradients.

Gradients do not depend on weights: those of a step are known from its number, the rank and how many ranks
there were. So in the end each rank knows what all committed steps together must have applied or kept. Another
model is compiled, accumulates gradients in mixed precision, and samples come from an ElasticSampler.
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

OUT, IN, ROWS, SAMPLES = 24, 40, 3, 60
METHODS = [
    "rank_dad:rank=2,combine=owner",
    "rank_dad:rank=2,combine=power",
    "powersgd:rank=2",
    "int8",
    "topk:ratio=0.05",
    "vgc:alpha=1.0,error_feedback=True",
    "strom:tau=4.0",
    "chunk_topk:chunk=256,k=8",
    "auto",
]

plan = json.loads(sys.argv[1])
folder = Path(plan["folder"])
slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
torch.set_num_threads(1)
hvd.init()


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
starts = [model.weight.detach().clone() for model in models]

torch.manual_seed(2)
mixed = nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, 2))
compiled = torch.compile(mixed, backend="aot_eager")
adam = hvd.DistributedOptimizer(
    torch.optim.Adam(mixed.parameters()), mixed.named_parameters(), backward_passes_per_step=2
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=4)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
samples = torch.utils.data.DataLoader(range(SAMPLES), batch_size=2, sampler=sampler)

state = hvd.elastic.TorchState(
    **{f"model{i}": model for i, model in enumerate(models)},
    **{f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers)},
    mixed=mixed,
    adam=adam,
    scaler=scaler,
    sampler=sampler,
    step=0,
    sizes=[],
    seen=[],
)


def shares(optimizer):
    """Of the weight: what this rank has still to apply."""
    found = saved_shares(as_arrays(optimizer._dad.save()))
    share = found.get("weight")
    return torch.zeros(OUT, IN, dtype=torch.float64) if share is None else torch.from_numpy(share.copy())


def train_mixed(batch):
    adam.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.stack([torch.full((IN,), float(i)) for i in batch.tolist()]) / SAMPLES
            loss = compiled(x).square().mean()
        scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()


def epochs():
    """Batches without end; an epoch that was broken off is continued."""
    while True:
        yield from samples
        sampler.set_epoch(sampler.epoch + 1)


@hvd.elastic.run
def train(state):
    last = getattr(train, "last", None)
    gap = "" if last is None else f"gap {time.monotonic() - last:.2f}"
    print("ROUND", hvd.rank(), "of", hvd.size(), "step", state.step, gap, flush=True)
    batches = epochs()
    while state.step < plan["steps"]:
        if plan.get("die", {}).get(slot) == state.step:
            torch.save([shares(optimizer) for optimizer in optimizers], folder / "died.tmp")
            (folder / "died.tmp").rename(folder / "died.pt")
            os._exit(3)
        if name := plan.get("hold", {}).get(str(state.step)):
            print("HOLD", state.step, flush=True)
            while not (folder / name).exists():
                time.sleep(0.02)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = factors(state.step, hvd.rank(), number)
            optimizer.zero_grad()
            (model(x) * y).sum().backward()
            optimizer.step()
        batch = next(batches)
        train_mixed(batch)
        sampler.record_batch(0, len(batch))
        state.seen = [*state.seen, [sampler.epoch, hvd.allgather(batch).tolist()]]
        state.sizes = [*state.sizes, hvd.size()]
        state.step += 1
        state.commit()
        train.last = time.monotonic()


train(state)
hvd.check_replicas(mixed)
for number, (method, model, optimizer) in enumerate(zip(METHODS, models, optimizers, strict=True)):
    gradients = torch.zeros(OUT, IN, dtype=torch.float64)
    for step, size in enumerate(state.sizes):
        for rank in range(size):
            x, y = factors(step, rank, number)
            gradients += y.T @ x / size
    hvd.check_replicas(model)
    kept = hvd.allreduce(shares(optimizer), op=hvd.Sum)
    if plan.get("die"):
        kept += torch.load(folder / "died.pt")[number]
    applied = starts[number] - model.weight.detach()
    error = float((applied + kept - gradients).abs().max() / gradients.abs().max())
    print("METHOD", method, "error", error, "kept", float(kept.norm()), flush=True)
print("DONE", slot, hvd.rank(), json.dumps([state.sizes, state.seen]), flush=True)
hvd.shutdown()
