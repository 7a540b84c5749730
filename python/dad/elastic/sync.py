"""Brings all ranks of a round to one state.

Horovod broadcasts rank 0's state. But rank 0 may be a newcomer, and survivors may be one commit apart if a
rank was lost between two of them. So dad does this:
1. Ranks report which versions they have, and each computes who has the state of the job (quorum.py).
2. Survivors go back to the newest version that all of them have.
3. Ranks compare digests of the parts of their states. The source sends each of the others what it lacks,
which is nothing, as a rule, for survivors.
4. What ranks have kept of gradients for later steps is carried over (residuals.py).
5. Digests of all parts are compared. Only then does the state count as committed by the new group, and the
function that trains is called: a newcomer contributes nothing before.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle

from dad import basics
from dad._lib import _core
from dad.elastic import launcher
from dad.elastic.commits import Snapshot
from dad.elastic.handlers import ForeignHandler
from dad.elastic.quorum import Claim, Decision, decide
from dad.elastic.residuals import carried, share_equally, without_residuals
from dad.elastic.snapshot import send
from dad.log import log
from dad.planning.circle import circle_of
from dad.process_sets import global_process_set
from dad.rank_groups import name_ranks
from dad.runner.kv import KeyValueClient
from dad.state.replicas import raise_unless_equal

if TYPE_CHECKING:
    from dad.elastic.state import ObjectState

_OBJECTS = ""  # the part that has no handler
_SCOPE, _KEY = "dad_elastic", "has_state"


def synchronize(state: ObjectState) -> None:
    """Synchronizes; called on all ranks."""
    _Sync(state).run()


class _Sync:
    def __init__(self, state: ObjectState) -> None:
        self._state = state
        initialized = _core.is_initialized()
        self._rank = _core.rank() if initialized else 0
        self._size = _core.size() if initialized else 1
        self._same_engine = state._inits == basics.num_inits()

    def run(self) -> None:
        from dad.elastic.state import exchange, member_name

        state = self._state
        if self._same_engine and state._commits.confirmed:
            state._commits.add(state._snapshot())  # called by the user: what ranks have now counts
        claim = self._claim(member_name()).as_dict()
        decision = self._decide([Claim(**one) for one in exchange("claims", claim)])
        self._say_who_is_lost(decision)
        if self._is_survivor(decision) and decision.version not in (0, state._commits.newest):
            state._take(state._commits.go_back_to(decision.version))
        self._take_over(decision)
        self._carry(decision)
        for handler in state._handlers.values():
            if isinstance(handler, ForeignHandler):
                handler.sync()
        state._saved_state = {name: getattr(state, name) for name in state._saved_state}
        version = state._commits.add(state._snapshot(), decision.next_version)
        packet = {"member": member_name(), "norm": state._norm(), "digests": self._digests(version)}
        everyone = exchange("done", packet)
        raise_unless_equal([one["digests"] for one in everyone])
        norms = {one["member"]: one["norm"] for one in everyone}
        place = (self._rank, self._size)
        state._commits.confirm(version, [one["member"] for one in everyone], norms, place)
        state._inits = basics.num_inits()
        state._left_in_order, state._totals = False, None
        if self._rank == decision.source:
            _remember_that_there_is_a_state()

    def _claim(self, member: str) -> Claim:
        state, commits = self._state, self._state._commits
        rank, size = commits.place
        return Claim(
            member,
            commits.versions,
            commits.confirmed,
            commits.group,
            left_in_order=state._left_in_order or self._same_engine,
            has_total=state._totals is not None,
            norms=commits.norms,
            rank=rank,
            size=size,
            knows_of_state=commits.confirmed == 0 and _there_is_a_state(),
        )

    def _decide(self, claims: list[Claim]) -> Decision:
        quorum = os.environ.get("DAD_ELASTIC_QUORUM") or "half"
        if quorum not in ("half", "any"):
            raise ValueError(f'DAD_ELASTIC_QUORUM="{quorum}": expected half or any')
        return decide(claims, minority_may_go_on=quorum == "any")

    def _is_survivor(self, decision: Decision) -> bool:
        return self._rank in decision.survivors

    def _say_who_is_lost(self, decision: Decision) -> None:
        if self._rank != decision.source:
            return
        for member in decision.lost:
            name, norm = member.rpartition(" ")[0], decision.norms.get(member, 0.0)
            if decision.in_order and (decision.uses_totals or not norm):
                log.info("%s has left the job", name)
            elif not norm:
                log.info("%s is lost; it had kept nothing of gradients for later steps", name)
            else:
                log.warning(
                    "%s is lost, and with it what it had kept of gradients for later steps: norm %.6g at the "
                    "last commit",
                    name,
                    norm,
                )

    # The parts that all ranks have in common

    def _digests(self, version: int | None = None) -> dict[str, str]:
        state = self._state
        snapshot = state._commits[version] if version is not None else state._snapshot()
        self._live: Snapshot = snapshot
        parts: dict[str, Any] = {_OBJECTS: snapshot.objects, **snapshot.parts}
        return {name or "objects of the state": state.digest_of(part) for name, part in parts.items()}

    def _take_over(self, decision: Decision) -> None:
        from dad.elastic.state import exchange

        state = self._state
        has_state = self._is_survivor(decision)
        names = [name for name, handler in state._handlers.items() if not isinstance(handler, ForeignHandler)]
        contributions = {name: state._handlers[name].contribution() for name in names}
        mine = {"digests": self._digests() if has_state else {}, "contributions": contributions}
        everyone = exchange("digests", mine)
        wanted = everyone[decision.source]["digests"]
        lacking = [[n for n, digest in wanted.items() if one["digests"].get(n) != digest] for one in everyone]
        if any(lacking):
            self._bring(decision, lacking)
        for name in names:
            given = [everyone[rank]["contributions"][name] for rank in decision.survivors]
            if any(one is not None for one in given):
                state._handlers[name].merge([one for one in given if one is not None])

    def _bring(self, decision: Decision, lacking: list[list[str]]) -> None:
        state = self._state
        parts: list[bytes] = []
        if self._rank == decision.source:
            encoded = {
                name: self._encode(name) for name in sorted({name for names in lacking for name in names})
            }
            parts = [pickle.dumps({name: encoded[name] for name in names}) for names in lacking]
        received = pickle.loads(send(decision.source, self._rank, parts))
        if self._rank == decision.source:
            takers = [rank for rank, names in enumerate(lacking) if names]
            log.info("rank %d has given its state to %s", self._rank, name_ranks(takers))
            return
        for name, data in received.items():
            if name == "objects of the state":
                objects = cloudpickle.loads(data)
                state._saved_state = {**state._saved_state, **objects}
                state._set_attrs()
            elif name in state._handlers:
                handler = state._handlers[name]
                handler.apply(handler.decode(data))

    def _encode(self, name: str) -> bytes:
        if name == "objects of the state":
            return cloudpickle.dumps(self._live.objects)
        return self._state._handlers[name].encode(self._live.parts[name])

    # The parts that ranks do not have in common

    def _carry(self, decision: Decision) -> None:
        """A state stays in place if the engine is the one that has it."""
        from dad.elastic.state import exchange

        state = self._state
        has_state = self._is_survivor(decision)
        kept = state._commits[state._commits.newest].kept if has_state else {}
        own = sorted(name for name, saved in kept.items() if saved is not None)
        everyone = exchange("kept", {"same": self._same_engine and has_state, "own": own})
        if all(one["same"] for one in everyone) or decision.version == 0:
            return
        for name in everyone[decision.source]["own"]:
            data = b""
            if self._rank == decision.source:
                data = pickle.dumps(without_residuals(kept[name]))
            common = pickle.loads(send(decision.source, self._rank, [data] * self._size))
            part = None
            if has_state and decision.uses_totals and state._totals and name in state._totals:
                part = share_equally(state._totals[name], len(decision.survivors))
            handler = state._handlers[name]
            if handler.can_carry:
                circle = circle_of(global_process_set)
                handler.carry(carried(kept.get(name), common, circle, decision.unchanged, part))


def _store() -> KeyValueClient | None:
    url = launcher.store_address(os.environ)
    return None if url is None else KeyValueClient(url)


def _there_is_a_state() -> bool:
    """Whether the launcher's store says that ranks have had a state; the whole group may be gone."""
    try:
        store = _store()
        return store is not None and store.get(_SCOPE, _KEY) is not None
    except OSError:
        return False


def _remember_that_there_is_a_state() -> None:
    try:
        store = _store()
        if store is not None:
            store.put(_SCOPE, _KEY, b"1")
    except OSError:
        log.debug("the launcher's store is gone", exc_info=True)
