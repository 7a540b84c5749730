"""Several processes train one network on Fashion-MNIST; the demo of dad.

    dadrun -np 4 python examples/fashion_mnist.py
    dadrun -np 4 python examples/fashion_mnist.py --epochs 10 --compression none rank_dad:rank=2

Every process has its share of the images. After each backward pass dad averages the
gradients, so that all hold the same network at all times. The training is repeated for
each compression: with `none` the gradients travel as they are, with `exact` in the cheapest
way that gives the same mean (on a fast link that may be as they are), with `vgc` only the
elements that are unambiguous against their variance, with `auto` as factors of low rank. Then
you see what each sent for each tensor and why, and a table that compares accuracy, bytes and
time.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from datasets import fashion_mnist
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
parser.add_argument("--lr", type=float, default=0.05, help="for 256 images per step")
parser.add_argument("--compression", nargs="+", default=["none", "exact", "vgc", "auto"])
args = parser.parse_args()


def say(*words):
    if hvd.rank() == 0:
        print(*words, flush=True)


def total(value):
    """The sum of a number over all processes."""
    return hvd.allreduce(torch.tensor(float(value), dtype=torch.float64), op=hvd.Sum).item()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def accuracy(model, images, labels):
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    return total(correct) / total(len(labels))


def train(compression, train_set, test_set):
    """One training from the start. Returns accuracy, bytes sent by this process, seconds and the plan."""
    images, labels = train_set
    model = make_model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * args.batch_size * hvd.size() / 256, momentum=0.9, nesterov=True
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # The same number of steps everywhere, also when the shares differ by an image.
    steps = int(hvd.allreduce(torch.tensor(len(images) // args.batch_size), op=hvd.Min))
    order = torch.Generator().manual_seed(hvd.rank())
    sent_bytes, seconds = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        dad.reset_stats()  # so that the plan shows the bytes of the last epoch, without the first steps
        start = time.perf_counter()
        loss_sum = 0.0
        batches = torch.randperm(len(images), generator=order).split(args.batch_size)[:steps]
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        seconds += time.perf_counter() - start
        sent_bytes += dad.stats()["wire_bytes_sent"]
        loss = total(loss_sum / steps) / hvd.size()
        right = accuracy(model, *test_set)
        say(
            f"  {compression}: epoch {epoch}/{args.epochs}   loss {loss:.3f}   test accuracy {right:.2%}"
            f"   {seconds:5.1f} s"
        )
    return right, sent_bytes, seconds, optimizer.plan()


hvd.init()
say(f"Fashion-MNIST, {hvd.size()} processes, {args.batch_size} images each per step")
train_set = fashion_mnist("train", hvd.rank(), hvd.size())
test_set = fashion_mnist("t10k", hvd.rank(), hvd.size())

rows, plans = [], {}
for compression in args.compression:
    right, sent_bytes, seconds, plans[compression] = train(compression, train_set, test_set)
    rows.append((compression, right, total(sent_bytes) / hvd.size() / 1e6, seconds))

for compression, plan in plans.items():
    if compression != "none":
        say(f"\nWhat {compression} sent for each tensor, in bytes per step and process:")
        for row in plan:
            shape = " x ".join(map(str, row["shape"]))
            say(f"  {row['name']:<10} {shape:<10} {row['method']:<9} {row['bytes']:>8}   {row['why']}")

say(f"\n{'compression':<16} {'test accuracy':>14} {'MB sent per process':>20} {'ratio':>7} {'seconds':>8}")
most = max(megabytes for _, _, megabytes, _ in rows)
for compression, right, megabytes, seconds in rows:
    ratio = most / megabytes if megabytes else 1.0  # one process sends nothing
    say(f"{compression:<16} {right:>14.2%} {megabytes:>20.2f} {ratio:>6.1f}x {seconds:>8.1f}")
hvd.shutdown()
