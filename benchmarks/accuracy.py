"""What the accuracy benchmarks share: the cells of a table, a CSV file that grows with them, the summary.

A cell is one training of one model with one method from one seed, in processes of its own, so that a
run that is ended in between loses one cell and not the night: --resume takes the others from the CSV file.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import say
from lab import HERE, LaunchError, launch
from report import Result, Row, progress
from torch import nn
from trainers import Trainer, make_trainer

import dad
import dad.torch as hvd

RANKS = 4
# The data is read as the examples do it.
sys.path.insert(0, str(HERE.parent / "examples"))


# On every rank


@dataclass
class Run:
    """A training that is over."""

    bytes_sent: float  # by a rank, mean of the ranks, from the first step to the last
    dense_bytes: float  # what a dense allreduce sends in as many steps
    steps: int
    seconds: float

    def as_dict(self, score: float) -> dict[str, Any]:
        return {"score": score} | vars(self)


def train(
    way: str,
    model: nn.Module,
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    steps: int,
    report_every: int,
    on_report: Callable[[int, Trainer], None] | None = None,
) -> Run:
    """Trains by loss_of(model, step), with a learning rate that rises for a twentieth of the steps and
    falls to zero over the rest. `on_report` is told now and then how many steps are done."""
    trainer = make_trainer(way, model, make_optimizer)
    groups = trainer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    rise = max(steps // 20, 1)
    dist.barrier()
    before = trainer.bytes_sent()
    start = time.perf_counter()
    loss_sum = torch.zeros(())
    for step in range(steps):
        factor = min((step + 1) / rise, (steps - step) / (steps - rise) if steps > rise else 1.0)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        trainer.optimizer.zero_grad()
        loss = loss_of(trainer.model, step)
        loss.backward()
        trainer.optimizer.step()
        loss_sum += loss.detach()
        if (step + 1) % report_every == 0 or step + 1 == steps:
            count = step % report_every + 1
            seconds = time.perf_counter() - start
            say(f"step {step + 1}/{steps}: loss {loss_sum.item() / count:.3f} on rank 0, {seconds:.0f} s")
            loss_sum.zero_()
            if on_report is not None:
                on_report(step + 1, trainer)
    seconds = time.perf_counter() - start
    sent = mean_over_ranks(trainer.bytes_sent() - before)
    check(trainer, model)
    elements = sum(param.numel() for param in model.parameters())
    return Run(sent, 2 * (hvd.size() - 1) / hvd.size() * 4 * elements * steps, steps, seconds)


def check(trainer: Trainer, model: nn.Module) -> None:
    """A run that was not what its name says must not get into a table."""
    if trainer.is_dad:
        dad.check_replicas(model)
    elif trainer.powersgd is not None and len(trainer.powersgd.error_dict) != 1:
        raise RuntimeError(f"PowerSGD had {len(trainer.powersgd.error_dict)} buckets instead of one")


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# In the process that the user started


def add_options(parser: argparse.ArgumentParser, name: str, methods: list[str]) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=methods,
        metavar="METHOD",
        help="as dadrun --compression takes them, or ddp, powersgd, powersgd:RANK; default: "
        + " ".join(methods),
    )
    parser.add_argument("--csv", type=Path, default=HERE.parent / "build" / f"{name}.csv", metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="take the cells that FILE has from there")


def run_cells(
    benchmark: str,
    cells: list[Row],
    options: argparse.Namespace,
    result: Result,
    timeout: float,
    only_known: bool = False,
) -> list[Row]:
    """Runs the cells that are not there yet (only_known: leaves them out); what is known of all of them
    afterwards. A cell is what work() gets: numbers and words whose names differ from those of its results."""
    known = _read(options.csv) if options.resume else []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    if not known:
        options.csv.unlink(missing_ok=True)
    done = []
    for cell in cells:
        row = _find(known, cell)
        if row is None and only_known:
            continue
        if row is None:
            progress(f"{benchmark}: " + ", ".join(f"{key} {value}" for key, value in cell.items()))
            try:
                row = cell | launch(benchmark, cell, ranks=RANKS, timeout=timeout)[0]
            except LaunchError as error:
                result.failed.append(f"{cell}: {error}")
                continue
            _append(options.csv, row)
        done.append(row)
    return done


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _find(rows: list[Row], cell: Row) -> Row | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in cell.items())), None)


def _append(path: Path, row: Row) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def summary(rows: list[Row], score_name: str, dense: str = "none", peer: str = "powersgd") -> list[Row]:
    """A row for each model and method: means over the seeds, and over the seeds that dense has too of the
    difference to it."""
    table = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        mine = _of(rows, model, method)
        differences = _differences(mine, _of(rows, model, dense))
        to_peer = _differences(mine, _of(rows, model, peer))
        peer_bytes = _mean([row["bytes_sent"] for row in _of(rows, model, peer)])
        sent = statistics.mean(row["bytes_sent"] for row in mine)
        table.append(
            {
                "model": model,
                "method": method,
                "seeds": len(mine),
                score_name: statistics.mean(row["score"] for row in mine),
                "against dense": _mean(differences),
                "from": min(differences, default=None),
                "to": max(differences, default=None),
                "against PowerSGD": _mean(to_peer),
                "MB sent": sent / 1e6,
                "ratio": _mean([row["dense_bytes"] / row["bytes_sent"] for row in mine]),
                "bytes / PowerSGD's": sent / peer_bytes if peer_bytes else None,
                "steps": mine[0]["steps"],
                "seconds": statistics.mean(row["seconds"] for row in mine),
            }
        )
    return table


def _of(rows: list[Row], model: str, method: str) -> list[Row]:
    return [row for row in rows if (row["model"], row["method"]) == (model, method)]


def _differences(mine: list[Row], others: list[Row]) -> list[float]:
    by_seed = {row["seed"]: row["score"] for row in others}
    return [row["score"] - by_seed[row["seed"]] for row in mine if row["seed"] in by_seed]


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None
