"""Makes what an elastic launch needs from flags, a configuration file or the arguments of dad.run()."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from dad.runner.elastic.discovery import Script
from dad.runner.elastic.driver import Settings
from dad.runner.elastic.launch import ElasticPlan
from dad.runner.errors import LaunchError
from dad.runner.launch import DEFAULT_START_TIMEOUT_SECONDS

_DEFAULT_TIMEOUT_SECONDS = 600.0
_NEEDS_ELASTIC = ("max_np", "elastic_timeout", "reset_limit", "blacklist_cooldown_range")


def elastic_plan(args: argparse.Namespace) -> ElasticPlan | None:
    """Returns None if the job is not elastic: neither --min-np nor --host-discovery-script was given."""
    if args.min_np is None and args.host_discovery_script is None:
        for argument in _NEEDS_ELASTIC:
            if getattr(args, argument) is not None:
                flag = "--" + argument.replace("_", "-")
                raise LaunchError(
                    f"{flag} is for elastic jobs: give --min-np or --host-discovery-script, too"
                )
        return None
    if args.controller == "mpi":
        raise LaunchError("--mpi cannot lose or gain ranks: for an elastic job use --gloo (the default)")
    return make_plan(
        num_proc=args.num_proc,
        min_np=args.min_np,
        max_np=args.max_np,
        slots=args.slots_per_host,
        reset_limit=args.reset_limit,
        cooldown=args.blacklist_cooldown_range,
        timeout=args.elastic_timeout,
        script=args.host_discovery_script,
        start_timeout=args.start_timeout,
    )


def make_plan(
    *,
    num_proc: int | None,
    min_np: int | None,
    max_np: int | None,
    slots: int | None,
    reset_limit: int | None,
    cooldown: Sequence[float] | None,
    timeout: float | None,
    script: str | None,
    start_timeout: float | None,
) -> ElasticPlan:
    """Raises LaunchError when the numbers contradict each other."""
    least = min_np or num_proc or 1
    for name, value in (("--min-np", least), ("-np", num_proc), ("--max-np", max_np)):
        if value is not None and value < 1:
            raise LaunchError(f"{name} {value}: at least one process is needed")
    if num_proc is not None and num_proc < least:
        raise LaunchError(f"-np {num_proc} is less than --min-np {least}")
    if max_np is not None and max_np < max(least, num_proc or 0):
        raise LaunchError(f"--max-np {max_np} is less than --min-np {least} or -np {num_proc or least}")
    if cooldown is not None and (len(cooldown) != 2 or not 0 <= cooldown[0] <= cooldown[1]):
        raise LaunchError(
            f"--blacklist-cooldown-range {cooldown}: expected MIN and MAX, two numbers of seconds"
        )
    settings = Settings(
        min_np=least,
        max_np=max_np,
        np=num_proc,
        reset_limit=reset_limit,
        elastic_timeout=_timeout() if timeout is None else timeout,
        cooldown=None if cooldown is None else (float(cooldown[0]), float(cooldown[1])),
        start_timeout=start_timeout or DEFAULT_START_TIMEOUT_SECONDS,
        may_grow=script is not None,
    )
    return ElasticPlan(settings, None if script is None else Script(script, slots or 1))


def _timeout() -> float:
    value = os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
    try:
        return float(value) if value else _DEFAULT_TIMEOUT_SECONDS
    except ValueError:
        raise LaunchError(f"HOROVOD_ELASTIC_TIMEOUT={value}: expected a number of seconds") from None
