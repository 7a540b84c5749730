"""Makes readers of .grad wait for the exchange.

Between backward() and step() a gradient may still be in flight. Whoever reads or assigns .grad in that
time (clip_grad_norm_(), a loop over .grad, a logger of norms) has to get the reduced gradient. torch has no
hook for this, so a parameter with a pending gradient belongs to a subclass of its class until the exchange
is over. In the subclass `grad` is a property that calls back first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_grad = torch.Tensor.grad  # torch's own descriptor
_callbacks: dict[int, Callable[[], None]] = {}  # by id of the parameter


def watch(param: torch.Tensor, before_access: Callable[[], None]) -> None:
    """Calls before_access() once, before .grad is next read, assigned or deleted."""
    cls = type(param)
    if not issubclass(cls, _Pending):
        param.__class__ = _pending_class(cls)  # type: ignore[arg-type]
    _callbacks[id(param)] = before_access


def forget(param: torch.Tensor) -> None:
    """There is nothing to call any more."""
    _callbacks.pop(id(param), None)


def restore(param: torch.Tensor) -> None:
    """As forget(), and the parameter gets its own class back."""
    forget(param)
    if isinstance(param, _Pending):
        param.__class__ = type(param)._dad_class


class _Pending:
    """Marks the subclasses."""

    __slots__ = ()
    _dad_class: type


@functools.cache
def _pending_class(cls: Any) -> Any:
    # Dynamo must not trace the callback. With a graph break it is called when the compiled code runs.
    @torch.compiler.disable
    def get(param: torch.Tensor) -> torch.Tensor | None:
        _call_back(param)
        return _grad.__get__(param)

    @torch.compiler.disable
    def assign(param: torch.Tensor, grad: torch.Tensor | None) -> None:
        _call_back(param)
        _grad.__set__(param, grad)

    @torch.compiler.disable
    def delete(param: torch.Tensor) -> None:
        _call_back(param)
        _grad.__delete__(param)

    def deepcopy(param: torch.Tensor, memo: dict[int, Any]) -> Any:
        copied = cls.__deepcopy__(param, memo)
        restore(copied)
        return copied

    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__deepcopy__": deepcopy,
        "grad": property(get, assign, delete),
        "_dad_class": cls,
    }
    if cls is torch.Tensor:  # the results of ops remain plain tensors
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    return type(cls)(cls.__name__, (cls, _Pending), members)


def _call_back(param: torch.Tensor) -> None:
    callback = _callbacks.pop(id(param), None)
    if callback is not None:
        callback()
