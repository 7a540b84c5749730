"""Compression for TensorFlow: the casts, with Horovod's compress and decompress."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dad.methods import compression as _methods
from dad.methods.compression import PerLayer


class NoneCompressor(_methods.NoCompression):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.DType]:
    """Integers stay as they are."""
    return (tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor), tensor.dtype


class FP16Compressor(_methods.Fp16):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return _cast(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, ctx)


class BF16Compressor(_methods.Bf16):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return _cast(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, ctx)


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


def resolve(compression: Any) -> Any:
    """A method, from what a user gave; None: what DAD_COMPRESSION says."""
    if hasattr(compression, "compress"):
        return compression
    return _methods.from_environment() if compression is None else _methods.resolve(compression)


def compressor(compression: Any, tensor_name: str = "") -> Any:
    """What compresses a tensor of that name: an object with compress and decompress."""
    method = resolve(compression)
    if isinstance(method, PerLayer):
        method = method.method_for(tensor_name)
    if hasattr(method, "compress"):
        return method
    if method.name not in _COMPRESSORS:
        raise ValueError(
            f"compression {method.name!r} keeps state from step to step: give it to DistributedOptimizer or "
            f"DistributedGradientTape; a single collective takes {', '.join(_COMPRESSORS)}, or a class with "
            "compress and decompress"
        )
    return _COMPRESSORS[method.name]
