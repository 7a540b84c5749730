"""Compression for torch: the casts, with Horovod's compress and decompress."""

from __future__ import annotations

from typing import Any

import torch

from dad.methods import compression as _methods
from dad.methods.compression import PerLayer


class NoneCompressor(_methods.NoCompression):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """Integers stay as they are."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype


class FP16Compressor(_methods.Fp16):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(_methods.Bf16):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class Compression(_methods.Compression):
    """The methods by which gradients can be sent, as attributes.

    Single collectives take none, fp16 and bf16, or a class with compress() and decompress() as Horovod has
    them. docs/methods.md describes all methods and their options.

    Example::

        hvd.Compression.auto
        hvd.Compression.rank_dad(rank=8)
        hvd.allreduce(tensor, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_COMPRESSORS = {c.name: c for c in (NoneCompressor, FP16Compressor, BF16Compressor)}


def compressor(compression: Any, tensor_name: str = "") -> Any:
    """What compresses a tensor of that name: an object with compress and decompress."""
    if hasattr(compression, "compress"):
        return compression
    method = _methods.resolve(compression)
    if isinstance(method, PerLayer):
        return compressor(method.method_for(tensor_name))
    if method.name not in _COMPRESSORS:
        raise ValueError(
            f"compression {method.name!r} keeps state from step to step: give it to DistributedOptimizer; "
            f"a single collective takes {', '.join(_COMPRESSORS)}, or a class with compress and decompress"
        )
    return _COMPRESSORS[method.name]
