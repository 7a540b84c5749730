"""DistributedOptimizer(local_steps=…): ranks take steps by themselves and exchange what has come of them.

What is done when is in dad/local_steps, and how changes travel in local_part.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dad.basics import num_inits, rank
from dad.local_steps.fragments import split
from dad.local_steps.joining import before_join
from dad.local_steps.methods import for_changes
from dad.local_steps.rounds import Rounds
from dad.local_steps.saved import pack, unpack
from dad.local_steps.settings import LocalSteps
from dad.log import log
from dad.planning.text import PlanPrinter
from dad.process_sets import ProcessSet
from dad.torch import ops
from dad.torch.batch_weight import BatchCounter
from dad.torch.checkpoint import as_tensors
from dad.torch.compression import Compression
from dad.torch.local_part import TorchPart, split_named
from dad.torch.local_state import from_tensor, to_tensor
from dad.torch.local_statistics import Statistics
from dad.torch.naming import Named
from dad.torch.replicas import hyperparameters

_optimizers: weakref.WeakSet[LocalOptimizer] = weakref.WeakSet()


class _Exchange:
    """The rounds of an optimizer, and the parts of its model."""

    def __init__(self, settings: LocalSteps, named: Named, compression: Any, process_set: ProcessSet) -> None:
        self.settings = settings
        self.process_set = process_set
        self._params = {param for _, param in named}
        self._hooks: list[Any] = []
        places = split([param.numel() for _, param in named], settings.fragments)
        self.parts = []
        self.statistics: Statistics | None = None
        for i, members in enumerate(split_named(named, places)):
            part = TorchPart(members, compression, process_set, None)
            if i == 0:
                name = f"local_steps.statistics.{part.sync.stream}"
                part._statistics = self.statistics = Statistics(name, process_set)
            self.parts.append(part)
        self.name = self.parts[0].name
        self.rounds = Rounds(settings, self.parts, self.name, process_set, lambda: (num_inits(), ops.joins()))
        me = weakref.ref(self)

        def saw(samples: int, module: torch.nn.Module) -> None:
            exchange = me()
            if exchange is not None:
                exchange.saw(samples, module)

        self._counter = BatchCounter(self._params, saw)
        self._said_samples = False

        def came(param: torch.Tensor) -> None:
            exchange = me()
            if exchange is not None:
                exchange._counter.next_batch()

        for param in self._params:
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(came))

    def saw(self, samples: int, module: torch.nn.Module) -> None:
        self.statistics.find(module)
        if not self._said_samples:
            self.rounds.saw(samples)

    def set_batch_size(self, samples: int) -> None:
        if samples < 0:
            raise ValueError(f"set_batch_size({samples}): a batch has 0 rows or more")
        self._said_samples = True
        self.rounds.saw(samples)

    def step_done(self) -> bool:
        for part in self.parts:
            part.note_step()
        self._counter.next_batch()
        self._said_samples = False
        return self.rounds.step_done()

    def begin_anew(self) -> None:
        """A round begins with the weights as they are."""
        self.rounds.load(None, None)
        self.doubt()

    def doubt(self) -> None:
        """Something may have happened on other ranks that this one does not know of."""
        self.rounds.doubt()
        for part in self.parts:
            part.doubt()

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()


class LocalOptimizer:
    """What is put in front of the user's optimizer class."""

    param_groups: list[dict[str, Any]]
    _parameter_names: dict[torch.Tensor, str]

    def _dad_init(
        self, settings: LocalSteps, named: Named | None, compression: Any, process_set: ProcessSet
    ) -> None:
        """named: None where this process is alone, or outside of the process set."""
        self._dad: _Exchange | None = None
        self._dad_plan_printer = PlanPrinter()
        if named is None:
            return
        compression = for_changes(compression, Compression.none, says=rank() == 0)
        self._dad = _Exchange(settings, named, compression, process_set)
        me = weakref.ref(self)
        for part in self._dad.parts:
            part.sync.hyperparameters = lambda: hyperparameters(me())
        _optimizers.add(self)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """A step of this rank alone; at the end of a round, or of a fragment's part of one, the exchange."""
        arguments = () if closure is None else (closure,)
        if self._dad is None:
            return super().step(*arguments, **kwargs)  # type: ignore[misc]
        self._dad.rounds.begin_step()
        loss = super().step(*arguments, **kwargs)  # type: ignore[misc]
        self._dad_step_done()
        return loss

    def _dad_step_done(self) -> None:
        syncs = [part.sync for part in self._dad.parts]
        is_planned = self._dad.step_done() and all(sync.is_planned() for sync in syncs)
        if is_planned and rank() == 0:
            self._dad_plan_printer.step_done(self.plan, sum(sync.waited_seconds for sync in syncs))

    def _dad_step_skipped(self) -> None:
        """GradScaler found infinities on this rank. Its step counts, or it would come to the end of the round
        later than the others."""
        if self._dad is not None:
            self._dad.rounds.begin_step()
            self._dad_step_done()

    def unscaled(self, found_inf: dict[Any, torch.Tensor]) -> None:
        """By GradScaler. Optimizers that unscale by themselves get their step() called all the same."""
        skips = any(float(found) > 0 for found in found_inf.values())
        if skips and not getattr(self, "_step_supports_amp_scaling", False):
            self._dad_step_skipped()

    def end_round(self) -> None:
        """Exchanges what ranks have not exchanged yet, whatever is left of the round: afterwards all of them
        have the same weights. Call it on all ranks before the model is evaluated or saved on its own."""
        if self._dad is not None:
            self._dad.rounds.end_round()

    # Horovod's methods: gradients stay on this rank, so there is nothing to wait for

    def synchronize(self) -> None:
        """Returns at once: .grad is this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up locally whatever the number; step() says when they are used."""

    def set_batch_size(self, rows: int) -> None:
        """How many samples this step has, where that is not the leading dimension of what goes into the
        model: before step()."""
        if self._dad is not None:
            self._dad.set_batch_size(rows)

    # torch.optim.Optimizer's methods

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_dad" in self.__dict__ and self._dad is not None:
            raise ValueError(
                "add_param_group() does not work with local steps: make the DistributedOptimizer with all "
                "parameters; those that are to be trained later may be frozen (requires_grad=False)"
            )
        super().add_param_group(param_group)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's, and under "dad" where this rank is in the round and what it keeps: save it on
        every rank, or use hvd.save()."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._dad is not None:
            common, own = self._dad.rounds.save()
            state["dad"] = {
                "rank": self._dad.process_set.rank(),
                "size": self._dad.process_set.size(),
                "common": to_tensor(common),
                "own": to_tensor(own),
                "fragments": as_tensors(pack([part.save() for part in self._dad.parts])),
            }
        return state

    def shared_state_dict(self) -> dict[str, Any]:
        """For elastic jobs: without what is this rank's own. Whoever loads it begins with the weights that
        all ranks had when the round began."""
        state = super().state_dict()  # type: ignore[misc]
        if self._dad is not None:
            common, _ = self._dad.rounds.save()
            state["dad"] = {"rank": -1, "common": to_tensor(common)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Takes this rank's own state, saved by the rank of the same number."""
        saved = state_dict.get("dad")
        if saved is not None and "inner" in saved:  # by hvd.save(), which has the other ranks' as well
            state_dict = {**state_dict, "state": from_tensor(saved["inner"])}
        super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        if self._dad is None:
            return
        if saved is None or "common" not in saved:
            self._dad.begin_anew()
            return
        common = from_tensor(saved["common"])
        if len(common["starts"]) != len(self._dad.parts):
            log.warning(
                "the checkpoint has %d fragments and this optimizer %d: a new round begins, without the "
                "outer momentum and what methods had kept",
                len(common["starts"]),
                len(self._dad.parts),
            )
            self._dad.begin_anew()
            return
        mine = saved["rank"] >= 0 and saved["rank"] == self._dad.process_set.rank()
        own = from_tensor(saved["own"]) if mine and "own" in saved else None
        self._dad.rounds.load(common, own)
        if "fragments" in saved:
            for part, one in zip(self._dad.parts, unpack(saved["fragments"]), strict=True):
                part.load(one)
        self._dad.doubt()

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it in a round, and why."""
        if self._dad is None:
            return []
        rows = [row for part in self._dad.parts for row in part.plan()]
        length = self._dad.settings.length
        return [{**row, "every": length, "why": f"{row['why']}; once in {length}"} for row in rows]


def end_rounds_before_join() -> None:
    """A rank that joins sends what it has not sent: the others wait for nothing else of it."""
    for optimizer in sorted(_optimizers, key=lambda one: one._dad.name):
        optimizer._dad.rounds.end_round(alone=True)


before_join(end_rounds_before_join)
