"""What is sent for each tensor, and why: a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dad.torch.compression import method_name


def plan_rows(tensors: Iterable[tuple[str, torch.Tensor, Any, str]]) -> list[dict[str, Any]]:
    """One row for each (name, parameter, compressor, reason)."""
    rows = []
    for name, param, chosen, why in tensors:
        method = method_name(chosen)
        itemsize = 2 if method in ("fp16", "bf16") and param.is_floating_point() else param.element_size()
        dense = param.numel() * param.element_size()
        sent = param.numel() * itemsize
        rows.append(
            {
                "name": name,
                "shape": tuple(param.shape),
                "rows": None,  # of factors; a dense tensor has none
                "method": method,
                "why": why,
                "bytes": sent,
                "ratio": dense / sent if sent else 1.0,
            }
        )
    return rows


def format_plan(rows: list[dict[str, Any]]) -> str:
    """The table as text, with a line of totals."""
    header = ("tensor", "shape", "method", "bytes", "ratio", "why")
    lines = [
        (
            row["name"],
            "x".join(map(str, row["shape"])) or "scalar",
            row["method"],
            str(row["bytes"]),
            f"{row['ratio']:.1f}",
            row["why"],
        )
        for row in rows
    ]
    sent = sum(row["bytes"] for row in rows)
    dense = sum(row["bytes"] * row["ratio"] for row in rows)
    lines.append(("total", "", "", str(sent), f"{dense / sent if sent else 1.0:.1f}", f"{len(rows)} tensors"))
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *lines]
    )
