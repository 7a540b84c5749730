"""The data of the examples, as Debian packages it."""

import gzip
import struct
import subprocess
from pathlib import Path

import numpy as np
import torch

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist


def read_idx(path):
    """An array in idx format: two zero bytes, a type, the number of dimensions, the sizes, the values."""
    with gzip.open(path) as file:
        zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zeros != 0 or kind != 8:
            raise ValueError(f"{path}: not an idx file of bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        return np.frombuffer(file.read(), dtype=np.uint8).reshape(shape)


def fashion_mnist(part, rank=0, size=1):
    """The images and labels of "train" or "t10k": every `size`-th, from number `rank` on."""
    if not FASHION_MNIST.exists():
        raise SystemExit(f"{FASHION_MNIST} is not there: apt-get install dataset-fashion-mnist")
    images = read_idx(FASHION_MNIST / f"{part}-images-idx3-ubyte.gz")[rank::size]
    labels = read_idx(FASHION_MNIST / f"{part}-labels-idx1-ubyte.gz")[rank::size]
    pixels = torch.from_numpy(images.astype(np.float32)) / 255.0
    return (pixels - 0.286) / 0.353, torch.from_numpy(labels.astype(np.int64))


def king_james_text():
    """The King James Bible as bytes, 4.4 MB (package bible-kjv)."""
    try:
        text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise SystemExit("the command `bible` is not there: apt-get install bible-kjv") from None
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
