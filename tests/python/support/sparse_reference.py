"""The sparse methods and qsgd in NumPy: one rank's step, and what all ranks make of their shares.

Straight from dad_core/exchange/method/sparse/sparse.h and qsgd.h; nothing here is fast. A rank has `Tensor`s, a weight and
perhaps a bias, whose increments of r and v come from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MOST = 7  # d of vgc, and m - 1 of multiples of tau, have three bits


@dataclass
class Settings:
    """As the method's text has them."""

    rule: str
    alpha: float = 1.0
    zeta: float = 0.999
    feedback: bool = False
    coding: str = "rice"
    tau: float = 4.0
    tau_absolute: float | None = None
    ratio: float = 0.01

    def text(self, layer: str) -> str:
        words = ["sparse", f"rule={self.rule}"]
        if self.has_variance:
            words += [f"alpha={self.alpha!r}", f"zeta={self.zeta!r}", "variance=row"]
        if self.has_threshold:
            words.append(f"tau={self.tau!r}")
            words += [f"tau_absolute={self.tau_absolute!r}"] if self.tau_absolute is not None else []
        if self.rule == "topk":
            words.append(f"ratio={self.ratio!r}")
        words += [f"coding={self.coding}", f"feedback={int(self.feedback)}", f"layer={layer}"]
        return ";".join(words)

    @property
    def has_variance(self) -> bool:
        return self.rule in ("vgc", "vgc_strom")

    @property
    def has_threshold(self) -> bool:
        return self.rule in ("strom", "vgc_strom")


@dataclass
class Share:
    """What one rank sends of one tensor."""

    index: np.ndarray
    values: np.ndarray
    num_bytes: int


@dataclass
class Tensor:
    """What one rank keeps of one tensor."""

    count: int
    dtype: type
    r: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    rms: float = 0.0  # the average that tau is made of; 0: none yet

    def __post_init__(self) -> None:
        self.r = np.zeros(self.count, self.dtype)
        self.v = np.zeros(self.count, self.dtype)

    def copy(self) -> Tensor:
        other = Tensor(self.count, self.dtype, rms=self.rms)
        other.r, other.v = self.r.copy(), self.v.copy()
        return other


def step(settings: Settings, tensor: Tensor, g: np.ndarray, s: np.ndarray) -> Share | None:
    """Adds the increments and takes out what is sent. None, and nothing is of use, if r is not finite."""
    with np.errstate(all="ignore"):
        add(tensor, g, s)
        if not np.isfinite(tensor.r).all():
            return None
        if settings.rule == "topk":
            return _top_k(settings, tensor)
        if settings.rule == "vgc":
            return _vgc(settings, tensor)
        return _strom(settings, tensor, g)


def add(tensor: Tensor, g: np.ndarray, s: np.ndarray) -> None:
    tensor.r = tensor.r + g
    tensor.v = np.fmin(tensor.v + s, np.finfo(tensor.dtype).max)


def _beats_variance(settings: Settings, tensor: Tensor) -> np.ndarray:
    r, v = tensor.r.astype(np.float64), tensor.v.astype(np.float64)
    return r * r > settings.alpha * v


def _vgc(settings: Settings, tensor: Tensor) -> Share:
    zeta = tensor.dtype(settings.zeta)
    passes = np.flatnonzero(_beats_variance(settings, tensor))
    # |r| = mantissa · 2^exponent, with a mantissa from 0.5 up to 1
    mantissa, exponent = np.frexp(np.abs(tensor.r[passes].astype(np.float64)))
    e_max = int(exponent.max()) - 1 if len(passes) else 0
    nearest = exponent - 1 + (mantissa >= 0.75)
    d = np.maximum(e_max - nearest, 0)
    goes = d <= MOST
    index, d = passes[goes], d[goes]
    values = np.ldexp(tensor.dtype(1), e_max - d) * np.where(np.signbit(tensor.r[index]), -1, 1)
    values = values.astype(tensor.dtype)
    stays = np.ones(tensor.count, bool)
    stays[index] = False
    tensor.v = np.where(stays, tensor.v * zeta, tensor.dtype(0))
    tensor.r[index] = tensor.r[index] - values if settings.feedback else 0
    return Share(index, values, 2 + coded_bytes(settings, tensor, index, 4))


