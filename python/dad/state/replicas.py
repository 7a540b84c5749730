"""Checks whether the replicas of a model are the same, bit by bit. What all frameworks share.

check_replicas() of the frameworks compares when it is called. ReplicaCheck compares by itself during
training: after the first step, after 2, 4, 8, … and from 1024 on after every 1024 steps, or after every
DAD_CHECK_EVERY steps. Each rank hashes its parameters and its optimizer's settings at the start of a step and
hands the hash to an allgather of a few bytes, whose result it reads at the end of that step: no rank can get
there before all have started it. Only if hashes differ do ranks exchange the hash of each tensor, to name
what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dad._lib import _core
from dad.errors import ReplicaError
from dad.log import log
from dad.planning.ranks import Gather, Ranks
from dad.rank_groups import name_ranks, ranks_by_value, who_has_what

_OFF, _WARN, _RAISE = range(3)
_LONGEST_INTERVAL = 1024
_FAILED = ""  # instead of a hash: this rank could not compute one


def raise_unless_equal(ranks: Sequence[dict[str, str]]) -> None:
    """Raises ReplicaError, naming tensors and ranks, unless all ranks have the same digest under every
    name."""
    problems = [
        f'"{name}" differs between {" / ".join(name_ranks(members) for members in groups.values())}'
        for name, groups in _differing(dict(enumerate(ranks)))
    ]
    if problems:
        shown = "; ".join(problems[:10])
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ReplicaError(f"replicas are not bit-equal: {shown}{more}")


def _differing(ranks: dict[int, dict[str, str]]) -> list[tuple[str, dict[str | None, list[int]]]]:
    """What differs between ranks, and which ranks agree on it."""
    found = []
    for name in dict.fromkeys(name for one in ranks.values() for name in one):
        groups = ranks_by_value({number: one.get(name) for number, one in ranks.items()})
        if len(groups) > 1:
            found.append((name, groups))
    return found


def is_due(steps: int, every: int = 0) -> bool:
    """Whether replicas are compared after so many steps. every: the user's choice; 0: none."""
    if every:
        return steps > 0 and steps % every == 0
    if steps >= _LONGEST_INTERVAL:
        return steps % _LONGEST_INTERVAL == 0
    return steps > 0 and steps & (steps - 1) == 0


def mode_from_environment() -> int:
    text = os.environ.get("DAD_CHECK_REPLICAS", "1").strip().lower()
    modes = {"0": _OFF, "1": _WARN, "": _WARN, "raise": _RAISE}
    if text not in modes:
        raise ValueError(f'DAD_CHECK_REPLICAS="{text}": expected 0, 1 or raise')
    return modes[text]


