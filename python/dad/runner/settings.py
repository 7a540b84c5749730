"""Flags that become environment variables of the ranks, one table.

Each row: the flag's place in the parsed arguments, the variables it sets (dad's own first, for
dad reads `DAD_X` before `HOROVOD_X`), and where `--config-file` has it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dad.local_steps import settings as local_steps
from dad.local_steps.outer import Outer
from dad.methods.compression import parse
from dad.runner.errors import LaunchError
from dad.suggest import nearest

_MIB = 1 << 20
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


# How values become text for the environment; ValueError says what was expected. Flags were checked when they
# were parsed, but a configuration file may contain anything.


def _plain(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def _flag(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return "1" if value else "0"


def _not(value: Any) -> str:
    return {"0": "1", "1": "0"}[_flag(value)]


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("expected a number of at least 0")
    return str(value)


def _whole(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("expected a whole number of at least 0")
    return str(value)


def _count(value: Any) -> str:
    if _whole(value) == "0":
        raise ValueError("expected a whole number of at least 1")
    return str(value)


def _range(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected two numbers, MIN and MAX")
    shortest, longest = (float(_number(number)) for number in value)
    if shortest > longest:
        raise ValueError("MIN must not be greater than MAX")
    return f"{shortest:g} {longest:g}"


def _mib(value: Any) -> str:
    return str(int(float(_number(value)) * _MIB))


def _level(value: Any) -> str:
    if str(value).upper() not in LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(LOG_LEVELS)}")
    return str(value).upper()


def _file(value: str) -> str:
    """Checks the path of a file that is written at the end, when an error would be too late."""
    folder = os.path.dirname(value) or "."
    if not os.path.isdir(folder) or os.path.isdir(value):
        raise ValueError("expected a file in a folder that exists")
    return value


def _method(value: str) -> str:
    parse(value)
    return value


def _local_steps(value: Any) -> str:
    local_steps.parse_length(value)
    return str(value)


def _outer(value: str) -> str:
    Outer.parse(value)
    return value


def _delay(value: Any) -> str:
    local_steps.parse(delay=value)
    return str(value)


@dataclass(frozen=True)
class Setting:
    argument: str
    variables: tuple[str, ...]
    group: str = ""  # of the configuration file
    key: str = ""
    text: Callable[[Any], str] = _plain


SETTINGS = (
    Setting(
        "fusion_threshold_mb",
        ("DAD_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD"),
        "params",
        "fusion_threshold_mb",
        _mib,
    ),
    Setting("cycle_time_ms", ("DAD_CYCLE_TIME_MS", "HOROVOD_CYCLE_TIME"), "params", "cycle_time_ms", _number),
    Setting(
        "cache_capacity", ("DAD_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY"), "params", "cache_capacity", _whole
    ),
    Setting(
        "hierarchical_allreduce",
        ("DAD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
        "params",
        "hierarchical_allreduce",
        _flag,
    ),
    Setting(
        "hierarchical_allgather",
        ("HOROVOD_HIERARCHICAL_ALLGATHER",),
        "params",
        "hierarchical_allgather",
        _flag,
    ),
    Setting("torus_allreduce", ("HOROVOD_TORUS_ALLREDUCE",), "params", "torus_allreduce", _flag),
    Setting("autotune", ("DAD_AUTOTUNE", "HOROVOD_AUTOTUNE"), "autotune", "enabled", _flag),
    Setting("autotune_log_file", ("DAD_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_LOG"), "autotune", "log_file"),
    Setting(
        "autotune_warmup_samples", ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES",), "autotune", "warmup_samples", _whole
    ),
    Setting(
        "autotune_steps_per_sample",
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",),
        "autotune",
        "steps_per_sample",
        _whole,
    ),
    Setting(
        "autotune_bayes_opt_max_samples",
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",),
        "autotune",
        "bayes_opt_max_samples",
        _whole,
    ),
    Setting(
        "autotune_gaussian_process_noise",
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",),
        "autotune",
        "gaussian_process_noise",
        _number,
    ),
    Setting("timeline_filename", ("DAD_TIMELINE", "HOROVOD_TIMELINE"), "timeline", "filename"),
    Setting(
        "timeline_mark_cycles",
        ("DAD_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES"),
        "timeline",
        "mark_cycles",
        _flag,
    ),
    Setting(
        "stall_check",
        ("DAD_STALL_CHECK_DISABLE", "HOROVOD_STALL_CHECK_DISABLE"),
        "stall_check",
        "enabled",
        _not,
    ),
    Setting(
        "stall_check_warning_time_seconds",
        ("DAD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
        "stall_check",
        "warning_time_seconds",
        _number,
    ),
    Setting(
        "stall_check_shutdown_time_seconds",
        ("DAD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
        "stall_check",
        "shutdown_time_seconds",
        _number,
    ),
    Setting(
        "mpi_threads_disable",
        ("HOROVOD_MPI_THREADS_DISABLE",),
        "library_options",
        "mpi_threads_disable",
        _flag,
    ),
    Setting("num_nccl_streams", ("HOROVOD_NUM_NCCL_STREAMS",), "library_options", "num_nccl_streams", _whole),
    Setting("thread_affinity", ("HOROVOD_THREAD_AFFINITY",), "library_options", "thread_affinity", _whole),
    Setting(
        "gloo_timeout_seconds",
        ("DAD_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
        "library_options",
        "gloo_timeout_seconds",
        _number,
    ),
    Setting("tcp", ("NCCL_IB_DISABLE",), text=_flag),
    Setting("log_level", ("DAD_LOG_LEVEL", "HOROVOD_LOG_LEVEL"), "logging", "level", _level),
    Setting(
        "log_with_timestamp",
        ("DAD_LOG_HIDE_TIME", "HOROVOD_LOG_HIDE_TIME"),
        "logging",
        "with_timestamp",
        _not,
    ),
    Setting("start_timeout", ("DAD_START_TIMEOUT", "HOROVOD_START_TIMEOUT"), text=_number),
    Setting("threads_per_rank", ("DAD_THREADS_PER_RANK",), "params", "threads_per_rank", _count),
    Setting("min_np", (), "elastic", "min_np", _count),
    Setting("max_np", (), "elastic", "max_np", _count),
    Setting("slots_per_host", (), "elastic", "slots_per_host", _count),
    Setting("elastic_timeout", (), "elastic", "timeout", _number),
    Setting("reset_limit", (), "elastic", "reset_limit", _whole),
    Setting("blacklist_cooldown_range", (), "elastic", "blacklist_cooldown_range", _range),
    Setting("host_discovery_script", (), "elastic", "host_discovery_script"),
    Setting("compression", ("DAD_COMPRESSION",), text=_method),
    Setting("local_steps", ("DAD_LOCAL_STEPS",), "params", "local_steps", _local_steps),
    Setting("outer", ("DAD_OUTER",), "params", "outer", _outer),
    Setting("fragments", ("DAD_FRAGMENTS",), "params", "fragments", _count),
    Setting("delay", ("DAD_DELAY",), "params", "delay", _delay),
    Setting("report", ("DAD_REPORT",), text=_file),
    Setting("plan", ("DAD_PLAN",), text=_flag),
)


def variables_from(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables that the given flags set for every rank."""
    variables = {}
    for setting in SETTINGS:
        value = getattr(args, setting.argument)
        if value is not None:
            where = "--" + setting.argument.replace("_", "-")
            variables.update(dict.fromkeys(setting.variables, _text(setting, value, where)))
    return variables


