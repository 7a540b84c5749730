"""Every environment variable that dad reads beside those of the core's option table.

docs/options.md and `dad options` are made from that table (dad_core/util/options.cc) and from this one. A
test compares the page with the names that the code mentions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dad.suggest import nearest

# One or two letters of a name may be wrong.
_CLOSE = 0.9


class Variable(NamedTuple):
    """A row, as the core's table has it."""

    name: str
    default: str
    dad_variable: str
    horovod_variable: str
    meaning: str


JOB = (
    Variable(
        "compression",
        "none",
        "DAD_COMPRESSION",
        "",
        "The method for scripts that choose none, such as rank_dad:rank=4 or rank_dad(4) (methods.md).",
    ),
    Variable(
        "local_steps",
        "1",
        "DAD_LOCAL_STEPS",
        "",
        "For scripts that choose none: how many steps ranks take by themselves before they average the "
        "changes of their weights, or a time such as 5s (local_steps.md).",
    ),
    Variable(
        "outer",
        "",
        "DAD_OUTER",
        "",
        "What is done with the mean change of a round of local steps: lr=0.7,momentum=0.9,nesterov=True, or "
        "default for these. By default it is applied as it is (local_steps.md).",
    ),
    Variable(
        "fragments",
        "1",
        "DAD_FRAGMENTS",
        "",
        "In how many parts, one after the other, the model is exchanged in a round (local_steps.md).",
    ),
    Variable(
        "delay",
        "0",
        "DAD_DELAY",
        "",
        "1: the result of an exchange is applied when the next one begins (local_steps.md).",
    ),
    Variable("plan", "", "DAD_PLAN", "", "1: rank 0 prints the plan after the first steps."),
    Variable(
        "report",
        "",
        "DAD_REPORT",
        "",
        "File to which every rank appends a line with its bytes and times when it ends (launching.md).",
    ),
    Variable(
        "metrics_port",
        "",
        "DAD_METRICS_PORT",
        "",
        "Ranks answer Prometheus at http://127.0.0.1:PORT/metrics, PORT + 1, … by their local ranks "
        "(observe.md).",
    ),
    Variable(
        "job_id",
        "",
        "DAD_JOB_ID",
        "",
        "Name of the job in reports, the same on all ranks. By default one is made up from the time.",
    ),
    Variable(
        "check_replicas",
        "1",
        "DAD_CHECK_REPLICAS",
        "",
        "Whether ranks compare parameters and settings of their optimizers while they train. 1: a warning "
        "names what differs. raise: it is an error on all ranks. 0: they do not compare (errors.md).",
    ),
    Variable(
        "check_every",
        "0",
        "DAD_CHECK_EVERY",
        "",
        "Ranks compare hashes of all weights after every so many steps, to find the step in which they "
        "become different. 0: after 1, 2, 4, 8, … steps, and every 1024 from there (hangs.md).",
    ),
    Variable(
        "elastic_quorum",
        "half",
        "DAD_ELASTIC_QUORUM",
        "",
        "How many of the last committed group have to be left for an elastic job to go on after a loss: "
        "half, or any (elastic.md).",
    ),
    Variable(
        "secret_file",
        "",
        "DAD_SECRET_FILE",
        "",
        "File with the secret by which the ranks of a job know each other, at least 16 bytes that only you "
        "can read, the same on all hosts. By default dadrun makes one for each job (security.md).",
    ),
    Variable("seed", "0", "DAD_SEED", "", "Seed of what qsgd rounds at random, the same on all ranks."),
    Variable(
        "threads_per_rank",
        "",
        "DAD_THREADS_PER_RANK",
        "",
        "Threads of torch, TensorFlow and dad in each rank. By default the ranks of a host share the cores "
        "that they may use, and what OMP_NUM_THREADS and the like say is kept (launching.md).",
    ),
)

