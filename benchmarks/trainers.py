"""Ways to train one model on all ranks: dad with any method, DDP, DDP with torch's PowerSGD hook, alone.

A way is named by a word: `local`, `ddp`, `powersgd` (or `powersgd:8` for rank 8), or a compression of dad
as `dadrun --compression` takes it (`none`, `rank_dad:rank=4`, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from contest import bytes_received
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dad.torch as hvd

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

POWERSGD_RANK = 4
# The hook wants dense steps first; with error feedback and a warm start at least so many.
POWERSGD_DENSE_STEPS = 2
# Over gloo the hook deadlocks with several buckets: their collectives mix.
_ONE_BUCKET_MB = 1 << 14


@dataclass
class Trainer:
    model: nn.Module  # to be called
    optimizer: Any
    is_dad: bool = False
    powersgd: powerSGD_hook.PowerSGDState | None = None

    def bytes_sent(self) -> float:
        """By this rank so far: dad's own count, else what came in over TCP, which on the mean of the ranks is
        the same. Only differences mean something."""
        return hvd.stats()["wire_bytes_sent"] if self.is_dad else bytes_received()


def is_peer(way: str) -> bool:
    return way.partition(":")[0] in ("local", "ddp", "powersgd")


def make_trainer(way: str, model: nn.Module, make_optimizer: MakeOptimizer, prefix: str = "") -> Trainer:
    """The model has the same weights on every rank already: on a slow link sending them takes long.
    `prefix` tells the tensors of several models in one process apart."""
    kind, _, option = way.partition(":")
    if kind == "local":
        return Trainer(model, make_optimizer(list(model.parameters())))
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, init_sync=False)
        return Trainer(wrapped, make_optimizer(list(wrapped.parameters())))
    if kind == "powersgd":
        wrapped = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=_ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=int(option or POWERSGD_RANK),
            start_powerSGD_iter=POWERSGD_DENSE_STEPS,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Trainer(wrapped, make_optimizer(list(wrapped.parameters())), powersgd=state)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(list(model.parameters())),
        named_parameters=[(f"{prefix}{name}", param) for name, param in model.named_parameters()],
        compression=way,
    )
    return Trainer(model, optimizer, is_dad=True)
