"""A convolutional network with batch normalization: dadrun -np 2 python examples/torch_cnn.py

It shows what belongs into a real script: a sampler that gives every rank its part of the data, clipping,
statistics of batch normalization from all ranks, evaluation on all ranks, and a checkpoint.
"""

import argparse

import torch
import torch.nn.functional as F
from datasets import fashion_mnist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=60000)
parser.add_argument("--compression", help="none, fp16, bf16, exact, auto, rank_dad:rank=8, …")
parser.add_argument("--checkpoint", help="file to write after every epoch")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
train_set = TensorDataset(*(part[: args.images] for part in fashion_mnist("train")))
test_images, test_labels = fashion_mnist("t10k", hvd.rank(), hvd.size())  # every rank evaluates a part
test_images, test_labels = test_images[: args.images], test_labels[: args.images]
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=64, sampler=sampler)

model = nn.Sequential(
    nn.Unflatten(1, (1, 28)),
    nn.Conv2d(1, 16, 3, stride=2, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 6 * 6, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=args.compression
)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the averaged gradients
        optimizer.step()

    hvd.average_batch_norm(model)  # running statistics of the data of all ranks
    model.eval()
    with torch.no_grad():
        correct = (model(test_images).argmax(1) == test_labels).sum()
    counts = hvd.allreduce(torch.stack([correct, torch.tensor(len(test_labels))]), op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {counts[0] / counts[1]:.2%}", flush=True)
    if args.checkpoint:
        hvd.save(args.checkpoint, model=model, optimizer=optimizer, epoch=epoch)
