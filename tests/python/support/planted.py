"""Bugs of user code, for test_planted_bugs.py: each function is one, run on all ranks of a job.

    planted.py FOLDER NAME…

A rank writes what became of each bug to FOLDER/<rank>.json. A bug that ends the engine is followed by another
init(). The line that a report has to name bears the comment "here".
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path

import dad.basics as dad
from dad._lib import _core

rank = dad.rank
# No function of this file: the line that calls it is the user's.
allreduce = functools.partial(_core.reduce_zeros, count=4, process_set=0)


# A real bug would not end at all.
until_the_job_ends = _core.is_healthy


# ---- hangs: one rank does something else


def a_branch_on_one_rank():
    if rank() != 1:
        allreduce("metric")
    _core.barrier()  # here


def another_order():
    names = ["first", "second"]
    if rank() == 2:
        names.reverse()
    for name in names:
        allreduce(name)  # here


def a_stuck_data_loader():
    def batches():
        for batch in range(3):
            while rank() == 2 and batch == 1 and until_the_job_ends():
                time.sleep(0.05)  # here
            yield batch

    for _ in batches():
        allreduce("gradient")


def a_loop_without_end():
    allreduce("gradient")
    while rank() == 0 and until_the_job_ends():
        pass
    allreduce("gradient")


def a_collective_on_rank_0_only():
    if rank() == 0:
        _core.gather_bytes("checkpoint", b"state", 0)
    for _ in range(3):
        allreduce("gradient")  # here


def a_file_that_never_comes():
    while rank() == 1 and not Path("/nonexistent/weights.bin").exists() and until_the_job_ends():
        time.sleep(0.05)  # here
    allreduce("gradient")


def a_lock_that_is_taken_twice():
    lock = threading.Lock()
    lock.acquire()
    while rank() == 2 and until_the_job_ends() and not lock.acquire(timeout=0.1):  # here
        pass
    allreduce("gradient")


def a_call_into_c_that_keeps_the_lock():
    allreduce("gradient")
    if rank() == 1:
        # PyDLL keeps Python's lock during the call.
        ctypes.PyDLL(None).usleep(6_000_000)
    allreduce("gradient")


def an_exception_that_is_swallowed():
    for step in range(3):
        try:
            if rank() == 1 and step == 2:
                raise ValueError("a bad sample")
            allreduce("gradient")
        except ValueError:
            continue
    _core.barrier()  # here


def one_more_unnamed_collective():
    """Unnamed collectives are told apart by their order: "barrier" stands for what comes after."""
    allreduce(f"loss.{0 if rank() != 2 else 1}")  # here


def another_number_of_layers_in_the_loop():
    for layer in range(4 if rank() == 0 else 3):
        allreduce(f"layer.{layer}")
    _core.barrier()  # here


def early_stopping_by_the_own_loss():
    for epoch in range(3):
        if rank() == 2 and epoch == 1:
            break
        allreduce(f"epoch.{epoch}")
    _core.gather_bytes("best", b"0.5", 0)  # here


# ---- errors at once


def unequal_epochs():
    for _ in range(2 if rank() == 1 else 4):
        allreduce("gradient")
    if rank() == 1:
        dad.shutdown()


def another_shape():
    allreduce("gradient", count=4 if rank() == 0 else 5)


def another_collective():
    if rank() == 2:
        _core.gather_bytes("metric", b"1", 0)
    else:
        allreduce("metric")


def a_process_set_that_does_not_exist():
    if rank() == 1:
        allreduce("gradient", process_set=7)


def another_process_set_on_one_rank():
    _core.add_process_set([0, 1] if rank() != 2 else [0, 2])


def run(name: str) -> str:
    try:
        globals()[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(folder: str, names: list[str]) -> None:
    dad.init()
    number = rank()
    for name in names:
        outcome = run(name)
        with open(f"{folder}/{number}.json", "a") as file:
            file.write(json.dumps([name, outcome]) + "\n")
        # All ranks begin the next one with a new engine.
        dad.shutdown()
        dad.init()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
