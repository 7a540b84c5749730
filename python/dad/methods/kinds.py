"""The exchanges that a plan can choose: one row for each first word of a method's text (`int8;bucket=512` is
of the kind int8), beside the core's own table, dad_core/exchange/method_table.cc.

Whatever depends on the kind of a choice is a column here, read by the planner, by both frameworks and by
checkpoints. A kind without a row is an error where the choice is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dad.state.kept import ChunkResiduals, Int8Residuals, Kept, LowRankResiduals, SparseResiduals

if TYPE_CHECKING:
    from dad.planning.types import Choice


class Sends(Enum):
    """What a request of a kind carries."""

    DENSE = "dense"  # tensors as they are, or cast
    TENSOR = "tensor"  # one tensor, which the core compresses
    LAYER = "layer"  # a layer, or a chain of them: in rows, or with parts that came formed


@dataclass(frozen=True)
class Kind:
    """A row."""

    name: str  # as in Choice.kind
    sends: Sends
    # Changes the gradient. What the core keeps between steps is in units without loss scale.
    lossy: bool = False
    # Rows of all ranks reach every rank, which forms the gradient: a host cannot add them up.
    exchanges_rows: bool = False
    # Looks at squares of samples beside the gradient, by some of its rules.
    squares: bool = False
    # The core reports which part of the elements it has sent (TensorStats::effective).
    reports_part: bool = False
    # How what it has not sent is carried over to another plan or number of ranks; None: nothing is kept.
    kept: Kept | None = None
    # The method as users know it; empty: the name.
    label: str = ""

    def label_of(self, choice: Choice) -> str:
        if self.exchanges_rows:
            return "edad" if len(choice.layers) > 1 else "dad"
        return choice.label or choice.option("rule") or self.label or self.name


KINDS = {
    kind.name: kind
    for kind in (
        Kind("dense", Sends.DENSE),
        Kind("factor", Sends.LAYER, exchanges_rows=True),
        Kind("low_rank", Sends.LAYER, lossy=True, kept=LowRankResiduals(), label="rank_dad"),
        Kind("int8", Sends.TENSOR, lossy=True, kept=Int8Residuals()),
        Kind("sparse", Sends.LAYER, lossy=True, squares=True, reports_part=True, kept=SparseResiduals()),
        Kind("qsgd", Sends.TENSOR, lossy=True),
        Kind("chunk_topk", Sends.TENSOR, lossy=True, reports_part=True, kept=ChunkResiduals()),
        Kind(
            "chunk_topk_rows",
            Sends.LAYER,
            lossy=True,
            reports_part=True,
            kept=ChunkResiduals(),
            label="chunk_topk",
        ),
    )
}
