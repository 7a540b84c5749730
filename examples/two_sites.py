"""Two sites with a slow line between them: local steps, and a report of what crossed the line.

    dadrun -np 2 -H site-a:1,site-b:1 python examples/two_sites.py --local-steps 16
    tools/netlab up 2 50mbit 25; tools/netlab run python examples/two_sites.py    on this machine, as root

Every rank takes some steps on its own data. Then the ranks average the changes of their weights, in eight
bits per element. docs/far_apart.md goes through the whole way.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=128)
parser.add_argument("--local-steps", default="16", help='steps of a round, or its length such as "5s"')
parser.add_argument("--compression", default="int8")
args = parser.parse_args()

hvd.init()
# Every site has data of its own, made by one teacher here.
teacher = torch.randn(256, 10, generator=torch.Generator().manual_seed(0))
torch.manual_seed(1 + hvd.rank())
inputs = torch.randn(4096, 256)
labels = (inputs @ teacher).argmax(1)

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    local_steps=int(args.local_steps) if args.local_steps.isdecimal() else args.local_steps,
    compression=args.compression,
)

dad.reset_stats()
start = time.perf_counter()
for _ in range(args.steps):
    batch = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs[batch]), labels[batch])
    loss.backward()
    optimizer.step()  # exchanges at the end of a round
optimizer.end_round()  # from here on all ranks have the same weights
seconds = time.perf_counter() - start

sent = dad.stats()["wire_bytes_sent"] / 1e6
dense = 2 * (hvd.size() - 1) / hvd.size() * 4e-6 * sum(p.numel() for p in model.parameters()) * args.steps
loss = hvd.allreduce(loss.detach())
if hvd.rank() == 0:
    print(f"{args.steps} steps in {seconds:.1f} s, loss {loss:.3f}")
    print(f"{sent:.2f} MB sent by rank 0; averaging dense gradients in every step sends {dense:.0f} MB")
