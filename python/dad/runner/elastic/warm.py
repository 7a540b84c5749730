"""Keeps, on each host of an elastic job, one process that has imported what the script begins with
(nursery.py).

A restarted worker is a fork of it, which takes some 0.1 s of CPU time, while importing torch takes 2.6 s. The
process is started when the job is in training, and used if it is ready.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from dad.runner.elastic.nursery import leading_imports

NURSERY = Path(__file__).with_name("nursery.py")
VARIABLE = "DAD_WARM_START"
# Without one of these, a warm process is not worth it.
_HEAVY = {"torch", "torchvision", "dad", "horovod"}


def script_of(command: list[str]) -> str | None:
    """`python train.py …` -> train.py; None for other commands."""
    if len(command) < 2 or not re.fullmatch(r"(.*/)?python[\d.]*", command[0]):
        return None
    return None if command[1].startswith("-") else command[1]


def is_worth_it(command: list[str], environment: dict[str, str]) -> bool:
    """Whether the script begins with imports that take long and may be done in advance."""
    script = script_of(command)
    if script is None or environment.get(VARIABLE) == "0":
        return False
    try:
        nodes = leading_imports(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    modules = [getattr(node, "module", None) or node.names[0].name for node in nodes]
    return any(str(module).partition(".")[0] in _HEAVY for module in modules)


def new_name() -> str:
    return f"dad-{os.getuid()}-{secrets.token_hex(8)}"


def nursery_command(command: list[str], name: str) -> list[str]:
    return [command[0], str(NURSERY), name, *command[1:]]
