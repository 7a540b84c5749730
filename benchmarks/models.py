"""The models of the benchmarks, each with a batch per rank of the size that goes with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, CONTEXT = 4, 4, 256, 128
IMAGES, SEQUENCES = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Decoder only, over bytes: 3.3 M parameters. Returns logits as (batch, byte, place)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Recurrent(nn.Module):
    """A GRU over bytes: 1.2 M parameters. Returns logits as the transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 128)
        self.gru = nn.GRU(128, 512, batch_first=True)
        self.head = nn.Linear(512, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.bytes(text))
        return self.head(states).transpose(1, 2)


def perceptron(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


def small_vgg() -> nn.Module:
    """Pairs of convolutions for images of 28 x 28, given as rows of 784: 1.7 M parameters."""

    def pair(inputs: int, outputs: int) -> list[nn.Module]:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *pair(1, 32), *pair(32, 64), *head)


def small_cnn() -> nn.Module:
    """Two convolutions, for trainings of many epochs: 0.8 M parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: perceptron(1024),
    "bigfc": lambda: perceptron(4096),
    "cnn": small_vgg,
    "small_cnn": small_cnn,
    "gru": Recurrent,
    "transformer": Transformer,
}


def batch(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets. Of real ones more are zero, and dad packs zeros of exact factors."""
    if model in ("gru", "transformer"):
        text = torch.randint(256, (SEQUENCES, CONTEXT + 1))
        return text[:, :-1], text[:, 1:]
    return torch.randn(IMAGES, 784), torch.randint(10, (IMAGES,))
