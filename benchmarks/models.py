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


def perceptron(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: perceptron(1024),
    "bigfc": lambda: perceptron(4096),
    "transformer": Transformer,
}


def batch(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets; what they are changes neither time nor bytes."""
    if model == "transformer":
        text = torch.randint(256, (SEQUENCES, CONTEXT + 1))
        return text[:, :-1], text[:, 1:]
    return torch.randn(IMAGES, 784), torch.randint(10, (IMAGES,))
