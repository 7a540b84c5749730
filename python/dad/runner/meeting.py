"""How ranks meet: rank 0 serves the key-value store if no launcher does, and the others find it.

The server stays up until the process ends, because init() and shutdown() may be called many times.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from dad.runner import network, secret
from dad.runner.child import share_of_cores, usable_cores
from dad.runner.kv import POLL_SECONDS, KeyValueClient
from dad.runner.output import ranges
from dad.runner.rendezvous import SEATS_SCOPE as _SEATS
from dad.runner.rendezvous import RendezvousServer
from dad.world import Meeting, World, WorldError, new_job_id

_JOB = "dad_job"
# Ranks that have not arrived after this time are named.
_PATIENCE_SECONDS = 5.0
_Answer = TypeVar("_Answer")
# Keeps the server of rank 0 alive.
_servers: list[RendezvousServer] = []


class _Store(Protocol):
    def get(self, scope: str, key: str) -> bytes | None: ...
    def put(self, scope: str, key: str, value: bytes) -> None: ...
    def wait(self, scope: str, key: str, deadline: float) -> bytes: ...


class _FileStore:
    """`file:///DIR`, for ranks that share a directory: the few keys that we need there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._directory = Path(urlsplit(url).path)

    def get(self, scope: str, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / f"{scope}.{key}").read_bytes()
        return None

    def put(self, scope: str, key: str, value: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        unfinished = self._directory / f"{scope}.{key}.{os.getpid()}"
        unfinished.write_bytes(value)
        unfinished.replace(self._directory / f"{scope}.{key}")

    def wait(self, scope: str, key: str, deadline: float) -> bytes:
        return _until(deadline, lambda: self.get(scope, key), f"{scope}.{key} in {self._directory}")


def meet(world: World) -> World:
    """The same world with a rendezvous address, and no place left open."""
    deadline = time.monotonic() + world.start_timeout
    try:
        return _name_job(_meet(world, deadline), deadline)
    except secret.SecretError as error:
        raise WorldError(str(error)) from error
    except (TimeoutError, OSError, http.client.HTTPException) as error:
        raise WorldError(
            f"rank {world.rank} of {world.size} ({world.launcher}) did not meet the others within "
            f"{world.start_timeout:g} s: {error}. Are all ranks running? DAD_START_TIMEOUT=S waits longer"
        ) from error


def _meet(world: World, deadline: float) -> World:
    if world.meeting.how == "ports":
        return _meet_at_ports(world, deadline)
    if world.meeting.how == "torchelastic":
        world = replace(world, rendezvous=_meet_through_agent(world, deadline))
    elif world.meeting.how == "mpi":
        world = replace(world, rendezvous=_meet_through_mpi(world, deadline))
    if world.is_complete:
        return world
    return _take_seats(world, _open(world.rendezvous), deadline)


def _name_job(world: World, deadline: float) -> World:
    """The name that dadrun gave, or the ranks when they took their seats; else rank 0 makes one."""
    if world.job:
        return world
    if world.rank == 0:
        world = replace(world, job=new_job_id())
        if world.size > 1:
            _open(world.rendezvous).put(_JOB, "id", world.job.encode())
    elif os.environ.get("DAD_REPORT"):
        world = replace(world, job=_open(world.rendezvous).wait(_JOB, "id", deadline).decode())
    return world


def _open(url: str) -> _Store:
    return _FileStore(url) if url.startswith("file://") else KeyValueClient(url)


def _serve(host: str, ports: tuple[int, ...], token: str) -> RendezvousServer:
    """Listens on this address, "" for all, and on the first of these ports that is free."""
    for port in ports:
        try:
            server = RendezvousServer(
                host, port, token, secret.of_rank(os.environ), os.environ.get("DAD_JOB_ID", "")
            )
        except OSError:
            continue
        _servers.append(server)
        return server
    raise WorldError(
        f"rank 0 finds none of the ports {ports[0]} to {ports[-1]} free; "
        "choose another with MASTER_PORT, or give an address with DAD_RENDEZVOUS=http://HOST:PORT"
    )


def _until(deadline: float, ask: Callable[[], _Answer | None], what: str) -> _Answer:
    while True:
        answer = ask()
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came from {what}")
        time.sleep(POLL_SECONDS)


# ---- rank 0's host is known, and the port is one of several


def _meet_at_ports(world: World, deadline: float) -> World:
    meeting = world.meeting
    if world.rank == 0:
        server = _serve(network.serving_address(meeting.host), meeting.ports, meeting.token)
        url = f"http://{meeting.host}:{server.port}"
        # Ask our own server where it listens: the name may stand for a proxy.
        seats = KeyValueClient(f"http://{server.host}:{server.port}")
        return _take_seats(replace(world, rendezvous=url), seats, deadline)
    foreign: list[str] = []
    while True:
        try:
            url = _until(
                deadline,
                lambda: _probe(meeting, world.rank, foreign),
                f"{meeting.host}, ports {list(meeting.ports)}",
            )
        except TimeoutError as error:
            raise TimeoutError("; ".join([str(error), *foreign[-1:]])) from error
        try:
            return _take_seats(replace(world, rendezvous=url), KeyValueClient(url), deadline)
        except (OSError, http.client.HTTPException) as error:
            # The server of an earlier job is just closing, or slow; look again.
            if isinstance(error, TimeoutError) or time.monotonic() > deadline:
                raise


def _probe(meeting: Meeting, rank: int, foreign: list[str]) -> str | None:
    """The address of our job's server. A server on which our seat is taken belongs to an earlier run.

    Servers that do not know our secret are noted in `foreign`.
    """
    for port in meeting.ports:
        client = KeyValueClient(f"http://{meeting.host}:{port}", request_timeout=2.0)
        if client.is_server_of(meeting.token):
            with contextlib.suppress(OSError, http.client.HTTPException):
                if client.get(_SEATS, str(rank)) is None:
                    return client.url
        if client.foreign:
            foreign.append(client.foreign)
    return None


# ---- a launcher that can carry one message


def _meet_through_agent(world: World, deadline: float) -> str:
    """torchrun's agent has a store, in which rank 0 leaves the address of ours."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    meeting = world.meeting
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        store = TCPStore(
            meeting.host, meeting.ports[0], is_master=False, timeout=left, wait_for_workers=False
        )
        key = f"dad/rendezvous/{meeting.token}"
        if world.rank == 0:
            # The agent of rank 0 is the one at MASTER_ADDR.
            port = _serve(network.serving_address(meeting.host), (0,), meeting.token).port
            store.set(key, f"http://{meeting.host}:{port}")
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise TimeoutError(f"torchrun's store at {meeting.host}:{meeting.ports[0]}: {error}") from error


def _meet_through_mpi(world: World, deadline: float) -> str:
    """MPI broadcasts rank 0's addresses; the others take the first that answers."""
    message = ""
    if world.rank == 0:
        token = secrets.token_hex(8)
        addresses = _own_addresses(world)
        # Which of several addresses the other hosts can reach is known only after trying.
        port = _serve(addresses[0] if len(addresses) == 1 else "", (0,), token).port
        message = " ".join([token, *(f"http://{address}:{port}" for address in addresses)])
    token, *urls = _mpi_bootstrap()(message).split()

    def first_to_answer() -> str | None:
        clients = (KeyValueClient(url, request_timeout=2.0) for url in urls)
        return next((client.url for client in clients if client.is_server_of(token)), None)

    return _until(deadline, first_to_answer, "rank 0 at " + ", ".join(urls))


def _mpi_bootstrap() -> Callable[[str], str]:
    cure = (
        "install an MPI and build dad again (apt-get install libopenmpi-dev; "
        "pip install --no-build-isolation .), or launch with dadrun, which needs no MPI"
    )
    try:
        from dad._lib import _core
    except ImportError as error:
        raise WorldError(f"mpirun has started this process, but dad's core is not there: {error}") from error
    available, why = _core.plugin_status("mpi")
    if not available:
        raise WorldError(
            f"mpirun has started this process, but dad's MPI plug-in is not there ({why}); {cure}"
        )
    bootstrap: Callable[[str], str] = _core.mpi_bootstrap
    return bootstrap


def _own_addresses(world: World) -> list[str]:
    if world.local_size == world.size:
        return ["127.0.0.1"]
    wanted = (os.environ.get("DAD_GLOO_IFACE") or os.environ.get("HOROVOD_GLOO_IFACE") or "").split(",")
    found = network.interface_addresses()
    others = [name for name in found if not found[name].startswith("127.")]
    order = [name for name in wanted if name in found] or others
    return list(dict.fromkeys(found[name] for name in order)) or ["127.0.0.1"]


# ---- the place of each rank


def _take_seats(world: World, store: _Store, deadline: float) -> World:
    """Every rank publishes its host, so each learns its place among the ranks of its host and across hosts.

    It also publishes the cores that it may use, so that ranks that share a machine can divide them.
    """
    machine = network.machine_identity()
    host = world.hostname if world.has_named_host else machine
    seat = {
        "host": f"{host} {world.agent}".strip(),
        "local_rank": world.local_rank,
        "name": world.hostname,
        "machine": machine,
        "cores": usable_cores(),
        "job": world.job or new_job_id(),
    }
    store.put(_SEATS, str(world.rank), json.dumps(seat).encode())
    seats: list[dict[str, Any]] = []
    patient_until = time.monotonic() + _PATIENCE_SECONDS
    for rank in range(world.size):
        try:
            if patient_until < deadline:
                try:
                    seats.append(json.loads(store.wait(_SEATS, str(rank), patient_until)))
                    continue
                except TimeoutError:
                    patient_until = deadline
                    _name_missing(world, store, deadline)
            seats.append(json.loads(store.wait(_SEATS, str(rank), deadline)))
        except TimeoutError:
            raise TimeoutError(f"rank {rank} has not arrived at {world.rendezvous}") from None
    neighbours = [seat["cores"] for seat in seats if seat.get("machine") == machine]
    world = replace(world, threads=share_of_cores(seat["cores"], neighbours), job=seats[0].get("job", ""))
    world = _avoid_loopback(place_among(world, seats), seats)
    if world.rank == 0 and _servers and _servers[-1].serves_all_addresses:
        # Now we know which of our addresses the others use.
        _servers[-1].keep_to_ranks(*network.addresses_of(urlsplit(world.rendezvous).hostname or ""))
    return world


def _name_missing(world: World, store: _Store, deadline: float) -> None:
    """One line of the lowest rank that has arrived."""
    missing = [rank for rank in range(world.size) if store.get(_SEATS, str(rank)) is None]
    if missing and world.rank == min(set(range(world.size)) - set(missing)):
        noun = "ranks" if len(missing) > 1 else "rank"
        sys.stderr.write(
            f"[dad rank {world.rank}] still waiting for {noun} {ranges(missing)} of {world.size} to call "
            f"init(); giving up in {deadline - time.monotonic():.0f} s (DAD_START_TIMEOUT)\n"
        )


def place_among(world: World, seats: list[dict[str, Any]]) -> World:
    """Fills in what the launcher left open; a given local rank is kept."""
    places: list[tuple[str, int]] = []
    for seat in seats:
        on_host = sum(host == seat["host"] for host, _ in places)
        places.append((seat["host"], on_host if seat["local_rank"] is None else seat["local_rank"]))
    host, local_rank = places[world.rank]
    if places.count((host, local_rank)) > 1:
        raise WorldError(
            f"two ranks on {host} say that their local rank is {local_rank}; "
            "if these are two hosts, tell them apart with DAD_HOSTNAME"
        )
    across = [name for name, local in places if local == local_rank]
    return replace(
        world,
        local_rank=local_rank,
        local_size=sum(name == host for name, _ in places),
        cross_rank=across.index(host),
        cross_size=len(across),
    )


def _avoid_loopback(world: World, seats: list[dict[str, Any]]) -> World:
    """The name of rank 0's host may mean 127.0.1.1 on that host itself.

    A rank that took this for the way to the others would tell them a loopback address.
    """
    url = urlsplit(world.rendezvous)
    others = [seat["name"] for seat in seats if seat["name"] != world.hostname]
    if not others or url.scheme != "http":
        return world
    if not any(address.startswith("127.") for address in network.addresses_of(url.hostname or "")):
        return world
    address = network.address_towards(others[0])
    if address.startswith("127."):
        return world
    return replace(world, rendezvous=f"http://{address}:{url.port}")
