"""The doctor's findings, one line each. ✓ is fine, ✗ is broken, – is absent or not as it should be, although
a job still works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, BROKEN, ABSENT = "✓", "✗", "–"


@dataclass(frozen=True)
class Finding:
    mark: str
    text: str


def report(findings: Iterable[Finding]) -> int:
    """Prints each as soon as it is known; returns how many are broken."""
    broken = 0
    for finding in findings:
        print(f"{finding.mark} {finding.text}", flush=True)
        broken += finding.mark == BROKEN
    return broken
