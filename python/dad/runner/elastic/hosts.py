"""The hosts that may be used: those that discovery names, except those that have failed repeatedly."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from dad.runner.elastic.placement import Seat
from dad.runner.hosts import Host

# A host is given up after so many consecutive workers have failed on it soon after their start.
MAX_FAILURES = 3
# A worker that was in training for this long was no failure of its host: the count begins again.
STEADY_SECONDS = 5.0
# Pauses before a seat is taken again, by the number of failures in a row.
RESTART_DELAYS = (0.0, 1.0, 2.0)


@dataclass
class _Record:
    failures: int = 0
    times_blacklisted: int = 0
    blacklisted_until: float = 0.0  # inf: for good


class HostBook:
    """Times are those of the caller's clock."""

    def __init__(
        self, cooldown: tuple[float, float] | None = None, chance: random.Random | None = None
    ) -> None:
        self._cooldown = cooldown
        self._chance = chance or random.Random()
        self._hosts: dict[str, int] = {}
        self._records: dict[str, _Record] = {}

    def update(self, hosts: Iterable[Host]) -> bool:
        """Updates the hosts with what discovery says; hosts keep the order in which they appeared. Returns
        whether anything has changed."""
        found = {host.name: host.slots for host in hosts}
        updated = {name: found[name] for name in self._hosts if name in found} | found
        is_news = updated != self._hosts
        self._hosts = updated
        return is_news

    def seats(self, now: float) -> list[Seat]:
        """The seats that may be used, host after host."""
        return [
            Seat(name, slot)
            for name, slots in self._hosts.items()
            if not self.is_blacklisted(name, now)
            for slot in range(slots)
        ]

    def has(self, seat: Seat) -> bool:
        """Also true for a blacklisted host: nothing is started there, but its workers may stay."""
        return seat.slot < self._hosts.get(seat.host, 0)

    def is_blacklisted(self, host: str, now: float) -> bool:
        record = self._records.get(host)
        return record is not None and now < record.blacklisted_until

    def failed(self, host: str, was_steady: bool, now: float) -> float | None:
        """Records a failure. Returns the seconds until the seat may be used again; None: the host is
        blacklisted."""
        record = self._records.setdefault(host, _Record())
        if was_steady:
            record.failures = 0
            return 0.0
        record.failures += 1
        if record.failures < MAX_FAILURES:
            return RESTART_DELAYS[record.failures - 1]
        record.failures = 0
        record.times_blacklisted += 1
        record.blacklisted_until = now + self._cooldown_seconds(record.times_blacklisted)
        return None

    def steady(self, host: str) -> None:
        """A worker that was started again has stayed: earlier failures do not count any more."""
        if host in self._records:
            self._records[host].failures = 0

    def next_return(self, now: float) -> float | None:
        """When the next blacklisted host may be used again."""
        times = [record.blacklisted_until for name, record in self._records.items() if name in self._hosts]
        return min((time for time in times if now < time < float("inf")), default=None)

    def _cooldown_seconds(self, times: int) -> float:
        """Twice as long each time, with randomness so that hosts do not come back in step."""
        if self._cooldown is None:
            return float("inf")
        shortest, longest = self._cooldown
        return min(longest, shortest * 2.0 ** (times - 1) * (1 + self._chance.random() / 2))
