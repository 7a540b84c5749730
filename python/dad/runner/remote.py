"""How the process of a rank is started: here, or on another host through ssh.

In both cases child.py runs the process and gets its orders through stdin. So the environment never shows in a
list of processes, and no value of it needs quoting.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from dad.runner.ssh import SshOptions

CHILD = Path(__file__).with_name("child.py")
GRACE_SECONDS = 5.0
# A remote child that has not heard of us for this long ends its rank: the connection is dead, even if its
# host has not noticed. Signs of life are sent far more often.
SILENCE_SECONDS = 300.0
SIGN_OF_LIFE_SECONDS = 20.0

# They describe this host or this shell, not the job.
_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY|DAD_SECRET_FD|SSH_.*"
)


def exportable(environment: dict[str, str]) -> dict[str, str]:
    """The part of the environment that may go to another host."""
    return {name: value for name, value in environment.items() if not _NOT_EXPORTED.fullmatch(name)}


def start_local(
    command: list[str], environment: dict[str, str], cwd: str, *, secret: bytes = b"", **more: Any
) -> subprocess.Popen[bytes]:
    """`secret`: of the job; `more`: what else child.py is told."""
    argv = [sys.executable, "-I", "-S", str(CHILD)]
    return _start(argv, command, environment, cwd, silence_seconds=0, secret=secret, **more)


def start_remote(
    host: str,
    ssh: SshOptions,
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    silence_seconds: float = SILENCE_SECONDS,
    *,
    secret: bytes = b"",
    **more: Any,
) -> subprocess.Popen[bytes]:
    argv = [*ssh.command(host), remote_shell_command()]
    return _start(argv, command, exportable(environment), cwd, silence_seconds, secret, **more)


def run_remote(
    host: str, ssh: SshOptions, command: list[str], environment: dict[str, str], timeout: float
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that runs as a rank would. Raises TimeoutExpired."""
    process = start_remote(host, ssh, command, environment, os.getcwd())
    # communicate() would close the input, which ends the command.
    kept, process.stdin = process.stdin, None
    assert kept is not None
    with kept:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def remote_shell_command() -> str:
    """Runs child.py's text with this interpreter if the other host has it, else with its python3."""
    python = shlex.quote(sys.executable)
    script = (
        f"P={python}; test -x $P || P=python3; "
        f'command -v $P >/dev/null || {{ echo "dadrun: no python3 on $(hostname)" >&2; exit 127; }}; '
        f"exec $P -I -S -c {shlex.quote(CHILD.read_text())}"
    )
    # The login shell of the other side may be anything.
    return f"exec sh -c {shlex.quote(script)}"


def _start(
    argv: list[str],
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    silence_seconds: float,
    secret: bytes,
    **more: Any,
) -> subprocess.Popen[bytes]:
    spec = {
        "command": command,
        "env": environment,
        "cwd": cwd,
        "silence_seconds": silence_seconds,
        "grace_seconds": GRACE_SECONDS,
        "secret": base64.b64encode(secret).decode(),
        **more,
    }
    text = json.dumps(spec).encode()
    # A session of its own: only the launcher gets Ctrl-C, and then ends its ranks in order.
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    message = memoryview(b"%d\n" % len(text) + text)
    # If the process is dead already, its exit code and stderr tell why.
    with contextlib.suppress(BrokenPipeError):
        while message:
            message = message[process.stdin.write(message) :]
    return process
