"""A method for each kind of layer: dadrun -np 2 python examples/per_layer.py

The first pattern that matches the name of a parameter decides; `*` at the end is for the rest. At the end
rank 0 prints what was sent for each tensor, and why.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
args = parser.parse_args()

WORDS, WIDTH, LABELS = 5000, 64, 20


class Classifier(nn.Module):
    """The mean of word vectors, two wide layers, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, LABELS)

    def forward(self, words):
        return self.head(self.hidden(self.embed(words)))


compression = hvd.Compression.per_layer(
    {
        "embed.*": hvd.Compression.exact,  # only the rows that were looked up
        "hidden.*.weight": hvd.Compression.rank_dad(rank=4),  # large matrices: four directions each
        "head.*": hvd.Compression.none,  # small, and the most sensitive to noise
        "*": hvd.Compression.bf16,
    }
)

hvd.init()
torch.manual_seed(hvd.rank())
model = Classifier()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.001),
    named_parameters=model.named_parameters(),
    compression=compression,
)

for _ in range(args.steps):
    words = torch.randint(WORDS, (32, 12))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(words), words[:, 0] % LABELS)
    loss.backward()
    optimizer.step()

if hvd.rank() == 0:
    print(f"loss {loss.item():.3f}")
    print(dad.format_plan(optimizer.plan()), flush=True)
