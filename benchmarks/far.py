"""Ranks that are far apart: is `auto` ever slower than another method, and what do local steps save?

Claims: the column `bar`. In each cell all ways take turns in the same processes. `auto` and `exact` are
compared with the best method of their class and with DDP, and what their plans predicted with what was
measured; local steps with steps without communication.

    python benchmarks/far.py                                    all cells: hours on two cores
    python benchmarks/far.py --cell "mlp 100mbit 25ms 4" --cell "mlp 100mbit 25ms 2 local steps"
    python benchmarks/far.py --quick                            two cells

What was measured replaces the rows of the same cells in benchmarks/results/far.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contest import Timing, say, take_turns
from lab import HERE, LaunchError, Link, launch, why_not
from methods import WARM_UP, sgd
from models import MODELS, batch
from report import Result, Row, Settings, main, progress
from trainers import make_trainer

RESULTS = HERE / "results" / "far.json"
LINKS = [Link(rate, delay) for rate in ("100mbit", "1gbit", "none") for delay in (0, 10, 25)]
SINGLES = ("none", "dad", "edad", "rank_dad", "int8")
EXACT = ("none", "dad", "edad")
PLANNED = ("auto", "exact")
# Steps before timing: auto's warm-up, its plan, and the schedule after it.
PLANNED_WARM_UP = WARM_UP + 6
WITHIN = 0.2  # of what was measured, for a prediction


@dataclass(frozen=True)
class Cell:
    """One run. `ways` of local_steps.py with their bars, of a step without communication; empty: methods."""

    model: str
    link: Link
    ranks: int
    ways: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        link = str(self.link) if self.link.is_shaped else "unshaped"
        return f"{self.model} {link} {self.ranks}" + (" local steps" if self.ways else "")


_FAR = Link("100mbit", 25)
CELLS = [
    *(
        Cell(model, link, ranks)
        for model, link, ranks in itertools.product(
            ("mlp", "bigfc", "cnn", "gru", "transformer"), LINKS, (2, 4)
        )
    ),
    Cell("mlp", _FAR, 2, (("rank_dad H=8", 1.6), ("rank_dad H=32", 1.15), ("rank_dad H=8 delay", 1.1))),
    Cell("mlp", _FAR, 4, (("rank_dad H=8", 1.6), ("rank_dad H=32", 1.15), ("rank_dad H=8 delay", 1.1))),
    Cell("transformer", _FAR, 2, (("rank_dad H=8", 1.05), ("rank_dad delay", 1.05))),
    Cell("transformer", _FAR, 4, (("rank_dad H=8", 1.05), ("rank_dad delay", 1.05))),
]
QUICK = ("mlp 100mbit 25ms 2", "mlp unshaped 2")


def work(parameters: dict[str, Any]) -> dict[str, Any]:
    """ms of a step by each way, and what plans predict that communication adds."""
    import torch
    import torch.nn.functional as F

    model_name = parameters["model"]
    inputs, targets = batch(model_name)
    optimizers = {}
    steps = {}
    for way in ("local", "ddp", *SINGLES, *PLANNED):
        torch.manual_seed(1)
        trainer = make_trainer(way, MODELS[model_name](), sgd, prefix=f"{model_name}.{way}.")
        optimizers[way] = trainer.optimizer

        def step(trainer: Any = trainer) -> None:
            trainer.optimizer.zero_grad()
            F.cross_entropy(trainer.model(inputs), targets).backward()
            trainer.optimizer.step()

        steps[way] = step
    say(f"{model_name}: about {parameters['seconds']:g} s or a few steps")
    timings: dict[str, Timing] = take_turns(
        steps, parameters["seconds"], warm_up=PLANNED_WARM_UP, even_time=True
    )
    plans = {way: optimizers[way].plan() for way in PLANNED}
    return {
        "ms": {way: timing.ms for way, timing in timings.items()},
        "predicted": {way: plan.predicted_ms for way, plan in plans.items()},
        "methods": {way: sorted({row["method"] for row in plan}) for way, plan in plans.items()},
    }


def rows_of(cell: Cell, done: dict[str, Any]) -> list[Row]:
    ms = done["ms"]
    rows = []
    for way, singles in (("auto", SINGLES), ("exact", EXACT)):
        best = min(singles, key=lambda single: ms[single])
        chose = ", ".join(done["methods"][way])
        rows.append(row_of(cell, f"{way} / {best}", ms[way] / ms[best], 1.10, ms[way], chose))
        predicted = ms["local"] + done["predicted"][way]
        off = abs(predicted / ms[way] - 1)
        rows.append(row_of(cell, f"{way}, prediction off by", off, WITHIN, predicted, chose))
    rows.insert(1, row_of(cell, "auto / DDP", ms["auto"] / ms["ddp"], 1.03, ms["ddp"], ""))
    return rows


def row_of(cell: Cell, what: str, figure: float, bar: float, ms: float, note: str) -> Row:
    return {
        "cell": cell.name,
        "what": what,
        "figure": round(figure, 3),
        "bar": bar,
        "holds": "yes" if figure <= bar else "no",
        "ms": round(ms, 2),
        "sent by": note,
    }


def measure(cell: Cell, seconds: float, blocks: int) -> list[Row]:
    if not cell.ways:
        parameters = {"model": cell.model, "seconds": seconds}
        return rows_of(cell, launch("far", parameters, cell.ranks, cell.link, timeout=1800)[0])
    parameters = {"model": cell.model, "blocks": blocks, "ways": ["local", *(way for way, _ in cell.ways)]}
    by_rank = launch("local_steps", parameters, cell.ranks, cell.link, timeout=3600)
    ms = {way: 1e3 * max(rank[way][0] for rank in by_rank) for way in by_rank[0]}
    return [
        row_of(cell, f"{way} / local", ms[way] / ms["local"], bar, ms[way], way.partition(" ")[0])
        for way, bar in cell.ways
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cell", action="append", choices=[cell.name for cell in CELLS], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the timed steps of a cell")
    parser.add_argument("--blocks", type=int, default=5, help="of 64 steps each, with local steps")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")


def run(settings: Settings) -> Result:
    options = settings.options_or_defaults(add_options)
    wanted = options.cell or (QUICK if settings.quick else [cell.name for cell in CELLS])
    result = Result("ranks that are far apart: figures against their bars (ms: of what the row is about)")
    for cell in CELLS:
        if cell.name not in wanted:
            continue
        reason = why_not(cell.link)
        if reason:
            result.left_out.append(f"{cell.name}: {reason}")
            continue
        progress(f"far: {cell.name}")
        try:
            rows = measure(cell, 8.0 if settings.quick else options.seconds, options.blocks)
        except LaunchError as error:
            result.failed.append(f"{cell.name}: {error}")
            continue
        result.rows += rows
        if not settings.quick:  # what results/ has comes from whole runs
            keep(result.title, rows, options.results)
    return result


def keep(title: str, rows: list[Row], path: Path) -> None:
    """Puts these rows into the file, instead of those of the same cells."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    cells = {row["cell"] for row in rows}
    order = {cell.name: i for i, cell in enumerate(CELLS)}
    all_rows = [row for row in known if row["cell"] not in cells] + rows
    all_rows.sort(key=lambda row: order[row["cell"]])
    path.write_text(json.dumps(asdict(Result(title, all_rows)), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(run, __doc__, add_options))
