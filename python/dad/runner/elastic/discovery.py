"""Which hosts there are: a fixed list, or what a script of the user prints each second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable

from dad.runner.errors import LaunchError
from dad.runner.hosts import Host, parse_host_lines

INTERVAL_SECONDS = 1.0
# A script that takes longer is ended, and the hosts stay as they were.
SCRIPT_SECONDS = 10.0


class DiscoveryError(Exception):
    """The script did not say which hosts there are."""


class NotRunnableError(DiscoveryError):
    """There is no such script, or it may not be run."""


class Script:
    """Lines `host` or `host:slots`, as Horovod's."""

    def __init__(self, path: str, default_slots: int, seconds: float = SCRIPT_SECONDS) -> None:
        self.path = path
        self._default_slots = default_slots
        self._seconds = seconds

    def find(self) -> list[Host]:
        """Raises DiscoveryError."""
        try:
            process = subprocess.Popen(
                [os.path.abspath(os.path.expanduser(self.path))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise NotRunnableError(f"cannot be run: {error.strerror}") from error
        try:
            out, err = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired as error:
            raise DiscoveryError(f"has not ended within {self._seconds:g} s") from error
        finally:
            # Also processes that it has started and left.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode != 0:
            last = err.strip().splitlines()[-1:] or ["it wrote nothing to stderr"]
            raise DiscoveryError(f"ended with code {process.returncode}: {last[0]}")
        try:
            return parse_host_lines(out.splitlines(), "its output", self._default_slots)
        except LaunchError as error:
            raise DiscoveryError(str(error)) from error


class Watcher:
    """Runs the script each second on a thread, until it is stopped."""

    def __init__(
        self, script: Script, found: Callable[[list[Host]], None], say: Callable[[str], None]
    ) -> None:
        self._script = script
        self._found = found
        self._say = say
        self._said = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dad-discovery", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while True:
            self.look()
            if self._stopped.wait(INTERVAL_SECONDS):
                return

    def look(self) -> None:
        try:
            hosts = self._script.find()
        except DiscoveryError as error:
            # Report it once, not every second.
            if str(error) != self._said:
                self._said = str(error)
                self._say(f"dadrun: {self._script.path} {error}; the hosts stay as they were")
            return
        if self._said:
            self._said = ""
            self._say(f"dadrun: {self._script.path} works again")
        self._found(hosts)
