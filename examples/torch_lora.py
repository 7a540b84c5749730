"""Fine-tuning with low-rank adapters (LoRA): dadrun -np 2 python examples/torch_lora.py

A network is trained on images, then frozen, and small adapters teach it the same images turned by 90
degrees. Only the adapters have gradients, so only they are sent. `base` stands for your own pretrained
model: adapt() replaces the linear layers of any module.
"""

import argparse

import torch
import torch.nn.functional as F
from datasets import fashion_mnist
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300, help="of training, and then of fine-tuning")
parser.add_argument("--rank", type=int, default=4, help="of the adapters")
parser.add_argument("--compression", help="none, bf16, exact, int8, …; default: dense")
args = parser.parse_args()


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices, which begins at zero."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(module, rank):
    """Freezes a module and gives every linear layer in it an adapter."""
    module.requires_grad_(False)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoraLinear(child, rank))
        else:
            adapt(child, rank)


def train(model, images, labels, what):
    """Trains the parameters that are not frozen."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.Adam([p for _, p in trained], lr=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=trained, compression=args.compression)
    dad.reset_stats()
    for _ in range(args.steps):
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    sent = dad.stats()["wire_bytes_sent"] / 1e6
    loss = hvd.allreduce(loss.detach())
    if hvd.rank() == 0:
        count = sum(p.numel() for _, p in trained)
        print(f"{what}: {count} parameters trained, {sent:.2f} MB sent, loss {loss:.3f}", flush=True)


hvd.init()
torch.manual_seed(hvd.rank())
images, labels = fashion_mnist("train", hvd.rank(), hvd.size())
base = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
hvd.broadcast_parameters(base.state_dict(), root_rank=0)
train(base, images, labels, "training")

adapt(base, args.rank)
hvd.broadcast_parameters(base.state_dict(), root_rank=0)  # the adapters are new
train(base, images.rot90(dims=(1, 2)), labels, "fine-tuning")
