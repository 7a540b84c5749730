"""`dad plan train.py`: runs a script in this process until its optimizers have seen a step and a few more
have been timed, then prints what every method would send and ends the process."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from dad import dry_run
from dad.methods import compression as _methods
from dad.planning.compare import METHODS, asked_for, compare
from dad.planning.link import line_of, product_rate

# Steps to time after the observed one, which is slower than the others; and the time limit for them.
_TIMED_STEPS = 5
_TIMED_SECONDS = 20.0
_LOOK_SECONDS = 0.002


class PlanError(ValueError):
    """There is no such script, or its arguments make no sense."""


def plan_script(
    command: Sequence[str], size: int, link: str, methods: Sequence[str] = (), width: int | None = None
) -> int:
    """Runs the script; returns the exit code. At the script's last step, this process ends in here.

    Args:
        command: the script and its arguments; `python` in front of it is left out.
        size: the number of ranks that the script sees.
        link: what a rank can send, such as 100mbit,25ms.
        methods: names or specs; empty: all.
        width: of the table of layers; None: that of the terminal.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or words[0].startswith("-"):
        raise PlanError("give a script: dad plan train.py (python -m and -c are not possible here)")
    if not Path(words[0]).is_file():
        raise PlanError(f"{words[0]}: there is no such script")
    if size < 1:
        raise PlanError(f"--size {size} is not possible; a number of ranks, 1 or more")
    line_of(link)
    for spec in methods:
        _methods.parse(spec)
    run = _Run(dry_run.begin(size), link, methods, width)
    threading.Thread(target=run.watch, name="dad plan", daemon=True).start()
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    problem = f"{words[0]} has ended"
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            problem = f"{words[0]} has ended with {error.code}"
    except BaseException as error:
        traceback.print_exc()
        problem = f"{words[0]} has failed ({type(error).__name__})"
    run.end(problem)
    return 1


class _Run:
    """Watches the script from another thread."""

    def __init__(
        self, seen: dry_run.DryRun, link: str, methods: Sequence[str], width: int | None = None
    ) -> None:
        self._seen = seen
        self._link = link
        self._methods = methods or METHODS
        self._width = width
        self._compute_seconds: float | None = None
        self._lock = threading.Lock()  # decides who ends the process

    def watch(self) -> None:
        """Times steps, then ends the process."""
        while (steps := self._seen.steps) is None:
            time.sleep(_LOOK_SECONDS)
        first, began = self._next(steps, steps())
        ends = time.monotonic() + _TIMED_SECONDS
        step, now = first, began
        while step < first + _TIMED_STEPS and now < ends:
            step, now = self._next(steps, step)
            self._compute_seconds = (now - began) / (step - first)
        self.end("")

    def _next(self, steps: object, last: int) -> tuple[int, float]:
        assert callable(steps)
        while (step := steps()) == last:
            time.sleep(_LOOK_SECONDS)
        return step, time.monotonic()

    def end(self, problem: str) -> None:
        """Prints the result. The process ends here, because a script that is stopped in the middle cannot be
        asked to return."""
        with self._lock:
            code = 0
            sys.stdout.flush()
            try:
                print(self._text(problem), flush=True)
            except _Nothing as nothing:
                code = 1
                print(f"dad: {nothing}", file=sys.stderr, flush=True)
            except Exception:
                code = 1
                traceback.print_exc()
            sys.stderr.flush()
            for child in multiprocessing.active_children():
                child.terminate()
            os._exit(code)

    def _text(self, problem: str) -> str:
        seen = self._seen
        if not seen.tensors:
            raise _Nothing(
                f"{problem} before an optimizer of dad had seen a step: does it call "
                "DistributedOptimizer or DistributedGradientTape, and step()?"
            )
        rate = product_rate() if seen.multiply is None else product_rate(seen.multiply)
        comparison = compare(
            list(seen.tensors.values()),
            seen.seen,
            seen.size,
            line_of(self._link),
            rate,
            self._compute_seconds,
            self._methods,
            asked_for(seen.asked),
        )
        return f"\n{comparison.text(self._width)}"


class _Nothing(Exception):
    """The script ended too early."""
