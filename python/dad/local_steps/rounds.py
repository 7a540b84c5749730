"""Rounds of local steps: what is exchanged when, and what becomes of the weights.

A rank takes `steps` steps by itself and then sends the change of its weights; a mean of the changes over the
ranks, weighted by the samples that each has seen, goes into an outer step, the same on all ranks. With
fragments the model is cut into parts that are exchanged in turn, each at its own place of the round. A turn
is what lies between two such places; with one fragment it is the round.

A fragment has common weights (`start`: the same bits on all ranks) and this rank's own, on which it trains.
What is sent is `anchor - own`, and then

    waits for the result      own = start = outer(start, M)
    delay, one fragment       own = start' + (own - anchor), where anchor was set to own when it was sent:
    what
                              came after it is kept as it is and is part of the next change
    several fragments         own = a own + (1 - a) start', a = 1/2: as in Streaming DiLoCo (arXiv:2501.18512)

Every step of a rank is sent once: the sum of all M and of what methods keep is that of all changes.

Weights by samples do not cost a message that the data would have to wait for: changes are sent in units of a
number of samples that all ranks know, the mean of the turn before, and the result is put right by the sum of
the samples, which travels beside it.

If an exchange fails nothing has changed; the next turn sends what that one would have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from dad._lib import _core
from dad.errors import MismatchError
from dad.local_steps.clock import Clock, CountClock, TimeClock
from dad.local_steps.outer import Outer
from dad.local_steps.settings import LocalSteps
from dad.rank_groups import who_has_what

_BLEND = 0.5  # of a rank's own weights, where fragments travel while training goes on

Tensors = list[Any]


class Part(Protocol):
    """The tensors of a fragment in a framework, and the way on which their changes travel."""

    def weights(self) -> Tensors:
        """This rank's own, as they are; not copies."""

    def assign(self, values: Tensors) -> None:
        """Sets this rank's own weights."""

    def hold(self, values: Tensors) -> Tensors:
        """A copy of the common weights, in the same memory each time."""

    def copy(self, values: Tensors) -> Tensors: ...

    def send(self, changes: Tensors) -> None:
        """Starts an exchange by which every rank gets the mean of the ranks' changes. May overwrite them."""

    def receive(self) -> Tensors:
        """Waits for it."""

    def send_samples(self, samples: float) -> None: ...

    def receive_samples(self) -> float:
        """The sum over the ranks."""

    def broadcast(self, values: Tensors, root: int) -> Tensors:
        """The values of a rank of the process set, on all of them."""


class Fragment:
    def __init__(self, part: Part, outer: Outer, blends: bool) -> None:
        self.part = part
        self.start: Tensors | None = None  # None: as the weights are when the next round begins
        self.anchor: Tensors | None = None  # what the next change is counted from
        self.momentum: Tensors | None = None
        self.arrived: Tensors | None = None  # the mean of an exchange that is over and not merged yet
        self.samples_sent = 0.0  # of all that this rank has seen
        self.samples_unit: float | None = None  # the same on all ranks
        self._factor = 0.0  # of a sample unit in the exchange that is in flight
        self._seen = 0.0  # `samples_sent` when it has arrived
        self._outer = outer
        self._blends = blends

    def begin(self) -> None:
        if self.start is None:
            self.start = self.anchor = self.part.hold(self.part.weights())

    def send(self, seen: float, size: int, goes_on: bool) -> None:
        """seen: samples of this rank in all. goes_on: it trains while this is in flight."""
        samples, self._seen = seen - self.samples_sent, seen
        self.part.send_samples(samples)
        if self.samples_unit is None:
            self.samples_unit = max(self.part.receive_samples() / size, 1.0)
            self.part.send_samples(samples)
        weight = samples / self.samples_unit
        own = self.part.weights()
        changes = [a - w for a, w in zip(self.anchor or (), own, strict=True)]
        self.part.send(changes if weight == 1 else [change * weight for change in changes])
        self._factor = size * self.samples_unit
        if goes_on and not self._blends:
            self.anchor = self.part.copy(own)

    def receive(self, size: int) -> None:
        """Waits for the mean. An exchange that failed is part of the next one."""
        if self.arrived is not None:
            return
        try:
            mean = self.part.receive()
            samples = self.part.receive_samples()
        except BaseException:
            self.anchor = self.start
            raise
        self.samples_sent = self._seen
        if not samples:
            self.arrived = []  # nobody has taken a step
            return
        factor = self._factor / samples
        self.samples_unit = max(samples / size, 1.0)
        self.arrived = mean if factor == 1 else [m * factor for m in mean]

    def merge(self, goes_on: bool) -> None:
        """goes_on: this rank has trained since it sent."""
        mean, self.arrived = self.arrived, None
        new = list(self.start or ())
        if mean:
            new, self.momentum = self._outer.step(new, mean, self.momentum)
        if not goes_on:
            own = new
        elif self._blends:
            own = [_BLEND * w + (1 - _BLEND) * n for w, n in zip(self.part.weights(), new, strict=True)]
        else:
            anchor = self.anchor or ()
            own = [n + (w - a) for n, w, a in zip(new, self.part.weights(), anchor, strict=True)]
        self.part.assign(own)
        # Else the next round begins with what the weights are then, for users may set them.
        self.start = self.anchor = self.part.hold(new) if goes_on else None

    def abandon(self) -> None:
        """What was in flight is lost with the engine; this rank's part of it is sent again."""
        if self.arrived is None:
            self.anchor = self.start

    def reset(self) -> None:
        self.start = self.anchor = self.momentum = self.arrived = self.samples_unit = None
        self.samples_sent = 0.0


