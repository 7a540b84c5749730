"""init(), rank() and the like: what every framework shares."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dad import dry_run, report
from dad import process_sets as _process_sets
from dad._lib import _core
from dad.errors import DadInternalError
from dad.observe import inspect, metrics, position
from dad.process_sets import ProcessSet
from dad.process_sets import ids_and_ranks as _get_process_set_ids_and_ranks  # noqa: F401  Horovod's name
from dad.world import job_id

# The numbers of dad::ReduceOp.
Sum = 0
Average = 1
Min = 2
Max = 3
Product = 4
Adasum = 5

_LIB_DIR = Path(__file__).parent / "_lib"
_lock = threading.Lock()
_loaded_at = time.time()
_exit_pid: int | None = None  # the process that has registered the exit handler
_num_inits = 0


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts dad in this process and meets the other ranks; does nothing if that has been done.

    After a HorovodInternalError it starts anew, as after shutdown(); the other ranks must do the same. In
    an elastic job it then asks the launcher which rank this process has, and makes the sets of the first
    call again, as far as their ranks exist.

    Horovod requires process_sets="dynamic" or HOROVOD_DYNAMIC_PROCESS_SETS before add_process_set(). Both
    are accepted and have no effect: sets can always be added.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of all ranks.
        process_sets: sets to make at once, in the same order on all ranks, or "dynamic".

    Raises:
        ValueError: `comm` is not made of all ranks, or a set is not possible.
        HorovodInternalError: a rank has not arrived within DAD_START_TIMEOUT seconds.

    Example::

        import dad.torch as hvd

        hvd.init()
        print(hvd.rank(), "of", hvd.size())
    """
    global _num_inits

    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets is a list of ProcessSet or "dynamic"; got {process_sets!r}')
    sets = [s if isinstance(s, ProcessSet) else ProcessSet(s) for s in sets]
    with _lock:
        if _core.is_initialized():
            if _core.is_healthy():
                if sets:
                    _process_sets.attach(sets, _core.size())
                return
            _shut_down()
        sets = _start(comm, sets)
        _process_sets.attach(sets, _core.size())
        _num_inits += 1
        _register_exit()
        report.write_when_stopped()
        report.begin()
        position.start()
        inspect.serve(job_id())
        metrics.serve()


def _start(comm: Any, sets: list[ProcessSet]) -> list[ProcessSet]:
    """Starts the core; the sets that there are."""
    from dad.elastic.launcher import elastic_timeout, is_elastic
    from dad.world import open_world

    deadline = time.monotonic() + elastic_timeout()
    while True:
        try:
            world = open_world()
            size = world["size"]
            _check_comm(comm, size)
            here = _process_sets.of_round(sets, size) if is_elastic() else sets
            all_ranks = _process_sets.ranks_of_all(here)
            _process_sets.check(all_ranks, size)
            _core.init(world, all_ranks)
            return here
        except DadInternalError as error:
            if not is_elastic() or time.monotonic() > deadline:
                raise
            # A rank of this round was lost before all had met.
            from dad.log import log

            log.info("the ranks of this round did not meet, asking for another one: %s", error)


def place_taken_at() -> float:
    """See world.py."""
    from dad.world import place_taken_at as taken_at

    return taken_at()


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    members = comm.Get_size() if hasattr(comm, "Get_size") else len(set(comm))
    if members not in (0, size):
        raise ValueError(
            f"init(comm=…) has {members} ranks where the job has {size}: "
            "start fewer processes, or give the subset as a process set"
        )


def _register_exit() -> None:
    global _exit_pid
    if _exit_pid != os.getpid():
        _exit_pid = os.getpid()
        atexit.register(_at_exit, _exit_pid)


def _at_exit(pid: int) -> None:
    # A forked child inherits the handler but not the engine.
    if pid == os.getpid():
        shutdown()


def shutdown() -> None:
    """Says goodbye to the other ranks and ends dad in this process; init() may follow."""
    with _lock:
        if _core.is_initialized():
            _shut_down()


def _shut_down() -> None:
    report.write()
    _core.shutdown()


