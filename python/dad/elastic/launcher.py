"""What a worker asks an elastic launcher: which rank it has now.

The launcher is horovodrun or dadrun; both speak Horovod's protocol. A worker is identified by its host and
its slot on that host (the local rank that it was started with), which do not change. GET
/rank_and_size/<host>:<slot> says "ready for the next round", and is answered when every worker of the
previous round is ready or gone.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from dad.errors import DadInternalError, LeftJobError
from dad.runner.kv import KeyValueClient

_FAMILIES = ("DAD", "HOROVOD")
_TIMEOUT_SECONDS = 600.0


class Place(NamedTuple):
    """The fields, in the order of the launcher's answer."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return next((value for family in _FAMILIES if (value := environ.get(f"{family}_{name}"))), None)


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an elastic launcher has started this process."""
    return "1" in [environ.get(f"{family}_ELASTIC") for family in _FAMILIES]


def store_address(environ: Mapping[str, str]) -> str | None:
    """http://HOST:PORT of the launcher of an elastic job; None if this is none."""
    if not is_elastic(environ):
        return None
    host, port = (environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if host and port:
        return f"http://{host}:{port}"
    url = environ.get("DAD_RENDEZVOUS", "")
    return url if url.startswith("http://") else None


_own_slot: str | None = None


def own_slot(environ: Mapping[str, str]) -> str | None:
    """<host>:<local rank>: the identity of this process for the launcher, fixed at its start."""
    global _own_slot
    if _own_slot is None:
        host, local_rank = _text(environ, "HOSTNAME"), _text(environ, "LOCAL_RANK")
        _own_slot = None if host is None or local_rank is None else f"{host}:{local_rank}"
    return _own_slot


def has_place(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has told this process its rank."""
    return _text(environ, "RANK") is not None and _text(environ, "SIZE") is not None


def elastic_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """For how long a job may wait until it can continue."""
    value = environ.get("HOROVOD_ELASTIC_TIMEOUT")
    return float(value) if value else _TIMEOUT_SECONDS


def import_late_modules() -> None:
    """Prepares a newcomer before the others make room for it, since from then on they wait for it.

    The first optimizer imports torch._dynamo, which takes seconds on a busy machine.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")


def ask_place(environ: Mapping[str, str]) -> Place:
    """Waits until the launcher has made a new round of the job. Raises LeftJobError if this worker is not in
    it."""
    store, slot = store_address(environ), own_slot(environ)
    if store is None or slot is None:
        raise DadInternalError(
            "this job is elastic, but the address of the launcher or the slot of this worker is missing "
            "(HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, HOROVOD_HOSTNAME, HOROVOD_LOCAL_RANK)"
        )
    answer = _get(store, slot, elastic_timeout(environ))
    try:
        place = Place(*(int(part) for part in answer.split(",")))
    except (ValueError, TypeError):
        raise DadInternalError(f"the launcher at {store} answers {answer!r} to /rank_and_size") from None
    if place.rank < 0:
        host, _, number = slot.rpartition(":")
        raise LeftJobError(f"{host}[{number}] is not in this job any more: the launcher has removed its host")
    return place


def _get(store: str, slot: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    try:
        answer = KeyValueClient(store, request_timeout=seconds).get("rank_and_size", slot)
    except (OSError, http.client.HTTPException) as error:
        waited = f" within {seconds:g} s" if time.monotonic() >= deadline else ""
        raise DadInternalError(
            f"the launcher at {store} has not answered{waited} which rank this worker has: "
            f"{type(error).__name__}: {error}"
        ) from error
    if answer is None:
        raise DadInternalError(f"the launcher at {store} has no answer to GET /rank_and_size/{slot}")
    return answer.decode(errors="replace")


def take_place(place: Place, environ: MutableMapping[str, str]) -> None:
    """Writes the place to where the launcher had left that of the previous round."""
    own_slot(environ)
    dad = any(environ.get(f"DAD_{field.upper()}") for field in ("rank", "size"))
    for family in ("DAD", "HOROVOD") if dad else ("HOROVOD",):
        for field, value in place._asdict().items():
            environ[f"{family}_{field.upper()}"] = str(value)
