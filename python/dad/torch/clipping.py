"""Warns when gradients are clipped that are not there yet.

With factor methods .grad is filled by synchronize() or step(). Clipping before that would silently clip
nothing, so torch's clipping functions are made to look. They are changed inside, not replaced: scripts
have imported them by name before they import dad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

Before = Callable[[list[torch.Tensor]], bool]


def install(before: Before) -> None:
    """Calls before(parameters) whenever their gradients are about to be clipped; it tells whether some are
    still to come."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        outer = getattr(clip_grad, name)
        cells = [c for c in outer.__closure__ or () if callable(c.cell_contents)]
        if len(cells) == 1:  # the function that the no_grad wrapper calls
            cells[0].cell_contents = _looking(cells[0].cell_contents, before)
        else:
            setattr(clip_grad, name, _looking(outer, before))
            setattr(torch.nn.utils, name, getattr(clip_grad, name))


def _looking(clip: Callable[..., Any], before: Before) -> Callable[..., Any]:
    @functools.wraps(clip)
    def looking(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if before(listed) and all(param.grad is None for param in listed):
            return torch.tensor(0.0) if clip.__name__ == "clip_grad_norm_" else None
        # torch has a warning of its own for a generator that gives nothing.
        return clip(listed or parameters, *args, **kwargs)

    return looking