PLACE = (
    Variable(
        "rendezvous",
        "",
        "DAD_RENDEZVOUS",
        "",
        "Where ranks meet: http://HOST:PORT or file:///DIR, a fresh directory that all share.",
    ),
    Variable(
        "rendezvous address",
        "",
        "",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "The host of horovodrun's server; used if DAD_RENDEZVOUS is not set.",
    ),
    Variable("rendezvous port", "", "", "HOROVOD_GLOO_RENDEZVOUS_PORT", "Its port."),
    Variable("rank", "", "DAD_RANK", "HOROVOD_RANK", "The rank of this process."),
    Variable("size", "", "DAD_SIZE", "HOROVOD_SIZE", "The number of ranks."),
    Variable("local_rank", "", "DAD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "The rank among those of the host."),
    Variable("local_size", "", "DAD_LOCAL_SIZE", "HOROVOD_LOCAL_SIZE", "The number of ranks of the host."),
    Variable(
        "cross_rank",
        "",
        "DAD_CROSS_RANK",
        "HOROVOD_CROSS_RANK",
        "The number of the host among those that have this local rank.",
    ),
    Variable("cross_size", "", "DAD_CROSS_SIZE", "HOROVOD_CROSS_SIZE", "The number of such hosts."),
    Variable(
        "hostname",
        "",
        "DAD_HOSTNAME",
        "HOROVOD_HOSTNAME",
        "Name of the host: ranks with the same name share a host. By default the machine itself tells.",
    ),
)

LIBRARIES = (
    Variable("nccl library", "", "DAD_NCCL_LIBRARY", "", "Path of libnccl.so.2, if it is to be another one."),
    Variable("cuda runtime", "", "DAD_CUDART_LIBRARY", "", "Path of libcudart.so."),
    Variable("cublas library", "", "DAD_CUBLAS_LIBRARY", "", "Path of libcublas.so."),
    Variable("cuda kernels", "", "DAD_CUDA_LIBRARY", "", "Path of dad's own kernels, libdad_cuda.so."),
)

SECTIONS = {"Jobs": JOB, "The place of a rank": PLACE, "Libraries for GPUs": LIBRARIES}

# Names that appear in the code but are not settings, each with the reason.
_PASSED_ON = "a flag of horovodrun; dadrun passes it on to the ranks, and dad does not use it"
_ELASTIC = "elastic launchers set it; optimizers are then distributed even if there is one rank"
NOT_SETTINGS = {
    "DAD_CORE_SHARE": "dadrun tells its ranks how many threads it has chosen, and for which libraries",
    "DAD_SECRET_FD": "dadrun tells its ranks where the secret of the job is; not the secret",
    "DAD_RUN_SECRET": "dad.run() signs what it sends to its ranks with it",
    "DAD_WARM_START": "0: workers that an elastic dadrun starts again import their libraries themselves",
    "DAD_RESTART_COUNT": "dadrun --restarts tells how often it has started the job again",
    "HOROVOD_ELASTIC_TIMEOUT": "dadrun's --elastic-timeout where the flag is not given; ranks wait as long",
    "DAD_ELASTIC": _ELASTIC,
    "HOROVOD_ELASTIC": _ELASTIC,
    "HOROVOD_CONTROLLER": "set as horovodrun does, for scripts that read it",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _PASSED_ON,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _PASSED_ON,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _PASSED_ON,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _PASSED_ON,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _PASSED_ON,
    "HOROVOD_TORUS_ALLREDUCE": _PASSED_ON,
    "HOROVOD_MPI_THREADS_DISABLE": _PASSED_ON,
    "HOROVOD_NUM_NCCL_STREAMS": _PASSED_ON,
    "HOROVOD_THREAD_AFFINITY": _PASSED_ON,
}


def misspelt(names: Iterable[str]) -> list[str]:
    """A message for each variable that dad does not know, but that looks like one that it does."""
    known = {name for rows in sections().values() for row in rows for name in row[2:4] if name}
    known |= set(NOT_SETTINGS)
    return [
        f"{name} is not a variable of dad{hint}"
        for name in sorted(names)
        if name.startswith("DAD_") and name not in known and (hint := nearest(name, known, _CLOSE))
    ]


def sections() -> dict[str, list[Variable]]:
    """All settings, those of the core first. ImportError if the core is not built."""
    from dad._lib import _core

    core = [Variable(*row) for row in _core.option_table()]
    return {"The core": core, **{title: list(rows) for title, rows in SECTIONS.items()}}
