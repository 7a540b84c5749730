"""The flags of dadrun: horovodrun's, with the same spelling and meaning, and a few of ours."""

from __future__ import annotations

import argparse
import math
from typing import Any

from dad.runner.settings import LOG_LEVELS
from dad.suggest import Parser

_EPILOG = """\
examples:
  dadrun -np 4 python train.py                        four processes on this machine
  dadrun -np 4 -H node1:2,node2:2 python train.py     two on each host, over ssh
  dadrun -np 4 --compression rank_dad:rank=4 python train.py
  dadrun -np 4 --min-np 2 -H node1:2,node2:2 python train.py    goes on when ranks are lost
  dadrun --doctor                                     is everything there, and does it work?

The exit code is 0, that of the rank that failed first (128 + N if signal N killed it), or 130 after Ctrl-C.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=110)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dadrun",
        usage="dadrun -np N [-H host:slots,…] [options] command [arguments]",
        description="Starts one process per rank, shows their output, and ends them together.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    _add_basic(parser)
    _add_hosts(parser.add_argument_group("hosts"))
    _add_dad(parser.add_argument_group("dad"))
    _add_tuning(parser.add_argument_group("tuning"))
    _add_observing(parser.add_argument_group("timeline, stalls, logging"))
    _add_libraries(parser.add_argument_group("transports"))
    _add_elastic(parser.add_argument_group("elastic jobs: docs/launching.md"))
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="command",
        help="what every rank runs, with its arguments",
    )
    return parser


def _add_basic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version")
    add(
        "-np",
        "--num-proc",
        type=int,
        metavar="N",
        help="number of processes (default: all slots of the hosts)",
    )
    add("-cb", "--check-build", action="store_true", help="what this installation was built with")
    add("--verbose", action="store_true", help="say what is started where")
    add("--disable-cache", action="store_true", help="accepted; dadrun caches nothing")
    add(
        "--start-timeout",
        type=float,
        metavar="S",
        help="seconds for hosts to answer and for ranks to find each other",
    )
    add("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and …/stderr")
    add(
        "--output",
        choices=("tagged", "merged", "split"),
        default="tagged",
        help="lines with the rank in front (default), lines as they are, or only in the files of "
        "--output-filename",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="the time in front of every line of output",
    )
    add(
        "--restarts",
        type=_count,
        metavar="N",
        help="start a job that has failed again, up to N times (DAD_RESTART_COUNT counts)",
    )
    add("--config-file", metavar="YAML", help="settings from a file; flags win over it")


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS,…", help="where to start; ranks fill hosts in this order"
    )
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help='lines "host slots=N"')
    which.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help='prints lines "host" or "host:slots"; run each second, and the job follows',
    )
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    group.add_argument(
        "--ssh-strict-host-key-checking",
        choices=("yes", "accept-new", "no"),
        default="accept-new",
        help="host keys that ssh accepts: known ones only, new ones too (default), or any, also changed ones",
    )
    group.add_argument("--network-interfaces", metavar="A,B", help="interfaces that ranks use to talk")
    group.add_argument(
        "--network-interface", action="append", metavar="A", help="one interface; may be given several times"
    )


def _add_dad(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--compression",
        metavar="METHOD",
        help="for scripts that choose none, e.g. rank_dad:rank=4 (DAD_COMPRESSION)",
    )
    add(
        "--local-steps",
        metavar="N",
        help="for scripts that choose none: steps that ranks take by themselves before they average the "
        "changes of their weights, or a time such as 5s (DAD_LOCAL_STEPS)",
    )
    add(
        "--outer",
        metavar="OPTIONS",
        help="with --local-steps: the outer optimizer, e.g. lr=0.7,momentum=0.9,nesterov=True, or default "
        "(DAD_OUTER)",
    )
    add(
        "--fragments",
        type=int,
        metavar="N",
        help="with --local-steps: exchange the model in so many parts in turn (DAD_FRAGMENTS)",
    )
    add(
        "--delay",
        type=int,
        metavar="N",
        help="1: apply the result of an exchange when the next one begins (DAD_DELAY)",
    )
    add(
        "--doctor",
        action="store_true",
        help="check this installation (and the hosts of -H) with a real exchange",
    )
    add(
        "--gpu",
        action="store_true",
        help="with --doctor: what CUDA tensors need, step by step; then collectives, exactness and speed "
        "against NCCL on all GPUs, or on -np of them",
    )
    add("--report", metavar="FILE", help="bytes and times at exit (DAD_REPORT)")
    add(
        "--threads-per-rank",
        type=int,
        metavar="N",
        help="threads of torch, TensorFlow and dad in each rank (default: the ranks of a host share the "
        "cores that they may use; OMP_NUM_THREADS, MKL_NUM_THREADS and TF_NUM_INTRAOP_THREADS are kept)",
    )
    add("--plan", action="store_const", const=True, help="print the plan after the first steps (DAD_PLAN)")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--fusion-threshold-mb", type=_non_negative, metavar="MB", help="size of fused messages")
    add("--cycle-time-ms", type=_non_negative, metavar="MS", help="how long newly ready tensors are gathered")
    add("--cache-capacity", type=int, metavar="N", help="how many tensors the ranks remember")
    _add_switch(group, "autotune", "try settings out during the first steps and keep the fastest")
    add("--autotune-log-file", metavar="FILE", help="what autotuning tried (CSV)")
    for name in ("warmup-samples", "steps-per-sample", "bayes-opt-max-samples"):
        add(f"--autotune-{name}", type=int, metavar="N", help="passed on")
    add("--autotune-gaussian-process-noise", type=float, metavar="X", help="passed on")
    _add_switch(
        group, "hierarchical-allreduce", "sum inside each host first; one rank of each exchanges the sums"
    )
    for name in ("hierarchical-allgather", "torus-allreduce"):
        _add_switch(group, name, "passed on; dad chooses by itself")


def _add_observing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--timeline-filename", metavar="FILE", help='Chrome trace; join ranks with "dad timeline merge"')
    _add_switch(group, "timeline-mark-cycles", "mark negotiations in the trace")
    _add_switch(group, "stall-check", "warn of tensors that some ranks have not submitted (default: on)")
    add(
        "--stall-check-warning-time-seconds",
        type=_non_negative,
        metavar="S",
        help="age at which the warning comes",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        type=_non_negative,
        metavar="S",
        help="age at which ranks give up",
    )
    levels = ", ".join(LOG_LEVELS)
    add("--log-level", type=str.upper, choices=LOG_LEVELS, metavar="LEVEL", help=levels)
    time = group.add_mutually_exclusive_group()
    shown: dict[str, Any] = {"dest": "log_with_timestamp", "default": None}
    time.add_argument("--log-with-timestamp", action="store_true", help="time stamps in log lines", **shown)
    time.add_argument("--log-without-timestamp", action="store_false", help="none", **shown)
    time.add_argument("--no-log-hide-timestamp", action="store_true", help=argparse.SUPPRESS, **shown)
    time.add_argument("--log-hide-timestamp", action="store_false", help=argparse.SUPPRESS, **shown)


def _add_libraries(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    chosen: dict[str, Any] = {"dest": "controller", "action": "store_const", "default": None}
    which.add_argument("--gloo", const="gloo", help="TCP, no MPI needed (default)", **chosen)
    which.add_argument("--mpi", const="mpi", help="start with mpirun, move data with MPI", **chosen)
    which.add_argument("--jsrun", const="jsrun", help=argparse.SUPPRESS, **chosen)
    add = group.add_argument
    add("--mpi-args", metavar="ARGS", help='for mpirun, e.g. --mpi-args="--mca btl tcp,self"')
    add("--binding-args", metavar="ARGS", help="process binding for mpirun")
    add("--gloo-timeout-seconds", type=_non_negative, metavar="S", help="silence of a peer that is an error")
    _add_switch(group, "mpi-threads-disable", "passed on")
    add("--tcp", action="store_const", const=True, help="no InfiniBand for NCCL (NCCL_IB_DISABLE)")
    add("--num-nccl-streams", type=int, metavar="N", help="passed on")
    add("--thread-affinity", type=int, metavar="CORE", help="passed on")


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    number: dict[str, Any] = {"type": _count, "metavar": "N"}
    add("--min-np", "--min-num-proc", dest="min_np", help="the job goes on with so few ranks", **number)
    add(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        help="and grows to so many (default: all slots)",
        **number,
    )
    add("--slots-per-host", "--slots", help="slots of hosts that do not say how many they have", **number)
    add(
        "--elastic-timeout",
        type=_non_negative,
        metavar="S",
        help="how long to wait for --min-np ranks (default: 600)",
    )
    add("--reset-limit", type=int, metavar="N", help="end the job when ranks have changed more often")
    add(
        "--blacklist-cooldown-range",
        type=_non_negative,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds after which a host on which workers failed repeatedly is tried again (default: never)",
    )


def _add_switch(group: argparse._ArgumentGroup, name: str, meaning: str) -> None:
    """--name and --no-name; None when neither is given."""
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=meaning)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 0")
    # Whole numbers stay whole in the environment.
    return int(value) if value == int(value) else value
