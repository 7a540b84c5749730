"""Where the parts of a report are. Needs no core: `dad top` may read a job of another installation."""

from __future__ import annotations

from pathlib import Path


def live_path(file: str | Path) -> Path:
    """What `dad top` reads, of a job with this report."""
    return Path(f"{file}.live")
