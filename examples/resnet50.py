"""ResNet-50 on your own images: dadrun -np 4 python examples/resnet50.py --data FOLDER

FOLDER has one folder of images for each class, as ImageNet's `train` has. Without --data it trains on random
images, to measure how fast that goes. Reading images needs Pillow (pip install pillow).
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import dad
import dad.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="a folder with a folder of images for each class")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--steps", type=int, help="stop an epoch after so many")
parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
parser.add_argument("--size", type=int, default=224, help="of the images, in pixels")
parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
parser.add_argument("--lr", type=float, default=0.0125, help="for one rank")
parser.add_argument("--workers", type=int, default=2, help="processes of each rank that read images")
parser.add_argument("--compression", help="none, bf16, int8, auto, …; default: dense")
parser.add_argument("--checkpoint", default="resnet50.pt")
args = parser.parse_args()


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride > 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu(self.path(x) + self.shortcut(x))


def resnet50(classes, width):
    inside = width
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width << stage, 2 if stage and block == 0 else 1))
            inside = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class Folders(Dataset):
    """Images in folders, one for each class: a random part of each, mirrored half of the time."""

    def __init__(self, root):
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        found = [(i, path) for i, name in enumerate(self.classes) for path in (root / name).iterdir()]
        self.files = sorted(found)
        if not self.files:
            raise SystemExit(f"{root}: expected a folder of images for each class")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        import numpy as np
        from PIL import Image

        label, path = self.files[number]
        image = Image.open(path).convert("RGB")
        side = int(min(image.size) * (0.5 + 0.5 * torch.rand(()).item()))
        left, top = (int(torch.randint(length - side + 1, ())) for length in image.size)
        image = image.resize((args.size, args.size), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32).copy()).permute(2, 0, 1) / 255
        return ((pixels.flip(2) if torch.rand(()) < 0.5 else pixels) - 0.45) / 0.225, label


class Random(Dataset):
    classes = range(1000)

    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        return torch.randn(3, args.size, args.size), number % len(self.classes)


hvd.init()
torch.manual_seed(0)
data = Folders(args.data) if args.data else Random()
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=args.workers)
steps = min(len(loader), args.steps or len(loader))

model = resnet50(len(data.classes), args.width)
rate = args.lr * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=args.compression
)
# Five epochs from the rate of one rank to the full one, then down to zero.
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / hvd.size(), total_iters=5 * steps)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps)
schedule = torch.optim.lr_scheduler.ChainedScheduler([warmup, decay])

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    for _, (images, labels) in zip(range(steps), loader):  # noqa: B905  the loader may be longer
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
    mean_loss = hvd.allreduce(loss.detach(), name="loss")
    hvd.average_batch_norm(model)
    hvd.save(args.checkpoint, model=model, optimizer=optimizer, epoch=epoch)
    if hvd.rank() == 0:
        speed = steps * args.batch_size * hvd.size() / (time.perf_counter() - start)
        sent = dad.stats()["wire_bytes_sent"] / 1e6
        print(f"epoch {epoch}: loss {mean_loss:.3f}, {speed:.1f} images/s, {sent:.1f} MB sent", flush=True)
