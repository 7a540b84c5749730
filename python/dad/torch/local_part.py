"""A fragment of a model in torch: its weights, and how their changes travel between ranks.

The changes go the way of gradients, by a GradientSync of their own. Its parameters are not those of the
model but stand-ins that hold the common weights of the round; the change of a weight is the gradient of its
stand-in. So methods, plans, residuals, checkpoints and comparisons of replicas work on rounds as they do on
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dad._lib import _core
from dad.basics import Average, Sum
from dad.methods.planned import looks_at_variance
from dad.planning.table import plan_rows
from dad.process_sets import ProcessSet
from dad.torch.checkpoint import as_arrays
from dad.torch.gradient_sync import GradientSync
from dad.torch.handles import synchronize
from dad.torch.local_statistics import Statistics
from dad.torch.move_ops import broadcast_async
from dad.torch.naming import Named
from dad.torch.ops import allreduce_async

Tensors = list[torch.Tensor]


class TorchPart:
    """See dad.local_steps.rounds.Part. statistics: what is averaged beside the weights."""

    def __init__(
        self, named: Named, compression: Any, process_set: ProcessSet, statistics: Statistics | None
    ) -> None:
        self.sync = GradientSync(
            compression=compression,
            op=Average,
            passes=1,
            predivide=1.0,
            sparse_as_dense=True,
            process_set=process_set,
            weighted=False,
        )
        self.sync.loss_scale = lambda: 1.0  # no loss has to do with the changes
        self.name = f"torch.{self.sync.stream}"
        self._process_set = process_set
        self._params = [param for _, param in named]
        self._names = [name for name, _ in named]
        self._stand_ins = [_stand_in(param) for param in self._params]
        self._statistics = statistics
        self._samples: int | None = None  # the handle of their sum
        self._is_sent = False
        self._last: dict[int, torch.Tensor] = {}  # weights after the last step, where steps are samples
        self._squares: dict[int, torch.Tensor] = {}
        self.sync.add(list(zip(self._names, self._stand_ins, strict=True)), [])

    @torch.no_grad()
    def weights(self) -> Tensors:
        return [param.detach() for param in self._params]

    @torch.no_grad()
    def assign(self, values: Tensors) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)

    @torch.no_grad()
    def hold(self, values: Tensors) -> Tensors:
        for stand_in, value in zip(self._stand_ins, values, strict=True):
            stand_in.copy_(value)
        return [stand_in.detach() for stand_in in self._stand_ins]

    def copy(self, values: Tensors) -> Tensors:
        return [value.detach().clone() for value in values]

    @torch.no_grad()
    def note_step(self) -> None:
        """A step is over. Methods that look at the variance of a change take those of the steps as its
        samples."""
        for i, param in enumerate(self._params):
            if not looks_at_variance(self.sync.slots[self._stand_ins[i]].method):
                continue
            before = self._last.get(i, self._stand_ins[i])
            wide = torch.float64 if param.dtype == torch.float64 else torch.float32
            square = (before - param).to(wide).square()
            self._squares[i] = self._squares[i].add_(square) if i in self._squares else square
            self._last[i] = param.detach().clone()

    @torch.no_grad()
    def send(self, changes: Tensors) -> None:
        if self._is_sent:  # by an exchange that has failed
            self.sync.reset()
        for i, (param, stand_in, change) in enumerate(
            zip(self._params, self._stand_ins, changes, strict=True)
        ):
            stand_in.requires_grad_(param.requires_grad)
            stand_in.grad = change.contiguous() if param.requires_grad else None
            self.sync.slots[stand_in].squares = self._squares.get(i)
        self._squares, self._last = {}, {}
        self._is_sent = True
        self.sync.start()

    @torch.no_grad()
    def receive(self) -> Tensors:
        self._is_sent = False
        self.sync.synchronize()
        means = []
        for stand_in in self._stand_ins:
            mean, stand_in.grad = stand_in.grad, None
            means.append(torch.zeros_like(stand_in) if mean is None else mean)
        return means

    def send_samples(self, samples: float) -> None:
        """What is in flight from an exchange that has failed is left to itself."""
        if self._statistics is not None:
            self._statistics.send(samples)
        self._samples = allreduce_async(
            torch.tensor([samples], dtype=torch.float64),
            name=f"local_steps.samples.{self.sync.stream}",
            op=Sum,
            process_set=self._process_set,
        )

    def receive_samples(self) -> float:
        total = float(synchronize(self._samples))
        if self._statistics is not None:
            self._statistics.receive(total)
        return total

    def broadcast(self, values: Tensors, root: int) -> Tensors:
        root_rank = self._process_set.ranks[root]
        handles = [
            broadcast_async(value, root_rank, f"local_steps.{name}", self._process_set)
            for name, value in zip(self._names, values, strict=True)
        ]
        return [synchronize(handle) for handle in handles]

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array)

    def doubt(self) -> None:
        self.sync.doubt()

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it in an exchange, and why."""
        sync = self.sync
        choices = sync.plan.choices if sync.plan is not None else []
        # Before the first exchange, what is measured of these names is another optimizer's.
        measured = _core.stats()["tensors"] if sync.steps > 0 else {}
        return plan_rows(
            sync.slots.values(), choices, sync.circle.size, "the change of the weights", measured
        )

    def save(self) -> dict[str, Any]:
        return as_arrays(self.sync.save())

    def load(self, saved: dict[str, Any]) -> None:
        self.sync.load(saved)


def _stand_in(param: torch.Tensor) -> torch.nn.Parameter:
    memory = torch.zeros_like(param, requires_grad=False, memory_format=torch.contiguous_format)
    return torch.nn.Parameter(memory, requires_grad=param.requires_grad)


def split_named(named: Named, places: Sequence[Sequence[int]]) -> list[Named]:
    return [[named[i] for i in part] for part in places]
