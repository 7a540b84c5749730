"""BERT-style training on your own text: dadrun -np 4 python examples/bert.py --data a.txt b.txt

The model predicts bytes that were masked (masked language modelling), so that no vocabulary is needed. The
defaults are the sizes of BERT-base. Without --data it trains on random bytes, to measure how fast that goes.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text files")
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--length", type=int, default=512, help="of a sequence, in bytes")
parser.add_argument("--batch-size", type=int, default=8, help="sequences of each rank")
parser.add_argument("--passes", type=int, default=1, help="batches whose gradients add up before a step")
parser.add_argument("--steps", type=int, default=10000)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--compression", default="auto", help="none, bf16, exact, rank_dad:rank=16, …")
parser.add_argument("--checkpoint", default="bert.pt")
args = parser.parse_args()

MASK, VOCABULARY = 256, 257


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, args.width)
        self.places = nn.Embedding(args.length, args.width)
        self.norm = nn.LayerNorm(args.width)
        layer = nn.TransformerEncoderLayer(
            args.width, args.heads, 4 * args.width, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, VOCABULARY)

    def forward(self, text):
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.encoder(self.norm(x)))


def masked(text):
    """15 % of the bytes are to be predicted: of them 80 % are masked, 10 % random and 10 % as they were."""
    chosen = torch.rand(text.shape) < 0.15
    draw = torch.rand(text.shape)
    given = torch.where(chosen & (draw < 0.8), MASK, text)
    given = torch.where(chosen & (draw >= 0.9), torch.randint_like(text, 256), given)
    return given, torch.where(chosen, text, -100)  # -100: not part of the loss


hvd.init()
torch.manual_seed(hvd.rank())  # every rank draws its own sequences
if args.data:
    everything = b"\n".join(path.read_bytes() for path in args.data)
    text = torch.frombuffer(bytearray(everything), dtype=torch.uint8)
else:
    text = torch.randint(256, (1 << 20,), dtype=torch.uint8)
if len(text) <= args.length:
    raise SystemExit(f"the text has {len(text)} bytes; a sequence alone has {args.length} (--length)")

model = Bert()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.passes,
    compression=args.compression,
)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 1000))

start = time.perf_counter()
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    for _ in range(args.passes):
        places = torch.randint(len(text) - args.length, (args.batch_size,))
        given, wanted = masked(torch.stack([text[i : i + args.length] for i in places]).long())
        loss = F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
        (loss / args.passes).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warmup.step()
    if step % 100 == 0 or step == args.steps:
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        hvd.save(args.checkpoint, model=model, optimizer=optimizer, step=step)
        if hvd.rank() == 0:
            each = (time.perf_counter() - start) / step
            sent = dad.stats()["wire_bytes_sent"] / 1e6
            print(
                f"step {step}: loss {mean_loss:.3f}, {1000 * each:.0f} ms per step, {sent:.1f} MB sent",
                flush=True,
            )