def _text(setting: Setting, value: Any, where: str) -> str:
    try:
        return setting.text(value)
    except ValueError as error:
        raise LaunchError(f"{where} {value}: {error}") from error


def read_config_file(args: argparse.Namespace) -> None:
    """Sets, from the YAML file, values that no flag has set."""
    try:
        import yaml
    except ImportError as error:
        raise LaunchError("--config-file needs PyYAML: pip install pyyaml") from error
    try:
        with open(args.config_file) as file:
            config = yaml.safe_load(file) or {}
    except OSError as error:
        raise LaunchError(f"cannot read {args.config_file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"{args.config_file} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise LaunchError(f"{args.config_file}: expected groups such as params:, timeline:, logging:")
    _read_controller(args, config.pop("controller", None))
    rows = {(row.group, row.key): row for row in SETTINGS if row.group}
    groups = sorted({group for group, _ in rows})
    for group, entries in config.items():
        if group not in groups:
            known = ", ".join(["controller", *groups])
            hint = nearest(str(group), groups)
            raise LaunchError(f"{args.config_file}: unknown group {group!r}{hint}; the groups are {known}")
        if not isinstance(entries or {}, dict):
            raise LaunchError(f"{args.config_file}: {group}: {entries}; expected entries such as key: value")
        for key, value in (entries or {}).items():
            row = rows.get((group, key))
            if row is None:
                keys = [key for name, key in rows if name == group]
                hint = nearest(str(key), keys)
                raise LaunchError(
                    f"{args.config_file}: unknown key {group}.{key}{hint}; {group} has {', '.join(keys)}"
                )
            if value is not None:
                _text(row, value, f"{args.config_file}: {group}.{key}:")
            if getattr(args, row.argument) is None:
                setattr(args, row.argument, value)


def _read_controller(args: argparse.Namespace, controller: str | None) -> None:
    if controller is None or args.controller is not None:
        return
    if str(controller).lower() not in ("gloo", "mpi"):
        raise LaunchError(f"{args.config_file}: controller: {controller}; expected gloo or mpi")
    args.controller = str(controller).lower()
