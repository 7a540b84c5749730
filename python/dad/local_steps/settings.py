"""The options of local steps, as arguments and from outside."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

from dad import dry_run
from dad.local_steps.outer import AVERAGE, Outer
from dad.log import log

VARIABLES = {
    "local_steps": "DAD_LOCAL_STEPS",
    "outer": "DAD_OUTER",
    "fragments": "DAD_FRAGMENTS",
    "delay": "DAD_DELAY",
}
DEFAULTS: dict[str, Any] = {"local_steps": 1, "outer": None, "fragments": 1, "delay": 0}
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min)")


@dataclass(frozen=True)
class LocalSteps:
    """steps: of a round; 0: rounds end by the clock, after `seconds`."""

    steps: int = 1
    seconds: float = 0.0
    outer: Outer | None = None
    fragments: int = 1
    delay: int = 0

    @property
    def is_on(self) -> bool:
        """False: gradients are reduced in every step, as without these options."""
        return self != LocalSteps()

    @property
    def outer_step(self) -> Outer:
        return AVERAGE if self.outer is None else self.outer

    @property
    def length(self) -> str:
        """The length of a round, in words."""
        if self.seconds:
            return f"{self.seconds:g} s"
        return f"{self.steps} step{'s' if self.steps > 1 else ''}"

    def common_options(self) -> dict[str, str]:
        """What ranks must have in common."""
        return {
            "local_steps": f"{self.seconds:g}s" if self.seconds else str(self.steps),
            "outer": "None" if self.outer is None else f"Outer({self.outer.spec()})",
            "fragments": str(self.fragments),
            "delay": str(self.delay),
        }


def resolve(local_steps: Any = 1, outer: Any = None, fragments: Any = 1, delay: Any = 0) -> LocalSteps:
    """The options from the arguments of a DistributedOptimizer; those that have their default are taken from
    the environment.

    Raises:
        ValueError: an option is out of range; names option, value and range.
    """
    given = {"local_steps": local_steps, "outer": outer, "fragments": fragments, "delay": delay}
    chosen = any(given[option] != default for option, default in DEFAULTS.items())
    for option, variable in VARIABLES.items():
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        if chosen:
            _say_not_used(variable, text)
            continue
        given[option] = text
        try:
            parse(
                **{option: text, **({"local_steps": given["local_steps"]} if option == "fragments" else {})}
            )
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from error
    chosen_here = parse(**given)
    # `dad plan` tells of steps that are exchanged one by one.
    return chosen_here if dry_run.current() is None else LocalSteps()


def parse(local_steps: Any = 1, outer: Any = None, fragments: Any = 1, delay: Any = 0) -> LocalSteps:
    """The settings from values, or from texts as the command line has them."""
    steps, seconds = parse_length(local_steps)
    if isinstance(outer, str):
        outer = Outer.parse(outer)
    if outer is not None and not isinstance(outer, Outer):
        raise ValueError(f"outer={outer!r} is not possible; hvd.Outer(lr=…, momentum=…) or None")
    fragments = _integer("fragments", fragments, 1, None)
    if steps and fragments > steps:
        raise ValueError(
            f"fragments={fragments} is not possible with local_steps={steps}; each fragment is exchanged "
            f"after a step of its own, so 1 to {steps}"
        )
    return LocalSteps(steps, seconds, outer, fragments, _integer("delay", delay, 0, 1))


def parse_length(value: Any) -> tuple[int, float]:
    """(steps, seconds) of a round; one of them is 0."""
    expected = 'a whole number of steps from 1, or a time such as "5s", "500ms" or "2min"'
    text = str(value).strip()
    if isinstance(value, str) and (match := _TIME.fullmatch(text)):
        seconds = float(match[1]) * _UNITS[match[2]]
        if seconds > 0:
            return 0, seconds
    elif not isinstance(value, bool) and (isinstance(value, int) or text.isdigit()) and int(text) > 0:
        return int(text), 0.0
    raise ValueError(f"local_steps={value!r} is not possible; {expected}")


def _integer(option: str, value: Any, low: int, high: int | None) -> int:
    text = str(value).strip()
    is_whole = not isinstance(value, bool) and (isinstance(value, int) or text.isdigit())
    if not is_whole or int(text) < low or (high is not None and int(text) > high):
        bounds = f"from {low}" + (f" to {high}" if high is not None else " up")
        raise ValueError(f"{option}={value!r} is not possible; a whole number {bounds}")
    return int(text)


@functools.cache
def _say_not_used(variable: str, text: str) -> None:
    log.warning("%s=%s is not used: the script chooses its local steps by itself", variable, text)
