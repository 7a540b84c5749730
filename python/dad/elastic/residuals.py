"""Carries what ranks keep of gradients for later steps from one round of a job to the next.

The rule is that of checkpoints (states.py): the share v_w of a rank in what is still to be applied does not
depend on the number of ranks. So a survivor continues with its own v_w, whatever its rank is now, and a
newcomer begins with none. What was applied and the sum of v_w together are the sum of all committed
gradients, less the v_w of lost ranks. If ranks leave in order, they first add up all v_w, and the ranks that
stay share the sum.

If every rank has its previous place, states continue with the same bits. Otherwise they are made anew from
v_w on all ranks, because warm starts have to be the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dad.elastic.snapshot import sum_over_ranks
from dad.planning.circle import Circle
from dad.planning.planner import Plan
from dad.state.kept import Tensors
from dad.state.states import saved_shares

Saved = dict[str, Any]


def norm_of(saved: Saved | None) -> float:
    """|v_w| of a saved state."""
    if saved is None or not (saved["states"] or saved["kept"]):
        return 0.0
    squares = [float(np.vdot(share, share)) for share in saved_shares(saved).values()]
    return math.sqrt(sum(squares))


def without_residuals(saved: Saved) -> Saved:
    """What all ranks have in common: the plan, and their place in it."""
    return {**saved, "states": {}, "kept": {}, "kept_by": Plan().as_dict()}


def carried(
    mine: Saved | None, common: Saved, circle: Circle, unchanged: bool, part_of_total: Tensors | None
) -> Saved:
    """The state with which a rank continues in a new round.

    mine: its own in the round before; None for a newcomer. common: the source's, without_residuals().
    part_of_total: what takes the place of its own v_w.
    """
    if unchanged and mine is not None:
        return mine
    kept: Tensors = {}
    if part_of_total is not None:
        kept = part_of_total
    elif mine is not None:
        kept = saved_shares(mine)
    place = {"rank": circle.rank, "size": circle.num_ranks, "hosts": [list(host) for host in circle.hosts]}
    new = {**without_residuals(common), **place, "kept": kept}
    if new["plan"] is not None and Plan.from_dict(new["plan"]).size != circle.size:
        new["plan"] = None
    return new


def total_of(saved: Saved, rank: int, size: int) -> Tensors:
    """Σ v_w, computed together on all ranks. Every rank gets all of it."""
    mine = saved_shares(saved)
    total: Tensors = {}
    for name, shape, dtype, *_ in saved["tensors"]:
        wide = np.float64 if "64" in str(dtype) else np.float32
        vector = np.zeros(math.prod(shape), wide)
        if name in mine:
            vector += mine[name].reshape(-1).astype(wide)
        total[name] = vector
    if not total:
        return {}
    together = np.concatenate(list(total.values())).astype(np.float64)
    summed = sum_over_ranks(together, rank, size)
    ends = np.cumsum([vector.size for vector in total.values()])
    parts = np.split(summed, ends[:-1])
    shapes = {name: tuple(shape) for name, shape, *_ in saved["tensors"]}
    return {
        name: part.astype(total[name].dtype).reshape(shapes[name])
        for name, part in zip(total, parts, strict=True)
    }


def share_equally(total: Tensors, parts: int) -> Tensors:
    """The share of each rank that stays."""
    return {name: tensor / tensor.dtype.type(parts) for name, tensor in total.items()}
