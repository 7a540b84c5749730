"""One rank of a benchmark, started by lab.py: worker.py BENCHMARK PARAMETERS FOLDER

Both contestants live in this process: torch.distributed over gloo, and dad.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lab import STORE_PORT_OFFSET

import dad.torch as hvd


def join_torch_distributed(rank: int, size: int) -> None:
    port = int(os.environ["MASTER_PORT"]) + STORE_PORT_OFFSET
    timeout = datetime.timedelta(minutes=5)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def main(benchmark: str, parameters: str, folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    module = importlib.import_module(benchmark)
    # A process with dad alone, where the benchmark says so.
    with_peer = size > 1 and not getattr(module, "DAD_ALONE", False)
    if with_peer:
        join_torch_distributed(rank, size)
    hvd.init()
    result = module.work(json.loads(parameters))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    hvd.barrier()
    hvd.shutdown()
    if with_peer:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
