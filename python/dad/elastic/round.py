"""The ranks of a round meet, and agree on a name for it that no earlier round had.

dadrun gives each round a name. A worker cannot mistake the name of another round for it: the next round does
not begin before each member of this one has asked for a place in it, or has ended. With a horovodrun, the
ranks agree on a name themselves:

Ranks have called init() different numbers of times, and the store may still hold what an earlier round has
left there, or what a worker left that died while it met the others. So every rank puts a seat with a fresh
number of its own, and rank 0 publishes the seats that it has seen under a fresh token. A rank that finds its
own number there confirms the token. When all have confirmed the same one, rank 0 says so. If a rank comes
late, in the seat of one that died meanwhile, rank 0 begins again.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

from dad.errors import DadInternalError
from dad.runner.elastic.round_name import KEY, SCOPE
from dad.runner.kv import KeyValueClient, RoundOverError
from dad.world import World, new_job_id

_PLAN = "plan"
_POLL_SECONDS = 0.01
_SLOWEST_POLL_SECONDS = 0.1


class Store(Protocol):
    def get(self, scope: str, key: str) -> bytes | None: ...
    def put(self, scope: str, key: str, value: bytes) -> None: ...


@dataclass(frozen=True)
class Round:
    """token: of this round alone. job: the name of the job, for reports."""

    token: str
    job: str


def meet_round(world: World, store: Store | None = None) -> Round:
    """Meets the other ranks of this round. Raises DadInternalError if some do not come, or if the launcher's
    store says that they will not; the next round has to be requested then."""
    if world.size == 1:
        return Round(secrets.token_hex(8), world.job or new_job_id())
    store = KeyValueClient(world.rendezvous) if store is None else store
    try:
        if (given := store.get(SCOPE, KEY)) is not None:
            return Round(**json.loads(given))
        return _Meeting(world, store).run()
    except RoundOverError as error:
        raise DadInternalError(str(error)) from error
    except OSError as error:
        raise DadInternalError(f"the launcher's store at {world.rendezvous} is gone: {error}") from error


class _Meeting:
    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store
        self._nonce = secrets.token_hex(8)
        self._deadline = time.monotonic() + world.start_timeout

    def run(self) -> Round:
        self._put(f"seat_{self._world.rank}", {"nonce": self._nonce, "job": self._world.job})
        plan = self._lead() if self._world.rank == 0 else self._follow()
        return Round(plan["token"], plan["job"])

    def _lead(self) -> dict[str, Any]:
        seats: dict[int, dict[str, str]] = {}
        plan: dict[str, Any] = {}
        pause = _POLL_SECONDS
        while True:
            ranks = range(self._world.size)
            now = {rank: seat for rank in ranks if (seat := self._get(f"seat_{rank}")) is not None}
            if now != seats:
                seats, pause = now, _POLL_SECONDS
                if len(seats) == self._world.size:
                    jobs = [seat["job"] for seat in seats.values() if seat["job"]]
                    plan = {
                        "token": secrets.token_hex(8),
                        "nonces": [seats[rank]["nonce"] for rank in ranks],
                        "job": jobs[0] if jobs else new_job_id(),
                        "is_final": False,
                    }
                    self._put(_PLAN, plan)
            elif len(seats) == self._world.size:
                others = range(1, self._world.size)
                if all(self._get(f"confirmed_{rank}") == plan["token"] for rank in others):
                    plan["is_final"] = True
                    self._put(_PLAN, plan)
                    return plan
            missing = [rank for rank in ranks if rank not in seats]
            self._check_time(missing)
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_SECONDS, pause * 1.2)

    def _follow(self) -> dict[str, Any]:
        confirmed = ""
        pause = _POLL_SECONDS
        while True:
            plan = self._get(_PLAN)
            if plan is not None and self._nonce in plan["nonces"]:
                if plan["is_final"]:
                    return plan
                if plan["token"] != confirmed:
                    confirmed, pause = plan["token"], _POLL_SECONDS
                    self._put(f"confirmed_{self._world.rank}", confirmed)
            self._check_time([0] if plan is None else [])
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_SECONDS, pause * 1.2)

    def _check_time(self, missing: list[int]) -> None:
        if time.monotonic() > self._deadline:
            who = f"ranks {missing} have" if missing else "some rank has"
            raise DadInternalError(
                f"rank {self._world.rank} of {self._world.size}: {who} not come to this round of the job "
                f"within {self._world.start_timeout:g} s (DAD_START_TIMEOUT)"
            )

    def _get(self, key: str) -> Any:
        value = self._store.get(SCOPE, key)
        return None if value is None else json.loads(value)

    def _put(self, key: str, value: Any) -> None:
        self._store.put(SCOPE, key, json.dumps(value).encode())
