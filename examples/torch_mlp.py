"""The smallest complete script: dadrun -np 2 python examples/torch_mlp.py

A script for Horovod differs in one line:

    -import horovod.torch as hvd
    +import dad.torch as hvd

Everything else may stay as it is. What is sent for the gradients is one more word:

    dadrun -np 2 python examples/torch_mlp.py --compression auto

"""

import argparse

import torch
import torch.nn.functional as F
from datasets import fashion_mnist
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--compression", help="none, fp16, bf16, exact, auto, rank_dad:rank=4, …")
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())

images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)

# All start from the network of rank 0, and average their gradients in every step.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=args.compression
)

for step in range(1, args.steps + 1):
    batch = torch.randint(len(images), (64,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if step % 100 == 0 or step == args.steps:
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {step}: loss {mean_loss:.3f}", flush=True)

if hvd.rank() == 0:
    print(f"{dad.stats()['wire_bytes_sent'] / 1e6:.2f} MB sent by rank 0", flush=True)
