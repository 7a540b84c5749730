"""The threads of a rank: its share of the cores of its host, unless the user has set a number.

Libraries start as many threads as there are cores, so that the ranks of a host would compete for them.
dadrun puts the number into the environment of its ranks (dad/runner/child.py), before any library is
loaded. Under other launchers init() tells torch, TensorFlow and the core.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dad.runner.child import THREAD_VARIABLES, share_of_cores, usable_cores

if TYPE_CHECKING:
    from dad.world import World

_HOW_TO_CHANGE = "dadrun --threads-per-rank N or DAD_THREADS_PER_RANK=N changes it"
_TOO_LATE = (
    "TensorFlow had started before init() and keeps its threads; call init() before the first operation, "
    "or set TF_NUM_INTRAOP_THREADS"
)
_said = False


def choose(world: World, environ: Mapping[str, str]) -> int:
    """The number of threads of this rank, of which torch and TensorFlow are told if they are loaded.

    A library whose number the user has set, by a variable or a call, keeps it; DAD_THREADS_PER_RANK
    replaces both. A process without others keeps what it has.
    """
    wish = _wish(environ)
    if wish is not None:
        late = [library for library in _loaded() if not library.tell(wish)]
        _say(world, wish, [], bool(late))
        return wish
    if "DAD_CORE_SHARE" in environ:
        done = json.loads(environ["DAD_CORE_SHARE"])
        threads = int(done["threads"])
        told = [lib.name for lib in _loaded() if lib.name in done["for"] and lib.has_taken(threads)]
        _say(world, threads, told)
        return threads
    cores = usable_cores()
    threads = world.threads or share_of_cores(cores, [cores] * (world.local_size or 1))
    if world.size > 1 and threads < len(cores["cpus"]):
        free = [library for library in _loaded() if library.is_free(environ)]
        told = [library.name for library in free if library.tell(threads)]
        _say(world, threads, told, len(told) < len(free))
    return threads


def _wish(environ: Mapping[str, str]) -> int | None:
    text = environ.get("DAD_THREADS_PER_RANK")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"DAD_THREADS_PER_RANK={text}: expected a whole number of at least 1")
    return int(text)


class _Library:
    name: str

    def module(self) -> Any:
        return sys.modules.get(self.name.lower())

    def is_free(self, environ: Mapping[str, str]) -> bool:
        """Whether the user has left the number of threads to the library."""
        return not any(environ.get(name) for name in THREAD_VARIABLES[self.name])

    def has_taken(self, threads: int) -> bool:
        """Whether it uses the number of its variable, and the script has not called for another one."""
        raise NotImplementedError

    def tell(self, threads: int) -> bool:
        """Sets the number; False if it is too late."""
        raise NotImplementedError


class _Torch(_Library):
    name = "torch"

    def is_free(self, environ: Mapping[str, str]) -> bool:
        # torch starts with one thread per core, or per CPU where a core has several.
        return super().is_free(environ) and self.module().get_num_threads() >= _count_physical_cores()

    def has_taken(self, threads: int) -> bool:
        return bool(self.module().get_num_threads() == threads)

    def tell(self, threads: int) -> bool:
        self.module().set_num_threads(threads)
        return True


class _TensorFlow(_Library):
    name = "TensorFlow"

    def is_free(self, environ: Mapping[str, str]) -> bool:
        threading = self.module().config.threading
        return super().is_free(environ) and threading.get_intra_op_parallelism_threads() == 0

    def has_taken(self, threads: int) -> bool:
        if self.is_free({}):
            self.tell(threads)  # its getter does not know of the variable
            return True
        return bool(self.module().config.threading.get_intra_op_parallelism_threads() == threads)

    def tell(self, threads: int) -> bool:
        try:
            self.module().config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError:  # its threads run already
            return False
        return True


def _loaded() -> list[_Library]:
    return [library for library in (_Torch(), _TensorFlow()) if library.module() is not None]


def _count_physical_cores() -> int:
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _say(world: World, threads: int, told: list[str], late: bool = False) -> None:
    """One line of rank 0, once in a process."""
    global _said
    from dad.log import log

    sentences = []
    if told:
        who = " and ".join(told) + (" use " if len(told) > 1 else " uses ")
        number = f"{threads} thread{'s' if threads > 1 else ''} in each rank"
        sentences.append(f"{who}{number}, its share of the host's cores ({_HOW_TO_CHANGE})")
    if late:
        sentences.append(_TOO_LATE)
    if _said or world.rank != 0 or not sentences or not log.isEnabledFor(logging.WARNING):
        return
    _said = True
    # One write, so that lines of several processes do not mix.
    sys.stderr.write(f"[dad rank 0] {'; '.join(sentences)}\n")
