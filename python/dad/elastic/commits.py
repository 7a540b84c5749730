"""The versions of a state that a rank could go back to (quorum.py says what a version is)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dad.elastic.residuals import Saved


@dataclass
class Snapshot:
    """objects: the attributes of a state. parts: what its handlers have captured. kept: this rank's own
    state."""

    objects: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Saved | None] = field(default_factory=dict)


class Commits:
    def __init__(self, initial: Snapshot) -> None:
        self._snapshots = {0: initial}  # version 0 is what this process began with
        self.confirmed = 0
        self.group: list[str] = []
        self.norms: dict[str, float] = {}
        self.place = (0, 0)  # rank and size, when this was confirmed

    @property
    def newest(self) -> int:
        return max(self._snapshots)

    @property
    def versions(self) -> list[int]:
        """The versions that were committed."""
        return sorted(version for version in self._snapshots if version > 0)

    def __getitem__(self, version: int) -> Snapshot:
        return self._snapshots[version]

    def add(self, snapshot: Snapshot, version: int | None = None) -> int:
        """Adds it as the newest version. Only that one and the one before are kept: other ranks can be one
        commit behind or ahead."""
        version = self.newest + 1 if version is None else version
        before = self.newest
        self._snapshots = {before: self._snapshots[before], version: snapshot}
        if self.confirmed and self.confirmed not in self._snapshots:
            self.confirmed = before
        return version

    def go_back_to(self, version: int) -> Snapshot:
        self._snapshots = {version: self._snapshots[version]}
        return self._snapshots[version]

    def confirm(
        self, version: int, members: list[str], norms: dict[str, float], place: tuple[int, int]
    ) -> None:
        """All members have this version, so older ones are dropped."""
        self._snapshots = {version: self._snapshots[version]}
        self.confirmed, self.group, self.norms, self.place = version, members, norms, place
