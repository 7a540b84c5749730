"""What is called when a parameter gets a gradient, and when somebody uses it.

None of these keeps the optimizer alive: a parameter outlives optimizers that were made for it.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from dad.torch._load import _torch

if TYPE_CHECKING:
    from dad.torch.gradient_sync import GradientSync
    from dad.torch.slots import Slot


class _Hook:
    def __init__(self, sync: GradientSync, slot: Slot) -> None:
        self._sync = weakref.ref(sync)
        self._slot = weakref.ref(slot)


class _Arrival(_Hook):
    """The gradient is there: in .grad, or as segments."""

    @torch._disable_dynamo  # compiled autograd would trace it
    def __call__(self, param: torch.Tensor) -> None:
        sync, slot = self._sync(), self._slot()
        if sync is not None and slot is not None:
            sync.arrived(slot)


class _Guard(_Hook):
    """A gradient is about to be added. It is not looked at, so that factors may come instead."""

    @torch._disable_dynamo
    def __call__(self, grad: torch.Tensor | None) -> None:
        sync, slot = self._sync(), self._slot()
        if sync is not None and slot is not None:
            sync.comes(slot)


class Access(_Hook):
    """Somebody is about to use .grad (pending_grad.py)."""

    def __call__(self) -> None:
        sync, slot = self._sync(), self._slot()
        if sync is not None and slot is not None:
            sync.before_access(slot)


_torch.capture_overlook_hooks(_Guard)


def in_compiled_autograd() -> bool:
    """Whether a backward pass of compiled autograd is running."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(getattr(compiled, "in_compiled_autograd_region", False))


def watch(param: torch.Tensor, sync: GradientSync, slot: Slot) -> Any:
    """Tells `sync` of the gradients of a parameter; what is returned stands for the hooks."""
    guard = param.register_hook(_Guard(sync, slot))
    return guard, param.register_post_accumulate_grad_hook(_Arrival(sync, slot))
