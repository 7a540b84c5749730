"""The arguments of a DistributedOptimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dad.basics import Average
from dad.local_steps.settings import LocalSteps
from dad.process_sets import ProcessSet, global_process_set


@dataclass(frozen=True)
class Settings:
    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    model: Any = None
    local: LocalSteps = LocalSteps()

    def common_options(self) -> dict[str, Any]:
        """What ranks must have in common beside what a reducer of gradients is given."""
        return {
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": self.average_aggregated_gradients,
        }