def num_inits() -> int:
    """How often this process has met the others."""
    return _num_inits


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() has not."""
    return _core.is_initialized()


def rank() -> int:
    """The rank of this process: a number from 0 to size() - 1."""
    return _core.rank()


def size() -> int:
    """The number of ranks of the job."""
    assumed = dry_run.current()
    return _core.size() if assumed is None or not _core.is_initialized() else assumed.size


def local_rank() -> int:
    """The rank among the processes on this host."""
    return _core.local_rank()


def local_size() -> int:
    """The number of processes on this host."""
    return _core.local_size()


def cross_rank() -> int:
    """The number of this host among the hosts that have this local rank."""
    return _core.cross_rank()


def cross_size() -> int:
    """The number of hosts that have this local rank."""
    return _core.cross_size()


def is_homogeneous() -> bool:
    """Whether all hosts run the same number of processes."""
    return _core.is_homogeneous()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts a trace of all collectives, in a file that chrome://tracing opens.

    All ranks may give the same path, as they do in scripts for Horovod. The file is then rank 0's, and the
    other ranks write beside it, with .<rank> at the end.

    Args:
        file_path: the file to write.
        mark_cycles: whether negotiations are marked.

    Raises:
        ValueError: a trace is being written already.

    Example::

        hvd.start_timeline("trace.json")
        train()
        hvd.stop_timeline()
    """
    report.leave_timeline_to_user()
    path = Path(file_path)
    if path.exists() and not path.is_file():  # a pipe, say
        _core.start_timeline(str(path), mark_cycles)
        return
    own = path.with_name(f"{path.name}.{_core.rank()}")
    _core.start_timeline(str(own), mark_cycles)
    if _core.rank() == 0:
        own.replace(path)  # at once: two ranks never write to one file
        return
    # What no other rank of this job has taken is our trace under that name, too.
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_mtime < _loaded_at:
            path.unlink()
        path.hardlink_to(own)


def stop_timeline() -> None:
    """Ends the trace; the file is valid JSON from then on."""
    _core.stop_timeline()


def stats() -> dict[str, Any]:
    """Bytes and times since init() or reset_stats(), in total and for each tensor, as a dictionary.

    `wire_bytes_sent` counts bytes at the socket. `device_bytes` is what was handed to NCCL, which does not
    say what it sends. Under `tensors`, `recent` has what belongs to the method that a tensor goes by now,
    and `worst` describes its slowest step: `step`, `seconds`, `waited_seconds` until the last rank had it
    ready, and `last_rank`.

    `slowest` describes the rank that held up the last 100 steps for the longest time, as this rank saw it:
    `rank`, `last_in` how many of these `steps` it was the last to be ready, `lag_seconds` after the first
    rank (the mean of these) and `worst_seconds`. It is missing where there were no steps.

    Example::

        print(hvd.stats()["wire_bytes_sent"] / 1e6, "MB")
    """
    return _core.stats()


def reset_stats() -> None:
    """Sets all counters of stats() to zero."""
    _core.reset_stats()


def _built(plugin: str) -> bool:
    # Asks the file system and loads nothing, so that it works before init() and in a forked child.
    return any(_LIB_DIR.glob(f"libdad_{plugin}*.so"))


def _transport() -> str:
    from dad.world import discover

    return discover(os.environ).transport


def gloo_built() -> bool:
    """Whether the TCP transport is there."""
    return _built("gloo")


def gloo_enabled() -> bool:
    """Whether this process sends over gloo, or would after init()."""
    return gloo_built() and _transport() == "gloo"


def mpi_built() -> bool:
    """Whether a transport for MPI is there."""
    return _built("mpi")


def mpi_enabled() -> bool:
    """Whether this process sends over MPI, or would after init()."""
    return mpi_built() and _transport() == "mpi"


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: dad asks for that, or does not use MPI."""
    if not _core.is_initialized():
        raise ValueError("dad has not been initialized; call init() first")
    return mpi_enabled()


def nccl_built() -> int:
    """NCCL's version code, 0 without NCCL."""
    return 0


def cuda_built() -> bool:
    """False: kept for scripts written for Horovod. `dadrun --doctor --gpu` examines GPUs."""
    return False


def rocm_built() -> bool:
    """False: there is no support for ROCm."""
    return False


def ddl_built() -> bool:
    """False: there is no support for DDL."""
    return False


def ccl_built() -> bool:
    """False: there is no support for oneCCL."""
    return False


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework sees a CUDA device.

    Args:
        ext_base_name: "torch" or "tensorflow".
        verbose: accepted for Horovod's sake.

    Returns:
        True if there is one.

    Raises:
        ValueError: `ext_base_name` is another name.

    Example::

        device = "cuda" if hvd.gpu_available("torch") else "cpu"
    """
    if ext_base_name == "torch":
        import torch

        return bool(torch.cuda.is_available())
    if ext_base_name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    raise ValueError(f'ext_base_name={ext_base_name!r} is not "torch" or "tensorflow"')