def every_from_environment() -> int:
    text = os.environ.get("DAD_CHECK_EVERY", "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f'DAD_CHECK_EVERY="{text}": expected a number of steps')
    return int(text)


_compared_scripts = False


def _script_facts(ranks: Ranks) -> dict[str, Any]:
    """Which script this rank runs: "train.py 1f3a9c2e"."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        with open(file or "", "rb") as script:
            digest = hashlib.blake2b(script.read(), digest_size=4).hexdigest()
    except OSError:
        return {"rank": ranks.rank_in_job, "script": ""}
    return {"rank": ranks.rank_in_job, "script": f"{os.path.basename(file or '')} {digest}"}


def _compare_scripts(ranks: Ranks, all_facts: Sequence[dict[str, Any]]) -> None:
    """Warns once if hosts have different versions of the script."""
    global _compared_scripts
    scripts = {facts["rank"]: facts["script"] for facts in all_facts if facts["script"]}
    if _compared_scripts or len(set(scripts.values())) < 2:
        return
    _compared_scripts = True
    if ranks.rank == 0:
        log.warning(
            "ranks run different versions of the script: %s. Copy the same files to all hosts",
            who_has_what(scripts),
        )


@dataclass(frozen=True)
class Replica:
    """What one rank has.

    tensors: hashes by name. outside: names of tensors that no DistributedOptimizer trains.
    """

    settings: dict[str, str]
    tensors: dict[str, str]
    outside: frozenset[str] = frozenset()

    @staticmethod
    def of(
        tensors: Iterable[tuple[str, Any]],
        settings: dict[str, str],
        outside: Iterable[tuple[str, Any]] = (),
    ) -> Replica:
        """Tensors come as contiguous memory."""
        inside = {name: f"{_core.digest(memory):x}" for name, memory in tensors}
        others: dict[str, str] = {}
        for name, memory in outside:
            number = 2
            unique = name
            while unique in inside or unique in others:  # a layer of another model may have the same name
                unique, number = f"{name}.{number}", number + 1
            others[unique] = f"{_core.digest(memory):x}"
        return Replica(settings, {**inside, **others}, frozenset(others))

    def digest(self) -> str:
        text = json.dumps([self.settings, self.tensors])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass
class Cures:
    """How users make replicas equal, in the words of their framework."""

    tensors: str
    settings: str
    outside: str


CURES_OF_VARIABLES = Cures(
    tensors="Use BroadcastGlobalVariablesCallback(0), or call hvd.broadcast_variables(model.variables, "
    "root_rank=0) after the first step",
    settings="Give all ranks the same settings and schedules",
    outside="No DistributedOptimizer or tape reduces its gradients, so nothing keeps it equal: train it with "
    "one, broadcast it if it is not trained, or say that it is this rank's own by register_local_var()",
)


CURES_OF_SESSIONS = replace(
    CURES_OF_VARIABLES,
    tensors="Run hvd.broadcast_global_variables(0) when the session begins, or use "
    "BroadcastGlobalVariablesHook(0)",
)


@dataclass
class _Comparison:
    steps: int
    replica: Replica | None
    gather: Gather


@dataclass
class ReplicaCheck:
    """The comparisons of one optimizer's replicas; see the head of this file.

    steps: that this optimizer has made, the same on all ranks.
    """

    ranks: Ranks
    cures: Cures
    steps: int = 0
    _mode: int = field(default_factory=mode_from_environment)
    _every: int = field(default_factory=every_from_environment)
    _running: _Comparison | None = None
    _equal_after: int | None = None
    _told: set[str] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        """What ranks tell each other when they compare what their optimizers were made with."""
        return {"steps": self.steps, "mode": self._mode, "every": self._every, **_script_facts(self.ranks)}

    def agree(self, all_facts: Sequence[dict[str, Any]]) -> None:
        """All ranks compare in the same steps, or none does: one rank that does not want to is enough."""
        self.steps = max(facts["steps"] for facts in all_facts)
        modes = [facts["mode"] for facts in all_facts]
        self._mode = _OFF if _OFF in modes else max(modes)
        _compare_scripts(self.ranks, all_facts)
        self._every = min((facts["every"] for facts in all_facts if facts["every"]), default=0)

    def start_anew(self) -> None:
        """A checkpoint was loaded: replicas may have become different."""
        self.steps = 0
        self._equal_after = None

    def is_running(self) -> bool:
        return self._running is not None

    def is_due(self) -> bool:
        """Whether the step that begins is one that compares."""
        return self._mode != _OFF and is_due(self.steps, self._every)

    def next_due(self) -> int | None:
        """The next step count, from `steps` on, after which replicas are compared."""
        if self._mode == _OFF:
            return None
        steps = self.steps
        while not is_due(steps, self._every):
            steps += 1
        return steps

    def begin(self, name: str, replica: Callable[[], Replica]) -> None:
        """Call at the start of a step on all ranks. name: of the exchange, the same on all ranks."""
        steps, self.steps = self.steps, self.steps + 1
        self._running = None
        if self._mode == _OFF or not is_due(steps, self._every):
            return
        mine: Replica | None = None
        try:
            mine = replica()
        except Exception:  # the others wait for this rank's hash
            log.debug("replicas cannot be compared", exc_info=True)
        packet = [self.ranks.rank_in_job, steps, _FAILED if mine is None else mine.digest()]
        gather = self.ranks.start_gather(f"replicas.{name}", json.dumps(packet).encode())
        self._running = _Comparison(steps, mine, gather)

    def end(self, name: str) -> None:
        """Call later in that step, on all ranks. Warns once of each difference; raises ReplicaError with
        DAD_CHECK_REPLICAS=raise."""
        running, self._running = self._running, None
        if running is None:
            return
        everyone = [json.loads(one) for one in running.gather.wait()]
        digests = {digest for *_, digest in everyone}
        if len({steps for _, steps, _ in everyone}) > 1 or _FAILED in digests:
            return
        if len(digests) == 1:
            self._equal_after = running.steps
            return
        mine = running.replica
        number = self.ranks.rank_in_job
        packet = [number, mine.settings, mine.tensors, sorted(mine.outside)] if mine else [number, {}, {}, []]
        details = self.ranks.gather(f"replicas.details.{name}", json.dumps(packet).encode())
        message = self._describe(running.steps, [json.loads(one) for one in details])
        if message and self._mode == _RAISE:
            raise ReplicaError(message)
        if message and self.ranks.rank == 0:
            log.warning("%s. This is said once; DAD_CHECK_REPLICAS=0 turns the check off", message)

    def _describe(self, steps: int, everyone: Sequence[Any]) -> str:
        """What has not been reported yet."""
        problems = []
        settings = {number: of for number, of, *_ in everyone}
        for name, _ in _differing(settings):
            if self._tell(f"setting {name}"):
                values = {number: of.get(name, "nothing") for number, of in settings.items()}
                problems.append(f"{name} is {who_has_what(values)}. {self.cures.settings}")
        outside = {name for *_, names in everyone for name in names}
        differing = _differing({number: of for number, _, of, _ in everyone})
        # Something that only one rank knows belongs to no model.
        differing = [
            (name, groups) for name, groups in differing if name not in outside or None not in groups
        ]
        for kind, cure in (("tensors", self._cure_for_tensors()), ("outside", self.cures.outside)):
            members = [
                (name, groups) for name, groups in differing if (name in outside) == (kind == "outside")
            ]
            if members and self._tell(kind):
                name, groups = members[0]
                more = f" and {len(members) - 1} more tensors" if len(members) > 1 else ""
                verb = "differ" if more else "differs"
                parts = " / ".join(name_ranks(one) for one in groups.values())
                problems.append(f'"{name}"{more} {verb} between {parts}. {cure}')
        return f"replicas differ after step {steps}: {'. Also: '.join(problems)}" if problems else ""

    def _cure_for_tensors(self) -> str:
        if self._equal_after is None:
            return self.cures.tensors
        return (
            f"They were equal after step {self._equal_after}: something has changed them on some ranks "
            "since, such as a setting that differs or code that only some ranks run"
        )

    def _tell(self, what: str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        return True
