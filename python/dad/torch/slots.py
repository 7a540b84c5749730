"""A parameter of an optimizer, and what came for it in a step: a gradient, or segments of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dad.torch._load import _torch


@dataclass(eq=False)
class Slot:
    """A parameter and how far it is in this step."""

    param: torch.Tensor
    name: str
    compressor: Any
    passes_left: int
    units: list[Any] = field(default_factory=list)
    hook: Any = None  # while it is watched
    sparse: bool = False  # its gradient was, or its layer is
    method: Any = None  # one that is planned for; None: the compressor does it all
    planned: bool = False
    capture_id: int = -1
    mode: str = "off"  # how the plan wants it captured
    segments: list[Any] = field(default_factory=list)  # taken from the capture, not sent yet
    waiting: Any = None  # the versions of those that were taken long before they can be sent
    buffer: torch.Tensor | None = None  # the last result: its memory serves again
    kept: np.ndarray | None = None  # this rank's share in what an earlier plan has not applied (states.py)
    returned: np.ndarray | None = None  # `kept` that went into this step's gradient, should it be skipped
    # What a plan did not foresee, for the next one.
    rows_seen: int = 0
    indexed_seen: int = 0
    dense_seen: bool = False  # of its gradient a part came formed
    alone: bool = False  # its bias did not come with it
    unlinked: bool = False  # its chain did not hold
    too_large: bool = False  # sparse it was larger than dense; then on all ranks
    # Micro-batches as samples, where a method looks at the variance of what comes formed.
    squares: torch.Tensor | None = None  # Σ over this step's passes of what each added to .grad, squared
    before_pass: torch.Tensor | None = None  # .grad as the last pass has left it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        return as_matrix(self.param.shape)

    @property
    def dtype_name(self) -> str:
        return str(self.param.dtype)

    @property
    def element_bytes(self) -> int:
        return self.param.element_size()

    @property
    def floating(self) -> bool:
        return self.param.is_floating_point()

    @property
    def wide_dtype(self) -> np.dtype:
        """The dtype of what is kept of it between steps."""
        return np.dtype(np.float64 if self.param.dtype == torch.float64 else np.float32)

    def add_square(self) -> None:
        """A backward pass is over: what it added to .grad is one sample."""
        grad = self.param.grad
        if grad is None or grad.is_sparse:
            return
        growth = grad if self.before_pass is None else grad - self.before_pass
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        square = growth.detach().to(wide).square().contiguous()
        self.squares = square if self.squares is None else self.squares.add_(square)
        self.before_pass = grad.detach().clone() if self.passes_left > 0 else None

    def forget_squares(self) -> None:
        self.squares = self.before_pass = None

    def num_rows(self) -> tuple[int, int]:
        """The rows and the indexed rows of the segments."""
        rows = sum(num_rows(s) for s in self.segments if s.kind == "rows")
        return rows, sum(num_rows(s) for s in self.segments if s.kind == "indexed")

    def capture(self, mode: str) -> None:
        if self.capture_id >= 0:
            _torch.capture_set_mode(self.param, mode)

    def take_segments(self) -> None:
        if self.capture_id >= 0:
            waiting, self.waiting = self.waiting, None
            if waiting is not None and waiting.changed():
                raise RuntimeError(
                    f'"{self.name}": an input or a gradient of its layer was changed in place between '
                    "backward() and step(); its rows were needed to form the gradient"
                )
            self.segments.extend(_torch.capture_take(self.param))

    def take_early(self) -> None:
        """What has come is all; it stays as it is until take_segments()."""
        self.take_segments()
        self.waiting = versions(self.segments)

    def drop_segments(self) -> None:
        self.segments = []
        self.waiting = None

    def local_gradient(self, sparse: bool) -> torch.Tensor:
        """This rank's gradient; zeros where it has none but others may."""
        param = self.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
            if self.sparse and sparse:
                param.grad = param.grad.to_sparse(1)
        return param.grad

    def dense_gradient(self) -> torch.Tensor | None:
        """What is in .grad, as a dense tensor."""
        grad = self.param.grad
        if grad is not None and grad.is_sparse:
            grad = self.param.grad = grad.to_dense()
        return grad

    def formed_gradient(self) -> torch.Tensor | None:
        """What autograd put into .grad; zeros are what zero_grad(set_to_none=False) leaves."""
        grad = self.dense_gradient()
        return grad if grad is not None and bool(grad.any()) else None

    def return_kept(self, factor: float) -> bool:
        """Adds what an earlier plan has kept to this rank's gradient, where nothing is kept any more; whether
        there was anything. factor: what a residual counts in a gradient of this step."""
        grad = self.param.grad
        if self.kept is None or factor == 0.0 or (grad is not None and grad.is_sparse):
            return False
        kept = torch.from_numpy(self.kept).to(self.param.dtype).reshape(self.param.shape)
        self.add_to_gradient(kept * factor)
        self.returned, self.kept = self.kept, None
        return True

    def add_to_gradient(self, part: torch.Tensor | None) -> None:
        if part is not None:
            grad = self.param.grad
            self.param.grad = part if grad is None else grad.add_(part)

    def new_output(self, reuse: bool) -> torch.Tensor:
        """Memory for the result: that of .grad or of the last result, if nobody reads it any more."""
        grad = self.param.grad
        if reuse and grad is not None and not grad.is_sparse and grad.is_contiguous():
            return grad
        if self.buffer is not None and self.buffer is not grad and _torch.is_unshared(self.buffer):
            return self.buffer
        self.buffer = torch.empty_like(self.param, memory_format=torch.contiguous_format)
        return self.buffer

    def take_result(self, output: torch.Tensor) -> None:
        if self.param.requires_grad and self.param.grad is not output:
            self.param.grad = output


def versions(segments: Sequence[Any]) -> Any:
    """The versions of what they hold. A batch without rows cannot change, but its versions do."""
    return _torch.Versions([segment for segment in segments if num_rows(segment)])


def num_rows(segment: Any) -> int:
    return segment.index.shape[0] if segment.kind == "indexed" else segment.a.shape[0]


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a parameter; a bias is one column."""
    if len(shape) == 0:
        return 1, 1
    columns = 1
    for extent in shape[1:]:
        columns *= extent
    return shape[0], columns


def materialise(param: torch.Tensor, segments: Sequence[Any]) -> torch.Tensor | None:
    """The sum of segments, as a gradient; None if there are none. Each product is formed in the dtype of its
    op, as autograd does it: under autocast the result is rounded to 16 bits."""
    if not segments:
        return None
    total = torch.zeros_like(param, memory_format=torch.contiguous_format)
    matrix = total.view(as_matrix(param.shape))
    for segment in segments:
        if segment.kind == "indexed":
            matrix.index_add_(0, segment.index, segment.x.to(matrix.dtype))
        else:
            begin, end = segment.out_begin, segment.out_begin + segment.d.shape[1]
            matrix[begin:end] += segment.d.t() @ segment.a
    return total


def materialise_bias(bias: torch.Tensor, segments: Sequence[Any]) -> torch.Tensor | None:
    total = None
    for segment in segments:
        if segment.kind == "rows" and segment.has_bias:
            total = torch.zeros_like(bias) if total is None else total
            begin, end = segment.out_begin, segment.out_begin + segment.d.shape[1]
            total[begin:end] += segment.d.sum(0)
    return total


def multiply(d: np.ndarray, a: np.ndarray) -> torch.Tensor:
    """dᵀ a, as torch does it with its number of threads."""
    return torch.mm(torch.from_numpy(d).t(), torch.from_numpy(a))
