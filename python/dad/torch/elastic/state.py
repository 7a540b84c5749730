"""TorchState: models, optimizers and what belongs to them."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import torch

from dad.elastic.handlers import SamplerHandler, StateDictHandler, StateHandler
from dad.elastic.residuals import Saved
from dad.elastic.state import HandledState
from dad.process_sets import global_process_set
from dad.torch.checkpoint import as_arrays, as_tensors
from dad.torch.elastic.sampler import ElasticSampler
from dad.torch.local_optimizer import LocalOptimizer
from dad.torch.optimizer import GradientOptimizer


class _TensorsHandler(StateDictHandler):
    """Tensors travel through the memory of the host: the devices of ranks have other numbers."""

    def encode(self, snapshot: Any) -> bytes:
        file = io.BytesIO()
        torch.save(snapshot, file)
        return file.getvalue()

    def decode(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class ModelStateHandler(_TensorsHandler):
    """Handles a torch.nn.Module: its parameters and buffers."""


class OptimizerStateHandler(_TensorsHandler):
    """Handles a torch.optim.Optimizer. What it keeps for lossy methods is each rank's own; with local steps
    it begins a round."""

    def capture(self) -> Any:
        if isinstance(self.value, LocalOptimizer):
            return copy.deepcopy(self.value.shared_state_dict())
        state = self._base().state_dict()
        return copy.deepcopy({key: value for key, value in state.items() if key != "dad"})

    def apply(self, snapshot: Any) -> None:
        if isinstance(self.value, GradientOptimizer):
            self.value._dad.reset()  # a step that was broken off
            self.value._dad_synchronized = None
        self._base().load_state_dict(copy.deepcopy(snapshot))

    @property
    def can_carry(self) -> bool:
        optimizer = self.value
        if not isinstance(optimizer, GradientOptimizer) or not optimizer._dad_active:
            return False
        return optimizer._dad.has_methods() and optimizer._dad.process_set is global_process_set

    def kept(self) -> Saved | None:
        return as_arrays(self.value._dad.save()) if self.can_carry else None

    def carry(self, saved: Saved) -> None:
        self.value._dad.load(as_tensors(saved))

    def _base(self) -> Any:
        """The user's optimizer, without what dad has put in front of it."""
        optimizer = self.value
        return super(GradientOptimizer, optimizer) if isinstance(optimizer, GradientOptimizer) else optimizer


_handler_registry: list[tuple[type, type]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> list[tuple[type, type]]:
    """Pairs of a type and the StateHandler of its values; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type]]) -> None:
    """Replaces the pairs of get_handler_registry()."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            made: StateHandler = handler(value)
            return made
    return None


class TorchState(HandledState):
    """The state of a training in PyTorch.

    Args:
        model, optimizer: whose state_dict() is saved, restored and synchronized.
        **kwargs: further attributes. Models, optimizers, an ElasticSampler, learning-rate schedules and
            GradScalers are handled like these; others are objects that are copied and travel pickled.

    Example::

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        found = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value))}
        super().__init__(found, **{name: value for name, value in kwargs.items() if name not in found})

    def _as_array(self, leaf: Any) -> np.ndarray | None:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return None
        dense = leaf.detach().cpu().contiguous()
        return dense.view(torch.uint8).numpy() if dense.dim() else dense.reshape(1).view(torch.uint8).numpy()
