"""What dad.keras needs of a framework, from torch."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

import torch

import dad.torch as collectives
from dad import compression as _methods
from dad._keras.settings import Settings
from dad.basics import Average, Max
from dad.compression import PerLayer
from dad.process_sets import ProcessSet
from dad.torch.compression import Compression, compressor
from dad.torch.ops import allreduce_async_, broadcast_async_, grouped_allreduce_async_, synchronize

__all__ = ["Compression", "broadcast_variables", "collectives", "is_active", "make_reducer", "resolve"]

_DENSE = ("none", "fp16", "bf16")


def resolve(compression: Any) -> Any:
    """A method that Keras has on torch, from what a user gave; None: what DAD_COMPRESSION says."""
    if hasattr(compression, "compress"):
        return compression
    method = _methods.from_environment() if compression is None else _methods.resolve(compression)
    for inner in method.methods.values() if isinstance(method, PerLayer) else [method]:
        if not hasattr(inner, "compress") and inner.name not in _DENSE:
            raise ValueError(
                f"compression method {inner.name!r} is not part of this version of dad for Keras, "
                f"which has {', '.join(_DENSE)}, and classes with compress and decompress"
            )
    return method


def is_active(process_set: ProcessSet) -> bool:
    """Whether there is anybody to talk to."""
    elastic = "1" in (os.environ.get("DAD_ELASTIC"), os.environ.get("HOROVOD_ELASTIC"))
    return process_set.included() and (process_set.size() > 1 or elastic)


class GradientReducer:
    """Reduces the gradients of Keras variables over the ranks, in place."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.compression = resolve(settings.compression)
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        return id(variable) in self._local

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        if not is_active(self.settings.process_set):
            return results
        names = self._names(variables)
        dense = []
        for i, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[i]):
                if self.settings.scale_local_gradients:
                    results[i] = gradient / self.settings.process_set.size()
            else:
                dense.append(i)
        started = [
            self._start(members, results, names, variables) for members in self._batches(dense, variables)
        ]
        for handle, finish in started:
            for i, gradient in finish(synchronize(handle)):
                results[i] = gradient
        return results

    def _names(self, variables: Sequence[Any]) -> list[str]:
        seen: collections.Counter[str] = collections.Counter()
        names = []
        for variable in variables:
            seen[variable.path] += 1
            number = seen[variable.path]
            names.append(f"{self.name}/{variable.path}" + (f".{number}" if number > 1 else ""))
        return names

    def _batches(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """What travels together."""
        groups = self.settings.groups
        if isinstance(groups, list | tuple):
            place = {id(variables[i]): i for i in dense}
            found = [[place.pop(id(v)) for v in group if id(v) in place] for group in groups]
            return [*(group for group in found if group), *([i] for i in sorted(place.values()))]
        if groups:
            count = min(groups, len(dense))
            ends = [len(dense) * k // count for k in range(count + 1)] if count else []
            return [dense[first:last] for first, last in zip(ends[:-1], ends[1:], strict=True)]
        return [[i] for i in dense]

    def _start(
        self, members: list[int], gradients: list[Any], names: list[str], variables: Sequence[Any]
    ) -> tuple[Any, Any]:
        settings = self.settings
        chosen = [compressor(self.compression, variables[i].path) for i in members]
        compressed = [c.compress(gradients[i]) for c, i in zip(chosen, members, strict=True)]
        # Keras' float8 layers keep statistics in "gradients" that replace the variable: all take the largest.
        is_statistic = getattr(variables[members[0]], "overwrite_with_gradient", False)
        factor = settings.gradient_predivide_factor if settings.op == Average and not is_statistic else 1.0
        options = {
            "op": Max if is_statistic else settings.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "process_set": settings.process_set,
        }
        tensors = [tensor for tensor, _ in compressed]
        if len(members) == 1:
            handle = allreduce_async_(tensors[0], name=names[members[0]], **options)
        else:
            handle = grouped_allreduce_async_(tensors, name=f"{names[members[0]]}.group", **options)

        def finish(reduced: Any) -> list[tuple[int, Any]]:
            reduced = [reduced] if len(members) == 1 else reduced
            return [
                (i, c.decompress(tensor, context))
                for i, c, tensor, (_, context) in zip(members, chosen, reduced, compressed, strict=True)
            ]

        return handle, finish


def make_reducer(settings: Settings, name: str) -> GradientReducer:
    return GradientReducer(settings, name)


def tensor(value: Any) -> Any:
    return torch.as_tensor(value)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    with torch.no_grad():
        handles = [
            broadcast_async_(variable.value.data, root_rank, f"broadcast_variables.{i}.{variable.path}")
            for i, variable in enumerate(variables)
        ]
        for handle in handles:
            synchronize(handle)
