"""Hosts whose lines can be cut and throttled, for jobs of dadrun: tools/netlab with an sshd in each host.

Needs root and what netlab needs. The launcher runs in host 0; ssh takes the same lines as the ranks, so a host
that is cut off is cut off from the launcher, too.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETLAB = Path(__file__).parents[2] / "tools" / "netlab"
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")


def is_possible():
    tools = [shutil.which("ip"), shutil.which("tc"), shutil.which("ssh"), SSHD]
    return os.geteuid() == 0 and None not in tools


class Lab:
    """line: what `netlab up N` takes, RATE [DELAY_MS [LOSS]]."""

    def __init__(self, name, count, *line):
        self.name, self.count = name, count
        self.hosts = [f"10.88.0.{number + 1}" for number in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="dad-lab-"))
        self._netlab("up", str(count), *line)
        try:
            self._start_ssh()
        except BaseException:
            self.down()
            raise

    def _netlab(self, *arguments):
        environment = {**os.environ, "NETLAB": self.name}
        done = subprocess.run(
            [sys.executable, NETLAB, *arguments], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise OSError(done.stderr.strip())

    def _start_ssh(self):
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key]
            subprocess.run(command, check=True)
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nPidFile none\nUsePAM no\nStrictModes no\nMaxStartups 100\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nPermitRootLogin yes\n"
        )
        (self.folder / "ssh_config").write_text(
            f"Host *\n IdentityFile {self.folder}/user_key\n UserKnownHostsFile {self.folder}/known_hosts\n"
        )
        wrapper = self.folder / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # as root, sshd wants it and does not make it
        for number in range(1, self.count):
            server = [SSHD, "-D", "-e", "-f", self.folder / "sshd_config"]
            subprocess.Popen(
                [*self.inside(number), *server],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        probe = [*self.inside(0), wrapper, "-o", "StrictHostKeyChecking=no"]
        for host in self.hosts[1:]:
            deadline = time.monotonic() + 30.0
            while subprocess.run([*probe, host, "true"], capture_output=True).returncode != 0:
                if time.monotonic() > deadline:
                    raise OSError(f"the sshd of {host} does not answer")
                time.sleep(0.1)

    def inside(self, number):
        """What makes a command run in a host."""
        return ["ip", "netns", "exec", f"{self.name}-{number}"]

    def environment(self):
        """In which `ssh` reaches the hosts."""
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "SSH_AUTH_SOCK": ""}

    def plug(self, number, state):
        """up or down."""
        self._netlab("link", str(number), state)

    def throttle(self, number, rate):
        """What goes away from a host; None: as it was."""
        order = ["replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32k", "latency", "50ms"]
        order = order if rate else ["del", "dev", "eth0", "root"]
        subprocess.run([*self.inside(number), "tc", "qdisc", *order], check=True, capture_output=True)

    def down(self):
        self._netlab("down")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()