class Rounds:
    """The rounds of one optimizer.

    parts: its fragments. name: of this optimizer, the same on all ranks. place: rank and size in its process
    set. epoch: changes where ranks may have parted, after init() and join(), on all ranks alike.
    """

    def __init__(
        self, settings: LocalSteps, parts: Sequence[Part], name: str, process_set: Any, epoch: Any
    ) -> None:
        self.settings = settings
        several = len(parts) > 1
        self.fragments = [Fragment(part, settings.outer_step, blends=several) for part in parts]
        self._most_in_flight = several + settings.delay
        self._name = name
        self._process_set = process_set
        self._epoch = epoch
        self._agreed_at: Any = None
        self.clock: Clock = (
            TimeClock(settings.seconds / len(parts), name, process_set)
            if settings.seconds
            else CountClock(settings.steps, len(parts))
        )
        self.turn = 0
        self.steps = 0  # in this round
        self.rounds = 0  # that are over
        self.samples = 0.0  # that this rank has seen in all
        self._samples_before_step = 0.0
        self._in_flight: list[Fragment] = []  # the oldest first

    # In every step

    def begin_step(self) -> None:
        """Before the weights change."""
        if self._agreed_at != self._epoch():
            self._agree()
        for fragment in self.fragments:
            fragment.begin()
        self.clock.begin_step(self.turn)

    def saw(self, samples: float) -> None:
        """This rank has had a batch."""
        self.samples += samples

    def step_done(self, steps: int = 1) -> bool:
        """After the weights have changed; whether a turn has ended. steps: more than one where a graph makes
        several in a run."""
        self.steps += steps
        if self.samples == self._samples_before_step:
            self.samples += steps  # nobody told how many there were
        self._samples_before_step = self.samples
        if not self.clock.is_over(self.turn, self.steps):
            return False
        self._end_turn()
        return True

    def _end_turn(self) -> None:
        fragment = self.fragments[self.turn % len(self.fragments)]
        waits = self._most_in_flight == 0
        if not waits and len(self._in_flight) >= self._most_in_flight:
            self._merge_oldest()
        fragment.send(self.samples, self._process_set.size(), goes_on=not waits)
        if waits:
            fragment.receive(self._process_set.size())
            fragment.merge(goes_on=False)
        else:
            self._in_flight.append(fragment)
        self._next_turn()

    def _merge_oldest(self) -> None:
        fragment = self._in_flight[0]
        try:
            fragment.receive(self._process_set.size())
        finally:
            self._in_flight.pop(0)
        fragment.merge(goes_on=True)

    def _next_turn(self) -> None:
        self.turn += 1
        if self.turn == len(self.fragments):
            self._next_round()

    def _next_round(self) -> None:
        self.turn = self.steps = 0
        self.rounds += 1

    # Now and then

    @property
    def is_between(self) -> bool:
        """Whether ranks have the same weights: nothing is in flight and no step was taken since."""
        return not self._in_flight and all(fragment.start is None for fragment in self.fragments)

    def doubt(self) -> None:
        """Something may have happened on other ranks that this one does not know of: they meet in the next
        step."""
        self._agreed_at = None

    def end_round(self, alone: bool = False) -> bool:
        """Sends what has not been sent, and waits until all ranks have the same weights; whether there was
        anything to do. alone: the others go on, for this rank is about to join; else all ranks call it."""
        if self._agreed_at != self._epoch():
            if alone:
                return False  # it has taken no step since they met
            self._agree()
        if alone:
            rest = not self.is_between
        else:
            self._meet_in_time()
            name, mine = f"local_steps.{self._name}.end", b"" if self.is_between else b"1"
            rest = any(_core.gather_bytes(name, mine, self._process_set.process_set_id))
        if not rest:
            return False
        size = self._process_set.size()
        # In the order in which ranks that go on come to them.
        places = range(self.turn, self.turn + len(self.fragments))
        order = [self.fragments[place % len(self.fragments)] for place in places]
        for fragment in order:
            if alone:
                self.clock.end_turn(self.turn, ends_round=False)
            while fragment in self._in_flight:
                self._merge_oldest()
            fragment.begin()
            fragment.send(self.samples, size, goes_on=False)
        while self._in_flight:
            self._merge_oldest()
        for fragment in order:
            fragment.receive(size)
            fragment.merge(goes_on=False)
        self._next_round()
        return True

    def _meet_in_time(self) -> None:
        """By the clock some ranks come to the end of a turn while others have called end_round() already:
        these take part in the turns of the others until all have called it."""
        while not self.clock.all_end_round:
            for fragment in self.fragments:
                fragment.begin()
            self.clock.end_turn(self.turn, ends_round=True)
            self._end_turn()
        self.clock.begin_round()

    def _agree(self) -> None:
        """Ranks that come new into a job, or have loaded something else, take the common weights and the
        place in the round from the one that has made the most rounds."""
        if self._agreed_at is not None and self._agreed_at[0] != self._epoch()[0]:
            self.clock.forget()
            for fragment in self._in_flight:
                fragment.abandon()
            self._in_flight = [fragment for fragment in self._in_flight if fragment.arrived is not None]
        here = {**self._where(), "options": self.settings.common_options()}
        data = json.dumps([self._process_set.rank(), here]).encode()
        gathered = _core.gather_bytes(f"local_steps.{self._name}", data, self._process_set.process_set_id)
        everyone = dict(json.loads(one) for one in gathered)
        self._require_the_same({rank: one.pop("options") for rank, one in everyone.items()})
        if len({json.dumps(one) for one in everyone.values()}) > 1:
            leader = max(everyone, key=lambda rank: (everyone[rank]["rounds"], -rank))
            self._follow(leader, everyone[leader])
        self._agreed_at = self._epoch()

    @staticmethod
    def _require_the_same(options: dict[int, dict[str, str]]) -> None:
        for option in next(iter(options.values())):
            values = {rank: one[option] for rank, one in options.items()}
            if len(set(values.values())) > 1:
                raise MismatchError(
                    f"ranks disagree on the options of their DistributedOptimizer: {option} "
                    f"{who_has_what(values)}. Give all ranks the same {option}"
                )

    def _where(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "turn": self.turn,
            "in flight": [self.fragments.index(fragment) for fragment in self._in_flight],
            "begun": [fragment.start is not None for fragment in self.fragments],
            "momentum": [fragment.momentum is not None for fragment in self.fragments],
            "unit": [fragment.samples_unit for fragment in self.fragments],
        }

    def _follow(self, leader: int, where: dict[str, Any]) -> None:
        self.rounds, self.turn = where["rounds"], where["turn"]
        self.steps = max(self.steps, self.clock.first_step(self.turn))
        self._in_flight = [self.fragments[i] for i in where["in flight"]]
        for i, fragment in enumerate(self.fragments):
            part, like = fragment.part, fragment.part.weights()
            is_new = fragment.start is None
            start = part.broadcast(like if is_new else fragment.start, leader)
            if is_new:
                part.assign(start)
            if where["begun"][i]:
                keeps_anchor = not is_new and fragment.anchor is not fragment.start
                fragment.start = part.hold(start)
                fragment.anchor = fragment.anchor if keeps_anchor else fragment.start
            else:
                fragment.start = fragment.anchor = None
            fragment.samples_unit = where["unit"][i]
            has_momentum = where["momentum"][i]
            fragment.momentum = part.broadcast(fragment.momentum or like, leader) if has_momentum else None
            in_flight = fragment in self._in_flight
            fragment.arrived = part.broadcast(fragment.arrived or like, leader) if in_flight else None

    # Checkpoints

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks have in common, and what is this rank's own. Waits for what is in flight, which
        changes nothing."""
        for fragment in self._in_flight:
            fragment.receive(self._process_set.size())
        common = {
            **self._where(),
            "starts": [fragment.start for fragment in self.fragments],
            "momenta": [fragment.momentum for fragment in self.fragments],
            "arrived": [fragment.arrived for fragment in self.fragments],
        }
        own = {
            "steps": self.steps,
            "samples": [self.samples - fragment.samples_sent for fragment in self.fragments],
            "weights": [None if f.start is None else f.part.weights() for f in self.fragments],
            "anchors": [None if f.anchor is f.start else f.anchor for f in self.fragments],
        }
        return common, own

    def load(self, common: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
        """None: a round begins with the weights as they are. Without what is its own a rank goes on from the
        common weights, which costs what it had not sent."""
        self.turn = self.steps = self.rounds = 0
        self.samples = self._samples_before_step = 0.0
        self._in_flight = []
        self._agreed_at = None
        for fragment in self.fragments:
            fragment.reset()
        if common is None:
            return
        self.rounds, self.turn = common["rounds"], common["turn"]
        self._in_flight = [self.fragments[i] for i in common["in flight"]]
        for i, fragment in enumerate(self.fragments):
            fragment.samples_unit = common["unit"][i]
            fragment.momentum, fragment.arrived = common["momenta"][i], common["arrived"][i]
            if common["starts"][i] is not None:
                fragment.start = fragment.anchor = fragment.part.hold(common["starts"][i])
                fragment.part.assign(own["weights"][i] if own is not None else common["starts"][i])
            if own is not None:
                fragment.samples_sent = -own["samples"][i]
                if own["anchors"][i] is not None:
                    fragment.anchor = own["anchors"][i]
        self.steps = self.clock.first_step(self.turn) if own is None else own["steps"]
