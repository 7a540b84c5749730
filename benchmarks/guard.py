"""Does auto's guard repair a bad plan? Loss on the King James text when auto begins with rank 1, 4 ranks.

Claim: it ends within 0.02 nats of dense.

    python benchmarks/guard.py                    300 steps: an hour on two cores
    python benchmarks/guard.py --steps 2000 --batch 2 --seeds 1 2 3
    python benchmarks/guard.py --quick            a few steps, to see that it runs

The model, its data and its optimizer are those of accuracy_text.py. "planted" begins on rank 1 everywhere;
"unguarded" does too, and nothing watches it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import accuracy_text
from accuracy import RANKS, run_cells, summary
from report import Result, Settings, main

WAYS = {"none": "none", "auto": "auto", "planted": "auto", "unguarded": "auto"}


def work(parameters: dict[str, Any]) -> dict[str, Any]:
    from dad.planning import auto, guard

    way = parameters["method"]
    if way in ("planted", "unguarded"):
        auto.first_rank = lambda layer: 1
    if way == "unguarded":
        guard.LEAST_CAPTURED = 0.0
    return accuracy_text.work({**parameters, "method": WAYS[way]})


def add_options(parser: argparse.ArgumentParser) -> None:
    accuracy_text.add_options(parser)
    csv = parser.get_default("csv").with_name("guard.csv")
    parser.set_defaults(methods=list(WAYS), steps=300, batch=1, seeds=[1], csv=csv)


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    result = Result(
        f"King James Bible, {RANKS} ranks, {options.steps} steps of {options.batch} sequences each: nats per "
        "byte of held-out text"
    )
    cells = [
        accuracy_text.cell(settings, options, way, seed)
        for seed in (options.seeds[:1] if settings.quick else options.seeds)
        for way in options.methods
    ]
    rows = run_cells("guard", cells, options, result, timeout=6 * 3600)
    result.rows = summary(rows, "nats")
    return result


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
