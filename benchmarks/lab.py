"""Starts the ranks of a benchmark: on this machine, or in hosts on slow links (tools/netlab)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
NETLAB = HERE.parent / "tools" / "netlab"
LAB_NAME = os.environ.get("NETLAB", "dadbench")
# torch.distributed's store listens this far above MASTER_PORT; dad takes the ports next to it.
STORE_PORT_OFFSET = 100
_LOG_TAIL = 2000


@dataclass(frozen=True)
class Link:
    """A line between hosts. `rate` as tc has it, "none" for no limit; delay is one way."""

    rate: str = "none"
    delay_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate} {self.delay_ms:g}ms" if self.delay_ms else self.rate

    @property
    def is_shaped(self) -> bool:
        return self.rate != "none" or self.delay_ms > 0

    @property
    def round_trip_ms(self) -> float:
        return 2 * self.delay_ms


UNSHAPED = Link()


class LaunchError(RuntimeError):
    """A rank failed or did not end in time; the message has its last lines."""


def why_not(link: Link) -> str | None:
    """What this machine lacks for such a link; None if nothing."""
    if not link.is_shaped:
        return None
    if os.geteuid() != 0:
        return "needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs iproute2"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        return "needs the right to make network namespaces"
    if link.delay_ms and not (Path("/dev/net/tun").exists() and shutil.which("c++")):
        return "needs /dev/net/tun and a C++ compiler"
    return None


def launch(
    benchmark: str, parameters: dict[str, Any], ranks: int = 4, link: Link = UNSHAPED, timeout: float = 900
) -> list[Any]:
    """Runs `work(parameters)` of a benchmark on every rank; the results by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = [sys.executable, str(HERE / "worker.py"), benchmark, json.dumps(parameters), name]
        run_ranks(worker, folder, ranks, link, timeout, sys.stderr)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def run_ranks(
    command: list[str], folder: Path, ranks: int, link: Link, timeout: float, output: IO[str]
) -> None:
    """Runs `command` on every rank with torchrun's variables. Rank 0 prints to `output`; what ranks
    write to standard error goes to files in `folder`."""
    with contextlib.ExitStack() as stack:
        if link.is_shaped:
            stack.enter_context(_network(ranks, link))
        address, port = ("10.88.0.1", 21000) if link.is_shaped else ("127.0.0.1", _free_port())
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0 if link.is_shaped else rank}
            place |= {"LOCAL_WORLD_SIZE": 1 if link.is_shaped else ranks}
            place |= {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            interface = "eth0" if link.is_shaped else "lo"
            place |= {"GLOO_SOCKET_IFNAME": interface, "DAD_GLOO_IFACE": interface}
            host = ["ip", "netns", "exec", f"{LAB_NAME}-{rank}"] if link.is_shaped else []
            log = stack.enter_context((folder / f"{rank}.log").open("wb"))
            processes.append(_start([*host, *command], place, output if rank == 0 else None, log))
        _wait(processes, folder, timeout)


@contextlib.contextmanager
def _network(hosts: int, link: Link) -> Iterator[None]:
    _netlab("up", str(hosts), link.rate, str(link.delay_ms))
    try:
        yield
    finally:
        _netlab("down")


def _netlab(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(NETLAB), *arguments],
        env=os.environ | {"NETLAB": LAB_NAME},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise LaunchError(done.stderr.strip())


def _free_port() -> int:
    """A port that is free, as are those that both contestants take above it."""
    for port in range(21000 + os.getpid() % 4000, 31000, 150):
        try:
            for offset in (*range(17), STORE_PORT_OFFSET):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port
    raise LaunchError("no free ports between 21000 and 31000")


def _start(
    command: list[str], place: dict[str, Any], progress: IO[str] | None, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    # Only the place given here counts, whatever launcher has started us.
    foreign = ("DAD_RANK", "DAD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    return subprocess.Popen(
        command,
        env=environment | {key: str(value) for key, value in place.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if progress is None else progress,
        stderr=log,
        start_new_session=True,
    )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if time.monotonic() > deadline:
            raise LaunchError(f"not done after {timeout:g} s; rank 0:\n{_tail(folder, 0)}")
        time.sleep(0.1)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        rank = failed[0]
        raise LaunchError(f"rank {rank} ended with {processes[rank].returncode}:\n{_tail(folder, rank)}")


def _tail(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace")[-_LOG_TAIL:].strip()


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
