"""Several processes train one network on Fashion-MNIST, once for each way to send gradients.

    dadrun -np 4 python examples/fashion_mnist.py
    dadrun -np 4 python examples/fashion_mnist.py --epochs 10 --compression none rank_dad:rank=2

Every process has its share of the images. After each backward pass dad averages the gradients, so
that all processes hold the same network at all times. With `none` the gradients travel as they
are, with `exact` in the cheapest way that gives the same mean (on a fast link that may be as they
are), with `vgc` only the elements that are unambiguous against their variance, with `auto` as
factors of low rank.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from datasets import fashion_mnist
from torch import nn

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
parser.add_argument("--lr", type=float, default=0.05, help="for 256 images per step")
parser.add_argument("--compression", nargs="+", default=["none", "exact", "vgc", "auto"])
parser.add_argument("--evaluations", type=int, default=6, help="per epoch")
parser.add_argument("--history", metavar="FILE", help="write accuracy, bytes and times there as JSON")
args = parser.parse_args()


def say(*words, end="\n"):
    if hvd.rank() == 0:
        print(*words, end=end, flush=True)


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
    """One training from the start. Returns the plan and, for each evaluation, the step, the seconds
    and MB sent per process until then, the loss and the test accuracy."""
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
    last, often = steps * args.epochs, max(1, steps // args.evaluations)
    order = torch.Generator().manual_seed(hvd.rank())
    history, step, seconds, sent_bytes = [], 0, 0.0, 0
    live = sys.stdout.isatty()
    dad.reset_stats()
    start = time.perf_counter()
    for _ in range(args.epochs):
        for batch in torch.randperm(len(images), generator=order).split(args.batch_size)[:steps]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            step += 1
            evaluate = step % often == 0 or step == last
            if live and step % 5 == 0 or evaluate:
                now = seconds + time.perf_counter() - start
                sent = (sent_bytes + dad.stats()["wire_bytes_sent"]) / 1e6
                line = (
                    f"  {compression:<8} step {step:>4}/{last}   loss {loss.item():.3f}   {sent:8.2f} MB sent"
                )
                line += f"   {now:5.1f} s, {now / step * (last - step):3.0f} s left"
                if live:
                    say(f"\r{line}", end="")
            if evaluate:  # takes no part in the times and bytes
                seconds, sent_bytes = now, sent_bytes + dad.stats()["wire_bytes_sent"]
                right = accuracy(model, *test_set)
                megabytes = total(sent_bytes) / hvd.size() / 1e6
                history.append(
                    {
                        "step": step,
                        "seconds": seconds,
                        "MB": megabytes,
                        "loss": loss.item(),
                        "accuracy": right,
                    }
                )
                say(f"{chr(13) if live else ''}{line}   test accuracy {right:.2%}", end="" if live else "\n")
                dad.reset_stats()
                start = time.perf_counter()
    if live:
        say()
    return history, optimizer.plan()


hvd.init()
say(f"Fashion-MNIST, {hvd.size()} processes, {args.batch_size} images each per step")
train_set = fashion_mnist("train", hvd.rank(), hvd.size())
test_set = fashion_mnist("t10k", hvd.rank(), hvd.size())

histories, plans = {}, {}
for compression in args.compression:
    histories[compression], plans[compression] = train(compression, train_set, test_set)

for compression, plan in plans.items():
    if compression != "none":
        say(f"\nWhat {compression} sent for each tensor, in bytes per step and process:")
        for row in plan:
            shape = " x ".join(map(str, row["shape"]))
            say(f"  {row['name']:<10} {shape:<10} {row['method']:<9} {row['bytes']:>8}   {row['why']}")

head = f"{'compression':<16} {'test accuracy':>13} {'MB sent':>9}"
say(f"\n{head} {'fewer bytes':>12} {'seconds':>8} {'faster':>9}")
first = histories[args.compression[0]][-1]
for compression, history in histories.items():
    end = history[-1]
    fewer = first["MB"] / end["MB"] if end["MB"] else 1.0  # one process sends nothing
    faster = first["seconds"] / end["seconds"]
    say(
        f"{compression:<16} {end['accuracy']:>13.2%} {end['MB']:>9.2f} {fewer:>6.1f} times"
        f" {end['seconds']:>8.1f} {faster:>3.1f} times"
    )
if args.history and hvd.rank() == 0:
    with open(args.history, "w") as file:
        json.dump(histories, file, indent=1)
hvd.shutdown()
