"""Fashion-MNIST as Debian packages it, as arrays of NumPy."""

import gzip
import struct
from pathlib import Path

import numpy as np

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
    return (images.astype(np.float32) / 255.0 - 0.286) / 0.353, labels.astype(np.int64)
