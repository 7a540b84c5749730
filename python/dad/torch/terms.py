"""What a unit needs to know of a step to send its gradients: values, so that units call nobody."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dad.process_sets import ProcessSet


@dataclass(frozen=True)
class Terms:
    """The terms on which one unit is sent in one step.

    op: of the sum on the wire. scales: before and after the sum; of lossy methods without the loss scale,
        in which nothing is kept between steps.
    samples: of this rank, with which its gradient is weighed; None where all ranks weigh the same.
    share: this rank's samples over those of all, for lossy units: a residual must not depend on the step's
        samples. 1 where all ranks weigh the same.
    kept_factor: what a residual counts in a gradient of this step; 0 where there is none to return, or this
        rank's gradient counts nothing.
    forms_on_device: a lossy gradient has to be formed, and weighed, before it is sent: sums go from host to
        host, and the core does that in the memory of hosts only.
    """

    process_set: ProcessSet
    stream: int
    op: int
    scales: tuple[float, float]
    sparse_as_dense: bool
    samples: int | None = None
    share: float = 1.0
    kept_factor: float = 0.0
    forms_on_device: bool = False

    @property
    def count(self) -> float:
        """This rank's weight where the result is divided by the samples of all."""
        return 1.0 if self.samples is None else float(self.samples)

    def weigh(self, grad: torch.Tensor) -> torch.Tensor:
        """Multiplies a gradient by this rank's samples, in place."""
        if self.samples is None:
            return grad
        # The mean over no samples is not a number.
        return grad.mul_(self.samples) if self.samples else grad.zero_()
