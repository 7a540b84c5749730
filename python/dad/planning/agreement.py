"""Ranks compare what their optimizers were made with before the first gradient is sent.

Making an optimizer involves no communication, as in Horovod. A rank whose model or options differ would be
noticed only when it sends something that the others do not, and they would wait for ever. Instead, the first
step of an optimizer begins with one small exchange: a hash of its options and tensors. If the hashes differ,
ranks exchange the descriptions themselves, and all of them raise an error that names the first difference.

The comparison is repeated where ranks may have parted: after join(), after init(), after a checkpoint was
loaded and after parameters were added. All ranks reach these points in the same step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dad.basics import Adasum, Average, Max, Min, Product, Sum
from dad.errors import MismatchError
from dad.methods.compression import Method
from dad.planning.ranks import Gather, Ranks
from dad.rank_groups import who_has_what

Facts = dict[str, Any]

_OPS = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product", Adasum: "Adasum"}
_MOST_CHARACTERS = 200  # of one value in a message


@dataclass(frozen=True)
class Description:
    """What an optimizer or tape was made with.

    options: its arguments, as text. tensors: (name, shape and dtype) in its order.
    """

    options: dict[str, str]
    tensors: list[tuple[str, str]]
    what: str = "DistributedOptimizer"

    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=16).hexdigest()


class Agreement:
    """Detects whether all ranks have made the same optimizer.

    framework: distinguishes this optimizer from those of other frameworks in the same process.
    """

    def __init__(self, ranks: Ranks, framework: str) -> None:
        self.name = ""  # the same on all ranks, since the last comparison
        self._ranks = ranks
        self._framework = framework
        self._compared_at: tuple[int, int] | None = None
        self._running: tuple[str, Gather] | None = None  # the digest of what is compared, and its exchange

    def is_due(self) -> bool:
        return self._compared_at != self._ranks.epoch

    def doubt(self) -> None:
        """Something may have happened that not all ranks know of: they compare again in the next step."""
        self._compared_at = None

    def begin(self, described: Description, facts: Facts) -> None:
        """Starts the comparison that settle() ends, unless it has been started. Does not wait."""
        mine = described.digest()
        if self._running is not None:
            if self._running[0] == mine:
                return
            self._running[1].wait()  # parameters were added since, on all ranks
        self._compared_at = None
        # Optimizers are numbered in the order in which they are compared, which is the order of their first
        # steps: a rank may have made optimizers that it does not use.
        self.name = f"{self._framework}.{self._ranks.next_number(self._framework)}"
        self._running = mine, self._start("settings", [self._ranks.rank_in_job, mine, facts])

    def is_over(self, seconds: float) -> bool:
        """Whether all ranks have started the comparison by that time."""
        return self._running is not None and self._running[1].wait_for(seconds)

    def settle(self, described: Description, facts: Facts) -> list[Facts]:
        """Compares with the other ranks. Returns what each of them says besides, in rank order; ranks that
        have joined say nothing. Raises MismatchError on all ranks if they differ."""
        self.begin(described, facts)
        assert self._running is not None
        (_, gather), self._running = self._running, None
        everyone = [json.loads(one) for one in gather.wait()]
        if len({digest for _, digest, _ in everyone}) > 1:
            self._raise(described)
        self._compared_at = self._ranks.epoch
        return [facts for *_, facts in everyone]

    def _raise(self, described: Description) -> None:
        gather = self._start("settings.details", [self._ranks.rank_in_job, asdict(described)])
        everyone = [json.loads(one) for one in gather.wait()]
        raise MismatchError(difference({number: Description(**one) for number, one in everyone}))

    def _start(self, what: str, mine: Any) -> Gather:
        return self._ranks.start_gather(f"{what}.{self.name}", json.dumps(mine).encode())


def common_options(*, compression: Any, op: int, **others: Any) -> dict[str, str]:
    """The options of an optimizer in the form that a Description holds."""
    if isinstance(compression, type) and issubclass(compression, Method):
        compression = compression()  # hvd.Compression.fp16, say
    is_ours = isinstance(compression, Method)
    spec = compression.spec() if is_ours else getattr(compression, "__name__", type(compression).__name__)
    return {"compression": spec, "op": _OPS[op], **{name: str(value) for name, value in others.items()}}


def named_groups(groups: Any, name_of: Callable[[Any], str | None]) -> Any:
    """The groups= of an optimizer, with the names of its tensors; a number of groups as it is."""
    if not isinstance(groups, list | tuple):
        return groups
    return [[name_of(tensor) or "?" for tensor in group] for group in groups]


def difference(ranks: dict[int, Description]) -> str:
    """The first difference between these descriptions, as a message."""
    first = next(iter(ranks.values()))
    kinds = {number: one.what for number, one in ranks.items()}
    if len(set(kinds.values())) > 1:
        return f"ranks disagree on what reduces gradients: {who_has_what(kinds)}"
    for option in dict.fromkeys(key for one in ranks.values() for key in one.options):
        values = {number: _shortened(one.options.get(option, "not given")) for number, one in ranks.items()}
        if len({one.options.get(option) for one in ranks.values()}) > 1:
            return (
                f"ranks disagree on the options of their {first.what}: {option} {who_has_what(values)}. "
                f"Give all ranks the same {option}"
            )
    by_name = {number: dict(one.tensors) for number, one in ranks.items()}
    for name in dict.fromkeys(name for tensors in by_name.values() for name in tensors):
        values = {number: tensors.get(name, "nothing") for number, tensors in by_name.items()}
        if len(set(values.values())) > 1:
            counts = {number: f"{len(one.tensors)} tensors" for number, one in ranks.items()}
            more = f" ({who_has_what(counts)})" if len(set(counts.values())) > 1 else ""
            return (
                f'ranks disagree on the tensors of their {first.what}: "{name}" is {who_has_what(values)}'
                f"{more}. Build the same model on all ranks"
            )
    for place, names in enumerate(zip(*([n for n, _ in one.tensors] for one in ranks.values()), strict=True)):
        if len(set(names)) > 1:
            values = {number: f'"{name}"' for number, name in zip(ranks, names, strict=True)}
            return (
                f"ranks disagree on the order of the tensors of their {first.what}: number {place} is "
                f"{who_has_what(values)}. Give all ranks the tensors in the same order"
            )
    return f"ranks disagree on what their {first.what} was made with"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
