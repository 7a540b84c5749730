"""DistributedOptimizer(op=Adasum): every rank takes its own step, and the steps are combined.

As in Horovod, what is reduced is not the gradient but the change that the user's optimizer makes of
it: parameters = start + Adasum of the ranks' changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dad._lib import _core
from dad.basics import Adasum, Max
from dad.planning.agreement import Agreement, Description, common_options
from dad.planning.ranks import RanksOf
from dad.planning.table import plan_rows
from dad.process_sets import ProcessSet
from dad.state.replicas import Replica, ReplicaCheck
from dad.torch.compression import compressor
from dad.torch.handles import synchronize
from dad.torch.naming import Named, describe, new_names
from dad.torch.ops import allreduce_, allreduce_async_
from dad.torch.replicas import CURES, dense, hyperparameters
from dad.torch.slots import Slot


class DeltaOptimizer:
    """What is put in front of the user's optimizer class."""

    param_groups: list[dict[str, Any]]

    def _dad_init(self, named: Named, compression: Any, process_set: ProcessSet) -> None:
        self._dad_named = named
        self._dad_compression = compression
        self._dad_process_set = process_set
        ranks = RanksOf(process_set)
        self._dad_agreement = Agreement(ranks, "torch")
        self._dad_replicas = ReplicaCheck(ranks, CURES)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if not self._dad_process_set.included():
            return super().step(*(() if closure is None else (closure,)), **kwargs)  # type: ignore[misc]
        if self._dad_agreement.is_due():
            facts = self._dad_agreement.settle(self._dad_describe(), self._dad_replicas.facts())
            self._dad_replicas.agree(facts)
        exchange = self._dad_agreement.name
        self._dad_replicas.begin(
            exchange,
            lambda: Replica.of(dense(self._dad_named), hyperparameters(self)),
        )
        trained = [(name, param) for name, param in self._dad_named if param.requires_grad]
        starts = [param.detach().clone() for _, param in trained]
        loss = super().step(*(() if closure is None else (closure,)), **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            handles = []
            for (name, param), start in zip(trained, starts, strict=True):
                chosen = compressor(self._dad_compression, name)
                change, context = chosen.compress(param.detach() - start)
                handle = allreduce_async_(change, name=name, op=Adasum, process_set=self._dad_process_set)
                handles.append((handle, chosen, context))
            for (_, param), start, (handle, chosen, context) in zip(trained, starts, handles, strict=True):
                param.copy_(start.add_(chosen.decompress(synchronize(handle), context)))
        self._dad_replicas.end(exchange)
        return loss

    def _dad_describe(self) -> Description:
        options = common_options(compression=self._dad_compression, op=Adasum)
        return Description(options, [(name, describe(param)) for name, param in self._dad_named])

    def agree_on_infinity(self, found_inf: dict[Any, torch.Tensor]) -> None:
        """For GradScaler, which looks at this rank's gradients: all ranks skip the step, or none."""
        if self._dad_process_set.included():
            for found in found_inf.values():
                allreduce_(found, op=Max, name="adasum.found_inf", process_set=self._dad_process_set)

    def synchronize(self) -> None:
        """Nothing is in flight before step()."""

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("op=Adasum reduces inside step(), which cannot be left out")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up locally whatever the number; step() says when they are used."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_dad_named" in self.__dict__:
            number = len(self.param_groups) - 1
            self._dad_named += new_names(self.param_groups[-1]["params"], None, 0, number)
            self._dad_agreement.doubt()

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it, and why."""
        slots = [
            Slot(param, name, compressor(self._dad_compression, name), 1) for name, param in self._dad_named
        ]
        size = len(self._dad_process_set.ranks)
        return plan_rows(slots, [], size, "Adasum combines dense changes", _core.stats()["tensors"])
