"""Decides which workers are in an elastic job, with which ranks, and when the job is over.

The job proceeds in rounds. A round is a set of workers with ranks, its members. When a round ends, because a
member is lost or hosts change, its members come back and ask for their next place (GET rank_and_size). When
each of them has asked or ended, the next round begins with those that wait, and their requests are answered.

A lost worker is started again at once, but nobody waits for it: the others continue without it, as long as
there are min_np of them. When it has loaded its libraries, it asks for a place like all others. Rank 0 is
told that it is there, and at the next commit the round ends and it is taken in.

The first round is the exception: its workers are told their ranks when they are started, as Horovod's are.
They are not told how many workers there are, so a worker of dad asks anyway when it is ready. Therefore none
waits for one that did not start.

Nothing here blocks, sleeps or reads a clock: every event comes with its time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from dad.runner.elastic.hosts import MAX_FAILURES, STEADY_SECONDS, HostBook
from dad.runner.elastic.notify import ADDED, REMOVED
from dad.runner.elastic.placement import Seat, number, places
from dad.runner.hosts import Host, Slot

# Rank 0 is told again of what it has not acted on, because its commit may have been under way.
TELL_AGAIN_SECONDS = 30.0
# The first worker that is ready waits this long for the others, so that workers that start together join
# together.
GATHER_SECONDS = 1.0
# A member that neither asks for its place, while others do, nor answers a ping for this long is ended.
PROBE_AFTER_SECONDS = 2.0
UNRESPONSIVE_SECONDS = 10.0
# A worker that was told to leave may finish for this long.
LEAVE_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """min_np and max_np bound the number of ranks; np is the number wanted at the start."""

    min_np: int
    max_np: int | None = None
    np: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    cooldown: tuple[float, float] | None = None
    # How long workers of the first round may take to ask for their place after others have.
    start_timeout: float = 30.0
    # Whether more hosts may come: without a discovery script there are none to wait for.
    may_grow: bool = True


class Actions(Protocol):
    """What the driver asks for. None of these may call the driver."""

    def start(self, place: Slot, is_newcomer: bool) -> None: ...
    def answer(self, seat: Seat, place: Slot | None) -> None: ...
    def is_waiting(self, seat: Seat) -> bool: ...
    def notify(self, seat: Seat, timestamp: int, result: int) -> None: ...
    def probe(self, seat: Seat) -> None: ...
    def end(self, seat: Seat, at_once: bool = False) -> None: ...
    def begin_round(self, ranks: dict[Seat, int]) -> None: ...
    def abandon_round(self) -> None: ...
    def say(self, text: str) -> None: ...


class State(Enum):
    STARTING = "starting"  # will ask for a place, or has its first one
    WAITING = "waiting for a place"
    IN_ROUND = "in training"
    LEAVING = "told to leave"


@dataclass
class Worker:
    seat: Seat
    rank: int
    state: State = State.STARTING
    has_service: bool = False  # its notification service is known
    since: float = 0.0  # in this state
    joined_at: float | None = None  # when it first was in training
    heard_at: float = 0.0  # the last answer to a ping
    is_successor: bool = False  # replaces one that failed


@dataclass(frozen=True)
class Failure:
    """Why a worker is gone."""

    seat: Seat
    rank: int
    reason: str
    code: int
    at: float
    lost_peer: bool = False


@dataclass
class Verdict:
    """How the job has ended."""

    code: int
    text: str = ""
    # The last of each seat, in order.
    failures: list[Failure] = field(default_factory=list)
    culprit: Failure | None = None


class Driver:
    def __init__(self, settings: Settings, actions: Actions, chance: random.Random | None = None) -> None:
        self.settings = settings
        self.verdict: Verdict | None = None
        self.round = 0
        self.workers: dict[Seat, Worker] = {}
        self.members: dict[Seat, int] = {}  # of the current round, with their ranks; those still there
        self.size = 0  # of the current round
        self.failures: list[Failure] = []
        self._do = actions
        self._book = HostBook(settings.cooldown, chance)
        self._finished: dict[Seat, int] = {}  # members that have ended with 0
        self._lost: list[Failure] = []  # failures of members
        self._not_before: dict[Seat, float] = {}  # when a seat may be used again
        self._short_since: float | None = None  # since fewer than min_np were left
        self._opened_at: float | None = None
        self._first_asked_at: float | None = None  # of the members, to end this round
        self._told: tuple[frozenset[Seat], frozenset[Seat]] | None = None
        self._told_at = 0.0
        self._timestamp = 0
        self._said: set[str] = set()

    # ---- events

    def hosts_found(self, hosts: Iterable[Host], now: float) -> None:
        if self._book.update(hosts):
            self._go_on(now)

    def asked(self, seat: Seat, now: float) -> None:
        """A worker requests its place."""
        worker = self.workers.get(seat)
        if worker is None or worker.state is State.LEAVING:
            self._do.answer(seat, None)
            return
        if seat in self.members and self._first_asked_at is None:
            # The round is over, also for workers that are still connecting to others.
            self._do.abandon_round()
            self._first_asked_at = now
            for other in self.workers.values():
                other.heard_at = now
        self._enter(worker, State.WAITING, now)
        self._go_on(now)

    def registered(self, seat: Seat, now: float) -> None:
        """A worker's notification service is reachable."""
        if worker := self.workers.get(seat):
            worker.has_service = True
            if self.round == 1 and worker.joined_at is None:
                worker.joined_at = now  # a worker of Horovod does not ask for its first place
            if self.members.get(seat) == 0:
                self._told = None  # what it was told before it could hear does not count
            self._go_on(now)

    def not_told(self, seat: Seat) -> None:
        """A notification did not arrive; the next tick tries again."""
        if self.members.get(seat) == 0:
            self._told = None

    def answered_probe(self, seat: Seat, now: float) -> None:
        if worker := self.workers.get(seat):
            worker.heard_at = now

    def exited(self, seat: Seat, code: int, reason: str, now: float, lost_peer: bool = False) -> None:
        """`lost_peer`: it reports itself that it failed because another worker was gone."""
        worker = self.workers.pop(seat, None)
        if worker is None:
            return
        rank = self.members.pop(seat, None)
        was_member = rank is not None
        if worker.state is State.LEAVING:
            self._not_before.pop(seat, None)
        elif code == 0 and rank is not None and worker.state is not State.WAITING:
            self._finished[seat] = rank
        else:
            if code == 0:
                reason = "exit code 0 before it was in training"
            self._failed(worker, Failure(seat, worker.rank, reason, code, now, lost_peer), was_member)
        if was_member:
            # A worker that is still connecting to it does not succeed.
            self._do.abandon_round()
            self._told = None
        self._go_on(now)

    def tick(self, now: float) -> None:
        """Handles what happens with time alone."""
        for worker in list(self.workers.values()):
            if worker.state is State.LEAVING and now - worker.since >= LEAVE_SECONDS:
                self._do.end(worker.seat)
                worker.since = now
            elif worker.is_successor and self._is_steady(worker, now):
                worker.is_successor = False
                self._book.steady(worker.seat.host)
        self._look_after_missing(now)
        self._go_on(now)

    def next_tick(self, now: float) -> float:
        """When tick() should be called at the latest."""
        times = [now + 1.0]
        times += [time for time in self._not_before.values() if time > now]
        if (back := self._book.next_return(now)) is not None:
            times.append(back)
        return min(times)

    # ---- reactions

    def _go_on(self, now: float) -> None:
        if self.verdict is not None:
            return
        if self.round == 0:
            self._begin_first(now)
            return
        if not self.members:
            self._conclude()
            return
        self._drop_unwanted()
        self._fill_seats(now)
        if all(self.workers[seat].state is State.WAITING for seat in self.members):
            self._try_round(now)
        else:
            self._tell_rank_0(now)

    def _begin_first(self, now: float) -> None:
        """Takes all existing seats, as soon as there are enough."""
        settings = self.settings
        self._opened_at = now if self._opened_at is None else self._opened_at
        seats = self._book.seats(now)[: settings.max_np]
        wanted = max(settings.min_np, settings.np or 0)
        waited = now - self._opened_at
        if len(seats) < wanted and (waited < settings.elastic_timeout or len(seats) < settings.min_np):
            if waited >= settings.elastic_timeout or not settings.may_grow:
                self._end(1, f"there are {len(seats)} slots where {wanted} are needed{self._waited(waited)}")
            elif seats or waited > 2.0:
                self._say_once(f"waiting for slots: {len(seats)} of {wanted}")
            return
        self.round = 1
        ranks = number(seats, {})
        self.members, self.size = ranks, len(ranks)
        self._do.begin_round(ranks)
        for seat, place in places(ranks).items():
            self._start(seat, place, now, is_newcomer=False)

    def _fill_seats(self, now: float) -> None:
        """Starts workers in seats that are free."""
        if self._finished:
            return  # the job is about to end, or a new round starts workers later
        limit = self.settings.max_np
        num_living = sum(worker.state is not State.LEAVING for worker in self.workers.values())
        fresh: list[Seat] = []
        for seat in self._book.seats(now):
            if limit is not None and num_living + len(fresh) >= limit:
                break
            if seat not in self.workers and self._not_before.get(seat, 0.0) <= now:
                fresh.append(seat)
        if not fresh:
            return
        # Ranks that they may get: a worker has to be told some rank at its start.
        planned = places(number([*self.workers, *fresh], self.members))
        for seat in fresh:
            self._not_before.pop(seat, None)
            self._start(seat, planned[seat], now, is_newcomer=True)

    def _start(self, seat: Seat, place: Slot, now: float, is_newcomer: bool) -> None:
        is_successor = any(failure.seat == seat for failure in self.failures)
        self.workers[seat] = Worker(seat, place.rank, since=now, heard_at=now, is_successor=is_successor)
        self._do.start(place, is_newcomer)

    def _drop_unwanted(self) -> None:
        """Workers outside a round go at once with their host; members go between two rounds."""
        for seat, worker in self.workers.items():
            if seat not in self.members and worker.state is not State.LEAVING and not self._book.has(seat):
                self._leave(worker, worker.since)

    def _leave(self, worker: Worker, now: float) -> None:
        if worker.state is State.WAITING:
            self._do.answer(worker.seat, None)
        elif worker.state is State.STARTING:
            self._do.end(worker.seat)
        self._enter(worker, State.LEAVING, now)

    def _try_round(self, now: float) -> None:
        """All members have asked, so a new round can begin with the workers that are there."""
        waiting = [worker for worker in self.workers.values() if worker.state is State.WAITING]
        for worker in waiting:
            if not self._do.is_waiting(worker.seat):
                return  # it gave the request up and will ask again
        chosen = [worker for worker in waiting if self._book.has(worker.seat)]
        if len(chosen) < self.settings.min_np:
            self._wait_for_more(len(chosen), now)
            return
        self._short_since = None
        is_first = self.round == 1 and not any(worker.has_service for worker in waiting)
        resets = self.round if is_first else self.round + 1
        limit = self.settings.reset_limit
        if limit is not None and resets - 1 > limit:
            self._end(1, f"the job was reset {resets - 1} times, and --reset-limit is {limit}")
            return
        self._begin_round(resets, chosen, waiting, now)

    def _begin_round(self, count: int, chosen: list[Worker], waiting: list[Worker], now: float) -> None:
        order = {seat: index for index, seat in enumerate(self._book.seats(0.0))}
        chosen = sorted(chosen, key=lambda worker: (order.get(worker.seat, len(order)), worker.seat))
        ranks = number([worker.seat for worker in chosen], self.members)
        for seat, rank in self._finished.items():
            self._do.say(
                f"dadrun: rank {rank} on {seat.host} ended with exit code 0 while the others "
                "were still in training; they go on without it"
            )
        self._finished.clear()
        self._lost.clear()
        before = self.size
        self.round = count
        self.members, self.size = ranks, len(ranks)
        self._told = None
        self._first_asked_at = None
        self._do.begin_round(ranks)
        if count > 1:
            self._do.say(f"dadrun: {_count(len(ranks))} in training (before: {before})")
        for worker in waiting:
            if worker.seat not in ranks:
                self._leave(worker, now)
        for seat, place in places(ranks).items():
            self.workers[seat].rank = place.rank
            self._enter(self.workers[seat], State.IN_ROUND, now)
            if self.workers[seat].joined_at is None:
                self.workers[seat].joined_at = now
            self._do.answer(seat, place)
        self._fill_seats(now)

    def _wait_for_more(self, num_waiting: int, now: float) -> None:
        if self._finished:
            # A worker that ended well may have left these behind; no group is left to train with.
            self._finished.clear()
            self._fill_seats(now)
        needed = self.settings.min_np
        self._short_since = now if self._short_since is None else self._short_since
        waited = now - self._short_since
        text = f"{_count(num_waiting)} left where --min-np is {needed}"
        if waited >= self.settings.elastic_timeout:
            self._end(1, f"{text}{self._waited(waited)}")
        elif not self._can_recover(now):
            self._end(1, f"{text}, and there is no host on which another could be started")
        else:
            left = self.settings.elastic_timeout
            self._say_once(f"{text}: waiting up to {left:g} s for more (--elastic-timeout)")

    def _can_recover(self, now: float) -> bool:
        """Whether more workers may come one day."""
        return (
            self.settings.may_grow
            or any(worker.state is State.STARTING for worker in self.workers.values())
            or self._book.next_return(now) is not None
            or any(seat not in self.workers for seat in self._book.seats(now))
        )

    def _tell_rank_0(self, now: float) -> None:
        """Tells rank 0 about workers that are ready to join and members whose host is gone."""
        room = frozenset(
            seat
            for seat, worker in self.workers.items()
            if worker.state is State.WAITING and seat not in self.members
        )
        gone = frozenset(seat for seat in self.members if not self._book.has(seat))
        if not room and not gone:
            return
        others_start = any(
            w.state is State.STARTING and w.seat not in self.members for w in self.workers.values()
        )
        first_ready = min((self.workers[seat].since for seat in room), default=now)
        if room and others_start and now - first_ready < GATHER_SECONDS:
            return
        if self._told == (room, gone) and now - self._told_at < TELL_AGAIN_SECONDS:
            return
        first = next((seat for seat, rank in self.members.items() if rank == 0), None)
        worker = None if first is None else self.workers[first]
        if worker is None or not worker.has_service or worker.state is State.WAITING:
            return
        self._told, self._told_at = (room, gone), now
        # Workers keep the time of the last news, in seconds, and drop news that is not newer.
        self._timestamp = max(self._timestamp + 1, int(now))
        # With REMOVED alone workers would skip the exchange of their state, and a newcomer may be there by
        # the time they ask.
        self._do.notify(worker.seat, self._timestamp, ADDED | (REMOVED if gone else 0))

    def _look_after_missing(self, now: float) -> None:
        """While some members wait for the next round, the others may be stopped or cut off."""
        if self._first_asked_at is None or now - self._first_asked_at < PROBE_AFTER_SECONDS:
            return
        for seat in list(self.members):
            worker = self.workers[seat]
            if worker.state is State.WAITING:
                continue
            patience = UNRESPONSIVE_SECONDS if worker.has_service else self.settings.start_timeout
            if worker.state is State.STARTING and not worker.has_service:
                if now - worker.since >= patience:
                    self._do.say(
                        f"dadrun: rank {worker.rank} on {seat.host} takes more than {patience:g} s to start "
                        "(--start-timeout): the others begin without it"
                    )
                    del self.members[seat]
            elif now - worker.heard_at >= patience:
                self._do.say(
                    f"dadrun: rank {worker.rank} on {seat.host} does not answer for {patience:g} s, while "
                    "others wait for it: it is ended"
                )
                worker.heard_at = now
                self._do.end(seat, at_once=True)
            elif worker.has_service:
                self._do.probe(seat)

    # ---- the end

    def _failed(self, worker: Worker, failure: Failure, was_member: bool) -> None:
        seat, now = worker.seat, failure.at
        self.failures.append(failure)
        if was_member:
            self._lost.append(failure)
        delay = self._book.failed(seat.host, self._is_steady(worker, now), now)
        who = f"rank {worker.rank} on {seat.host}" if was_member else f"the new worker on {seat}"
        until = self._book.next_return(now)
        how_long = f"for {until - now:.0f} s" if until is not None else "in this job"
        if delay is None:
            self._do.say(
                f"dadrun: {who} was lost: {failure.reason}; {MAX_FAILURES} workers in a row have failed on "
                f"{seat.host}, where no more are started {how_long}"
            )
            return
        self._not_before[seat] = now + delay
        then = "it is started again" + (f" in {delay:g} s" if delay else "")
        if self._finished or not self._book.has(seat) or not self.members:
            then = "it is not started again"
        elif self._book.is_blacklisted(seat.host, now):
            then = f"no more are started on {seat.host} {how_long}"
        self._do.say(f"dadrun: {who} was lost: {failure.reason}; {then}")

    def _conclude(self) -> None:
        """No member is left: the state of the training is gone, even if workers are still being started."""
        if not self._lost:
            self._end(0, "")
            return
        # A rank that a signal killed comes before ranks that raised; ranks that only lost it come last.
        culprit = min(self._lost, key=lambda failure: (failure.code <= 128, failure.lost_peer, failure.at))
        self._end(culprit.code or 1, "no rank is left that has the state of the training", culprit)

    def _end(self, code: int, text: str, culprit: Failure | None = None) -> None:
        latest = {failure.seat: failure for failure in self.failures}
        ordered = sorted(latest.values(), key=lambda failure: failure.at)
        self.verdict = Verdict(code, text, ordered, culprit)

    # ---- helpers

    @staticmethod
    def _is_steady(worker: Worker, now: float) -> bool:
        """Rounds may follow one another quickly, so the time that it has been in training counts."""
        return worker.joined_at is not None and now - worker.joined_at >= STEADY_SECONDS

    @staticmethod
    def _enter(worker: Worker, state: State, now: float) -> None:
        if worker.state is not state:
            worker.state = state
            worker.since = now

    def _waited(self, seconds: float) -> str:
        return f", also after {seconds:.0f} s (--elastic-timeout)" if seconds >= 1 else ""

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._do.say(f"dadrun: {text}")


def _count(num_ranks: int) -> str:
    return "1 rank is" if num_ranks == 1 else f"{num_ranks} ranks are"
