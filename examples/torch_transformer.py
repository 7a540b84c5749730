"""A small transformer learns to write like the King James Bible, byte by byte.

    dadrun -np 4 python examples/torch_transformer.py
    dadrun -np 4 python examples/torch_transformer.py --compression auto
    dadrun -np 4 --compression bf16 --plan python examples/torch_transformer.py

The last line is how it is done for a script without such an argument. The other settings are below.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from datasets import king_james_text
from torch import nn

import dad
import dad.torch as hvd

layers, heads, width, context = 4, 4, 128, 128
batch_size = 8  # sequences per process and step
report_every = 20
lr = 1e-3
sample_bytes = 200

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--compression", help="none, fp16, bf16, exact, auto, rank_dad:rank=16, …")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text):
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


@torch.no_grad()
def write(model, prompt):
    text = torch.tensor([list(prompt)])
    for _ in range(sample_bytes):
        odds = F.softmax(model(text[:, -context:])[:, -1], dim=-1)
        text = torch.cat([text, torch.multinomial(odds, 1)], dim=1)
    return bytes(text[0].tolist()).decode("ascii", "replace")


hvd.init()
torch.manual_seed(hvd.rank())  # every process draws its own sequences

text = king_james_text()
model = Transformer()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=lr),
    named_parameters=model.named_parameters(),
    compression=args.compression,
)

start = time.perf_counter()
for step in range(1, args.steps + 1):
    places = torch.randint(len(text) - context - 1, (batch_size,))
    batch = torch.stack([text[i : i + context + 1] for i in places]).long()
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % report_every == 0 or step == args.steps:
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            each = (time.perf_counter() - start) / step
            print(
                f"step {step}/{args.steps}   loss {mean_loss:.3f}   {each * 1000:.0f} ms per step", flush=True
            )

if hvd.rank() == 0:
    print(f"{dad.stats()['wire_bytes_sent'] / 1e6:.1f} MB sent by rank 0\n")
    print(write(model, b"In the beginning "))
