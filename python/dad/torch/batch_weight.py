"""weighted=True: a rank counts by the samples that its loss is the mean of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

import torch

from dad.basics import Sum
from dad.process_sets import ProcessSet
from dad.torch._load import _torch
from dad.torch.handles import synchronize
from dad.torch.ops import allreduce_async


class BatchCounter:
    """Tells how many samples go into a model: the leading dimension of the first tensor that goes into a
    module with one of these parameters, in each backward pass."""

    def __init__(self, params: Container[torch.Tensor], saw: Callable[[int, torch.nn.Module], None]) -> None:
        self._params = params
        self._saw = saw
        self._looks = True  # the batch that comes next has not been counted
        me = weakref.ref(self)

        def look(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            counter = me()
            if counter is not None and counter._looks and torch.is_grad_enabled():
                counter._look(module, args)

        hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
        weakref.finalize(self, hook.remove)

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        tensor = next((a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0), None)
        if tensor is not None and any(param in self._params for param in module.parameters()):
            self._looks = False
            self._saw(tensor.shape[0], module)

    def next_batch(self) -> None:
        """Another forward pass brings another batch."""
        self._looks = True


class BatchWeight:
    """A rank's samples over those of all, one number per step: with it the result is the mean over all
    samples. They are counted (BatchCounter), or what set_batch_size() said."""

    def __init__(self, process_set: ProcessSet, stream: int, params: Container[torch.Tensor]) -> None:
        self._process_set = process_set
        self._name = f"batch_size.{stream}"
        self._samples: int | None = None  # as told to the other ranks
        self._handle: int | None = None
        self._all_samples = 0
        self._seen = 0
        me = weakref.ref(self)

        def saw(samples: int, module: torch.nn.Module) -> None:
            weight = me()
            if weight is not None:
                weight._seen += samples

        self._counter = BatchCounter(params, saw)

    def gradient_came(self) -> None:
        """Another forward pass in this step brings another batch."""
        self._counter.next_batch()

    def set_samples(self, samples: int) -> None:
        if samples < 0:
            raise ValueError(f"set_batch_size({samples}): a batch has 0 rows or more")
        if self._samples is not None:
            raise ValueError("set_batch_size() was called twice in one step")
        self._samples = samples
        # Travels while forward and backward run.
        self._handle = allreduce_async(
            torch.tensor([samples]), name=self._name, op=Sum, process_set=self._process_set
        )

    def samples(self) -> int:
        """The samples of this rank; a rank that ran nothing has none."""
        if self._samples is None:
            self.set_samples(self._seen)
        return self._samples or 0

    def all_samples(self) -> int:
        """Waits for the other ranks the first time."""
        self.samples()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._all_samples = max(1, int(synchronize(handle)))
        return self._all_samples

    def share(self) -> float:
        """The share of this rank in the samples of all. It waits for the other ranks the first time."""
        return self.samples() / self.all_samples()

    def end_step(self) -> None:
        if self._handle is not None:
            _torch.forget(self._handle)
        self._samples = self._handle = None
        self._seen = 0
        self._counter.next_batch()
