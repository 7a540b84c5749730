"""What a rank keeps of gradients between steps, by kind of exchange: how its share of what is still to be
applied (states.py) follows from the core's tensors, and the reverse."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dad.planning.circle import Place
    from dad.planning.types import Choice

Tensors = dict[str, np.ndarray]
Shape = tuple[int, ...]


class Kept(ABC):
    """The residuals of one kind of exchange."""

    def keeps_gradients(self, choice: Choice) -> bool:
        """Whether unsent parts wait for a later step."""
        return choice.option("feedback") not in ("none", "0")

    @abstractmethod
    def shares(self, tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
        """This rank's share of each tensor of a request, from the core's state."""

    @abstractmethod
    def state(self, kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
        """The core's state of a request that still has to apply these shares."""


class Int8Residuals(Kept):
    """E_w of the whole tensor, and E_o of the piece that this rank owns."""

    def shares(self, tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
        (weight, _), *_ = choice.own()
        total = np.zeros(math.prod(shapes[weight]), _dtype(tensors))
        if "rank_residual" in tensors:
            total += tensors["rank_residual"] / _average_over(place)
        if "owner_residual" in tensors:
            begin, end = int8_piece(total.size, int(choice.option("bucket")), place.size, place.rank)
            total[begin:end] += tensors["owner_residual"]
        return {weight: total.reshape(shapes[weight])}

    def state(self, kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
        (weight, _), *_ = choice.own()
        return {"rank_residual": (_average_over(place) * kept[weight]).astype(dtype).reshape(-1)}


class ChunkResiduals(Kept):
    """E_w of the whole tensor, and E_o of the piece that this rank owns, with its beginning."""

    def shares(self, tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
        (weight, _), *_ = choice.own()
        total = np.zeros(math.prod(shapes[weight]), _dtype(tensors))
        if "rank_residual" in tensors:
            total += tensors["rank_residual"] / _average_over(place)
        if "owner_residual" in tensors:
            begin = int(tensors["owner_begin"][0])
            total[begin : begin + tensors["owner_residual"].size] += tensors["owner_residual"]
        return {weight: total.reshape(shapes[weight])}

    def state(self, kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
        (weight, _), *_ = choice.own()
        return {"rank_residual": (_average_over(place) * kept[weight]).astype(dtype).reshape(-1)}


class LowRankResiduals(Kept):
    """E_w and E_o of a layer, dense or as rows, with what was sent and is still to be subtracted."""

    def shares(self, tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
        (weight, bias), *_ = choice.own()
        shape = shapes[weight]
        rows = shape[0]
        columns = math.prod(shape[1:]) + (bias is not None)
        mine = _low_rank_residual(tensors, "rank_", rows, columns, bias is not None)
        owned = _low_rank_residual(tensors, "owner_", rows, columns, bias is not None)
        total = mine / place.size + owned if place.average else mine + place.size * owned
        if bias is None:
            return {weight: total.reshape(shape)}
        return {weight: total[:, :-1].reshape(shape), bias: total[:, -1].reshape(shapes[bias])}

    def state(self, kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
        flat = _flat_layer(kept, choice, place, dtype)
        if choice.option("feedback") != "rows":
            return {"rank_residual": flat}
        (_, bias), *_ = choice.own()
        rows, columns = _layer_shape(choice)
        matrix = flat[: rows * columns].reshape(rows, columns)
        if bias is not None:
            matrix = np.concatenate([matrix, flat[rows * columns :].reshape(-1, 1)], 1)
        return _as_rows(matrix)


class SparseResiduals(Kept):
    """r in place of E_w; the variance rules also have v. What is carried over counts as one sample, v = r²:
    it is not sent before later gradients agree with it."""

    def keeps_gradients(self, choice: Choice) -> bool:
        # With feedback=0 vgc loses what it rounds off, but not what waits.
        return choice.option("rule") != "topk" or super().keeps_gradients(choice)

    def shares(self, tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
        if "residual" not in tensors:
            return {}
        (weight, bias), *_ = choice.own()
        flat = tensors["residual"] / _average_over(place)
        names = [weight] if bias is None else [weight, bias]
        ends = np.cumsum([math.prod(shapes[name]) for name in names])
        parts = np.split(flat, ends[:-1])
        return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}

    def state(self, kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
        flat = _flat_layer(kept, choice, place, dtype)
        if choice.option("rule") not in ("vgc", "vgc_strom"):
            return {"residual": flat}
        return {"residual": flat, "variance": np.minimum(flat * flat, np.finfo(dtype).max)}


def _average_over(place: Place) -> int:
    return place.size if place.average else 1


def _layer_shape(choice: Choice) -> tuple[int, int]:
    rows, _, columns = choice.option("layer").partition(":")[0].partition("x")
    return int(rows), int(columns)


def _flat_layer(kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> np.ndarray:
    """E_w of a layer in the core's form: the weight's elements, then the bias's."""
    (weight, bias), *_ = choice.own()
    rows, columns = _layer_shape(choice)
    counts = {weight: rows * columns} if bias is None else {weight: rows * columns, bias: rows}
    parts = [
        _average_over(place) * kept[name].astype(dtype).reshape(-1)
        if name in kept
        else np.zeros(count, dtype)
        for name, count in counts.items()
    ]
    return np.concatenate(parts)


def int8_piece(count: int, bucket: int, size: int, rank: int) -> tuple[int, int]:
    """The elements that a rank owns: whole buckets, as dad_core/exchange/method/int8/int8.cc cuts them."""
    buckets = -(-count // bucket)
    begin, end = (min(count, buckets * p // size * bucket) for p in (rank, rank + 1))
    return begin, end


def _low_rank_residual(tensors: Tensors, side: str, rows: int, columns: int, bias: bool) -> np.ndarray:
    """E as a matrix with the bias as its last column."""
    total = np.zeros((rows, columns), _dtype(tensors))
    if side + "residual" in tensors:
        flat = tensors[side + "residual"]
        total[:, : columns - bias] += flat[: rows * (columns - bias)].reshape(rows, columns - bias)
        if bias:
            total[:, -1] += flat[rows * (columns - 1) :]
    if side + "pending_d" in tensors:  # it was sent, and is subtracted with the next step's gradient
        total -= tensors[side + "pending_d"].T @ tensors[side + "pending_a"]
    if side + "rows_d" in tensors:
        total += tensors[side + "rows_d"].T @ tensors[side + "rows_a"]
    return total


def _as_rows(matrix: np.ndarray) -> Tensors:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    count = int((s > 0).sum())
    if count == 0:
        return {}
    return {
        "rank_rows_d": np.ascontiguousarray((u[:, :count] * s[:count]).T),
        "rank_rows_a": np.ascontiguousarray(v[:count]),
    }


def _dtype(tensors: Tensors) -> np.dtype:
    return next((tensor.dtype for tensor in tensors.values()), np.dtype(np.float32))