def root_mean_square(g: np.ndarray) -> float:
    """Squares in double, in 8 lanes for each 2^16 elements; then the lanes; then these sums."""
    if not len(g):
        return 0.0
    total = 0.0
    for begin in range(0, len(g), 1 << 16):
        x = g[begin : begin + (1 << 16)].astype(np.float64)
        lanes = np.zeros(-(-len(x) // 8) * 8)
        lanes[: len(x)] = x * x
        lanes = np.add.accumulate(lanes.reshape(-1, 8), axis=0)[-1]
        total += float(np.add.accumulate(lanes)[-1])
    return math.sqrt(total / len(g))


def _strom(settings: Settings, tensor: Tensor, g: np.ndarray) -> Share | None:
    multiples = settings.tau_absolute is None
    if multiples:
        rms = root_mean_square(g)
        if not math.isfinite(rms):
            return None
        tensor.rms = rms if tensor.rms == 0 else 0.9 * tensor.rms + 0.1 * rms
        tau = np.float32(min(settings.tau * tensor.rms, float(np.finfo(np.float32).max)))
    else:
        tau = np.float32(settings.tau_absolute)
    r, v = tensor.r, tensor.v
    # Without a tau there has been no gradient.
    passes = np.abs(r) > (tensor.dtype(tau) if tau > 0 else np.inf)
    if settings.has_variance:
        passes &= _beats_variance(settings, tensor)
    index = np.flatnonzero(passes)
    size = np.abs(r[index].astype(np.float64))
    m = np.clip(np.floor(size / np.float64(tau)), 1, MOST + 1 if multiples else 1)
    sent = m.astype(tensor.dtype) * tensor.dtype(tau)
    values = np.where(np.signbit(r[index]), -sent, sent).astype(tensor.dtype)
    if settings.has_variance:
        wide = sent.astype(np.float64)
        left = v[index].astype(np.float64) - 2 * size * wide + wide * wide
        tensor.v = v * tensor.dtype(settings.zeta)
        tensor.v[index] = np.maximum(left, 0.0).astype(tensor.dtype)
    tensor.r = r.copy()
    tensor.r[index] = r[index] - values
    return Share(index, values, 4 + coded_bytes(settings, tensor, index, 4 if multiples else 1))


def _top_k(settings: Settings, tensor: Tensor) -> Share:
    k = min(math.ceil(settings.ratio * tensor.count), tensor.count)
    # Of equal ones those that come first; zeros never.
    largest = np.argsort(-np.abs(tensor.r), kind="stable")[:k]
    index = np.sort(largest[tensor.r[largest] != 0])
    values = tensor.r[index].copy()
    tensor.r[index] = 0
    if not settings.feedback:
        tensor.r[:] = 0
    return Share(index, values, coded_bytes(settings, tensor, index, 0) + values.nbytes)


def coded_bytes(settings: Settings, tensor: Tensor, index: np.ndarray, value_bits: int) -> int:
    """Of indices and codes as dad_core/codec/sparse_code.h has them; a tensor without elements has none."""
    if not tensor.count:
        return 0
    count = len(index)
    head = max(1, -(-count.bit_length() // 7))  # a varint
    if settings.coding == "word":
        return head + 4 * count
    if not count:
        return head
    gaps = np.diff(index, prepend=-1) - 1
    # Beyond the bits of the largest gap it takes more again.
    ks = range(min(32, 1 + int(gaps.max()).bit_length()))
    bits = min(int((gaps >> k).sum()) + (1 + k) * count for k in ks)
    return head + 1 + -(-count * value_bits // 8) + -(-bits // 8)


@dataclass
class Result:
    """Of one step, on all ranks."""

    outputs: list[np.ndarray]  # for each tensor
    fraction: float = 0.0  # of all ranks' elements, that were sent
    not_finite: int = -1  # the lowest rank that was not
    too_large: bool = False


class Ranks:
    """All ranks' states of one request, and its steps."""

    def __init__(self, settings: Settings, counts: Sequence[int], dtype: type, size: int) -> None:
        self.settings = settings
        self.counts = counts
        self.dtype = dtype
        self.size = size
        self.tensors = [[Tensor(count, dtype) for count in counts] for _ in range(size)]
        # For one peer; no share is smaller than a message.
        self.dense_bytes = max(64, 2 * sum(counts) * np.dtype(dtype).itemsize // size)

    def step(self, increments: list[list[tuple[np.ndarray, np.ndarray]] | None], average: bool) -> Result:
        """increments[rank][tensor]: of r and v. None: that rank has joined."""
        new = [[tensor.copy() for tensor in mine] for mine in self.tensors]
        shares = [
            more and [step(self.settings, t, g, s) for t, (g, s) in zip(mine, more, strict=True)]
            for mine, more in zip(new, increments, strict=True)
        ]
        bad = [rank for rank, mine in enumerate(shares) if mine is not None and None in mine]
        too_large = [
            mine is not None and None not in mine and 1 + sum(s.num_bytes for s in mine) > self.dense_bytes
            for mine in shares
        ]
        if bad:
            nothing = [np.full(n, np.nan, self.dtype) for n in self.counts]
            return Result(nothing, not_finite=bad[0], too_large=any(too_large))
        result = Result([np.zeros(n, self.dtype) for n in self.counts], too_large=any(too_large))
        sent = 0
        with np.errstate(all="ignore"):
            for rank, mine in enumerate(shares):
                if mine is None:
                    continue
                if too_large[rank]:
                    self._put_back(new[rank], self.tensors[rank], increments[rank])
                    continue
                for output, share in zip(result.outputs, mine, strict=True):
                    output[share.index] += share.values
                    sent += len(share.index)
            if average:
                result.outputs = [output / self.dtype(self.size) for output in result.outputs]
        self.tensors = new
        result.fraction = sent / max(1, sum(self.counts) * self.size)
        return result

    def _put_back(self, new: list[Tensor], old: list[Tensor], increments: list) -> None:
        """As if nothing had passed."""
        for tensor, was, (g, s) in zip(new, old, increments, strict=True):
            tensor.r, tensor.v = was.r, was.v
            add(tensor, g, s)
            tensor.v = tensor.v * self.dtype(self.settings.zeta)
            if self.settings.rule == "topk" and not self.settings.feedback:
                tensor.r = np.zeros_like(tensor.r)


def mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def hash_of(name: str) -> int:
    """dad_core/util/hash.h: FNV-1a of the bytes, then of their number."""
    value = 0xCBF29CE484222325
    for byte in [*name.encode(), *len(name.encode()).to_bytes(8, "little")]:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def uniform(seed: int, name: str, step: int, rank: int, count: int) -> np.ndarray:
    """In [0, 1), for each element."""
    key = mix((mix((mix(seed ^ hash_of(name)) + step) % 2**64) + rank) % 2**64)
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def qsgd(g: np.ndarray, bits: int, u: np.ndarray, bucket: int = 512) -> np.ndarray:
    """What a rank's gradient is taken for."""
    levels = 2 ** (bits - 1) - 1
    out = np.zeros_like(g)
    for begin in range(0, len(g), bucket):
        x = g[begin : begin + bucket].astype(np.float64)
        largest = np.abs(x).max()
        scale = np.float32(largest)
        if float(scale) < largest:
            scale = np.nextafter(scale, np.float32(np.inf))
        s = float(scale)
        if s == 0:
            continue
        part = u[begin : begin + bucket]
        if bits == 1:
            q = np.clip(np.floor((x / s + 1) / 2 + part), 0, 1)
            taken = s * (2 * q - 1)
        else:
            q = np.clip(np.floor(levels * x / s + part), -levels, levels)
            taken = s * q / levels
        out[begin : begin + bucket] = taken.astype(g.dtype)
    return out
