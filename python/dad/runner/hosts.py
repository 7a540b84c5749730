"""Hosts and slots, and the assignment of ranks to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dad.runner.errors import LaunchError


@dataclass(frozen=True)
class Host:
    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str, default_slots: int = 1) -> list[Host]:
    """`a:2,b:4,c`: slots default to 1."""
    hosts = [_parse_host(item.strip(), "-H", default_slots) for item in text.split(",") if item.strip()]
    return _checked(hosts, f"-H {text}")


def parse_hostfile(path: str, default_slots: int = 1) -> list[Host]:
    """One host per line: `name slots=4`, `name:4` or `name`; `#` begins a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"cannot read the hostfile {path}: {error.strerror}") from error
    where = f"the hostfile {path}"
    return _checked(parse_host_lines(lines, where, default_slots), where)


def parse_host_lines(lines: list[str], where: str, default_slots: int = 1) -> list[Host]:
    """The lines of a hostfile that may be missing."""
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if line:
            name, *rest = line.split(maxsplit=1)
            slots = re.fullmatch(r"slots\s*=\s*(\d+)", "".join(rest))
            item = f"{name}:{slots.group(1)}" if slots else line
            hosts.append(_parse_host(item, f"{where}, line {number}", default_slots))
    return hosts


def _parse_host(item: str, where: str, default_slots: int) -> Host:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\s:=]+)(?::(\d+))?", item)
    if not match or match.group(2) == "0":
        raise LaunchError(f'{where}: "{item}" is not a host; expected NAME:SLOTS, for example node1:4')
    return Host(match.group(1).strip("[]"), int(match.group(2) or default_slots))


def _checked(hosts: list[Host], where: str) -> list[Host]:
    if not hosts:
        raise LaunchError(f"{where} names no host; expected NAME:SLOTS, for example node1:4")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise LaunchError(f"{where} names {name} twice; give it once, with all its slots")
    return hosts


def assign_ranks(hosts: list[Host], num_proc: int | None) -> list[Slot]:
    """Ranks fill host after host in the given order; without `num_proc` all slots are used."""
    slots = sum(host.slots for host in hosts)
    size = slots if num_proc is None else num_proc
    if size < 1:
        raise LaunchError(f"-np {size}: at least one process is needed")
    if size > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {size}, but the hosts have {slots} slots ({listed}); "
            f"raise the slots (-H {hosts[0].name}:{hosts[0].slots + size - slots},…), "
            f"add a host, or use -np {slots}"
        )
    places: list[tuple[str, int]] = []
    for host in hosts:
        places += [(host.name, local) for local in range(min(host.slots, size - len(places)))]
    return [_slot(rank, places) for rank in range(size)]


def _slot(rank: int, places: list[tuple[str, int]]) -> Slot:
    host, local_rank = places[rank]
    # Hosts that have a process with this local rank, in the order of their first rank.
    peers = [name for name, local in places if local == local_rank]
    return Slot(
        host=host,
        rank=rank,
        size=len(places),
        local_rank=local_rank,
        local_size=sum(name == host for name, _ in places),
        cross_rank=peers.index(host),
        cross_size=len(peers),
    )
