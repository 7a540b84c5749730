"""A recurrent network reads images row by row: dadrun -np 2 python examples/torch_gru.py

The weights of a GRU are used once per time step, and dad sends the factors of all of them:

    dadrun -np 2 --plan python examples/torch_gru.py --compression exact

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
parser.add_argument("--compression", default="auto", help="none, fp16, bf16, exact, rank_dad:rank=4, …")
args = parser.parse_args()


class Reader(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.gru = nn.GRU(28, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        _, last = self.gru(images)  # 28 rows of 28 pixels are 28 time steps
        return self.head(last[0])


hvd.init()
torch.manual_seed(hvd.rank())
images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
model = Reader()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size() ** 0.5),
    named_parameters=model.named_parameters(),
    compression=args.compression,
)

for step in range(1, args.steps + 1):
    batch = torch.randint(len(images), (64,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 100 == 0 or step == args.steps:
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {step}: loss {mean_loss:.3f}", flush=True)

if hvd.rank() == 0:
    print(f"{dad.stats()['wire_bytes_sent'] / 1e6:.2f} MB sent by rank 0", flush=True)
