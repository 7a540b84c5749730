"""Work that all ranks do together and that fails on all of them if it fails on one, such as checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from dad._lib import _core
from dad.errors import CheckpointError
from dad.process_sets import ProcessSet, global_process_set


class AllRanks:
    """The ranks of a process set, or this process alone before init()."""

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._is_alone = not _core.is_initialized() or not process_set.included() or process_set.size() == 1
        self._id = process_set.id
        self.rank, self.size = (0, 1) if self._is_alone else process_set.place

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Inside it, a rank does something by itself. Afterwards all ranks continue, or all raise a
        CheckpointError that names the ranks that failed; nobody waits for them."""
        problem, error = "", None
        try:
            yield
        except Exception as raised:
            error = raised
            problem = f"{type(raised).__name__}: {raised}"
        if self._is_alone:
            if error is not None:
                raise CheckpointError(f"this process failed to {what}: {problem}") from error
            return
        problems = {i: text for i, text in enumerate(self._gather([problem])) if text}
        if problems:
            said = "; ".join(f"rank {rank} failed to {what}: {text}" for rank, text in problems.items())
            raise CheckpointError(said) from error

    def gather_on_first(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on the first rank; nothing on the others."""
        if self._is_alone:
            return [data]
        return _core.send_bytes("checkpoint.gather", [data, *[b""] * (self.size - 1)], self._id)

    def scatter_from_first(self, parts: Sequence[bytes]) -> bytes:
        """Sends each rank its part; the first rank has one for each, or none at all."""
        if self._is_alone:
            return parts[0] if parts else b""
        parts = list(parts) or [b""] * self.size
        return _core.send_bytes("checkpoint.scatter", parts, self._id)[0]

    def from_first(self, value: Any) -> Any:
        """The first rank's object; it travels pickled."""
        if self._is_alone:
            return value
        data = cloudpickle.dumps(value) if self.is_first else b""
        received = _core.gather_bytes("checkpoint.common", data, self._id)[0]
        return value if self.is_first else cloudpickle.loads(received)

    def _gather(self, mine: list[str]) -> list[str]:
        everyone = _core.gather_bytes("checkpoint.status", json.dumps(mine).encode(), self._id)
        return [json.loads(one)[0] for one in everyone]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write a file to. It replaces `path` when all of it is on disk; otherwise `path` is
    untouched."""
    target = Path(path)
    written = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}{target.suffix}")
    try:
        yield written
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.replace(target)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
