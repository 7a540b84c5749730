"""Reaching other hosts with ssh."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dad.runner.errors import LaunchError

_CONNECT_TIMEOUT_SECONDS = 10
_ATTEMPTS = 3
# Trying again does not help.
_FINAL = ("Permission denied", "Could not resolve", "Host key verification failed", "Bad owner")
# Messages of ssh, and remedies.
_CURES = {
    "Permission denied": "no key of ours is accepted there; put one in place (ssh-copy-id{port} {host}), "
    "or name one with -i",
    "Connection refused": "no ssh server listens there; start it (apt-get install openssh-server), "
    "or name its port with -p",
    "Host key verification failed": "its key is not the one in known_hosts. If that is as it should be: "
    "ssh-keygen -R {host} forgets the old one, --ssh-strict-host-key-checking says which keys to accept",
    "Could not resolve": "no such name; give an address, or add the name to /etc/hosts or ~/.ssh/config",
}


@dataclass(frozen=True)
class SshOptions:
    port: int | None = None
    identity_file: str | None = None
    # ssh's StrictHostKeyChecking: accept-new takes the key of a host that is not known yet, and refuses one
    # that has changed; yes refuses both, no takes both.
    host_keys: str = "accept-new"

    def arguments(self) -> list[str]:
        arguments = ["-T", "-o", "BatchMode=yes", "-o", f"StrictHostKeyChecking={self.host_keys}"]
        arguments += ["-o", f"ConnectTimeout={_CONNECT_TIMEOUT_SECONDS}"]
        # A vanished host is noticed after half a minute.
        arguments += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
        if self.port is not None:
            arguments += ["-p", str(self.port)]
        if self.identity_file is not None:
            arguments += ["-i", self.identity_file]
        return arguments

    def command(self, host: str) -> list[str]:
        """`ssh … host`, ready for the remote command."""
        return ["ssh", *self.arguments(), host]


def cure(reason: str, host: str, options: SshOptions) -> str:
    """The remedy for an answer of check_host(); empty if there is none but to try."""
    port = "" if options.port is None else f" -p {options.port}"
    found = (text for words, text in _CURES.items() if words in reason)
    return next(found, "").format(host=host, port=port)


def check_host(host: str, options: SshOptions, timeout: float = 30.0) -> str | None:
    """Returns None if a command can be run on `host`, else the reason why not."""
    key = options.identity_file
    if key is not None and not os.access(os.path.expanduser(key), os.R_OK):
        # ssh would ignore it, and say that another one is not accepted.
        return f"the key {key} (-i) is not here, or may not be read"
    deadline = time.monotonic() + timeout
    reason = "no answer"
    for attempt in range(_ATTEMPTS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            answer = subprocess.run(
                [*options.command(host), "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=left,
            )
        except FileNotFoundError:
            return "there is no ssh on this machine; install it: apt-get install openssh-client"
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout:g} s"
        if answer.returncode == 0:
            return None
        lines = [line for line in answer.stderr.splitlines() if line and not line.startswith("Warning:")]
        reason = lines[-1] if lines else f"ssh exited with code {answer.returncode}"
        if any(text in reason for text in _FINAL):
            break
        if attempt + 1 < _ATTEMPTS:
            time.sleep(0.5)
    return reason


def check_hosts(hosts: list[str], options: SshOptions, timeout: float = 30.0) -> None:
    """Checks all at once. Raises LaunchError that names every unreachable host."""
    if not hosts:
        return
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        reasons = list(pool.map(lambda host: check_host(host, options, timeout), hosts))
    failed = [(host, reason) for host, reason in zip(hosts, reasons, strict=True) if reason]
    if failed:
        lines = [f"cannot reach {len(failed)} of {len(hosts)} hosts over ssh:"]
        for host, reason in failed:
            lines.append(f"  {host}: {reason}")
            if text := cure(reason, host, options):
                lines.append(f"    {text}")
            lines.append(f"    try: {shlex.join([*options.command(host), 'true'])}")
        raise LaunchError("\n".join(lines))
