"""The exceptions of dad. Those that Horovod's users catch keep their Horovod names too."""

from __future__ import annotations


class Error(RuntimeError):
    """Base of the errors that dad raises for what happens between ranks."""


class DadInternalError(Error):
    """A collective failed: a rank died, fell silent, shut down or disagreed with the others."""


HorovodInternalError = DadInternalError


class MismatchError(DadInternalError):
    """Ranks disagree on shape, dtype, op, root or method; the next collective works again."""


class ReplicaError(Error):
    """Replicas of a model are not bit-equal."""


class CheckpointError(Error):
    """A checkpoint was not written or read: some rank has failed, and all ranks are told why."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts of an elastic job has changed."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


class LeftJobError(Error):
    """This worker is not in its elastic job any more: its host was removed."""


class LostStateError(Error):
    """The ranks that are left of an elastic job must not go on as if they were the job: none of them has its
    last committed state, or too few of those that had it are left."""


# dad::StatusCode, by number.
_INVALID_ARGUMENT = 1
_FAILED_PRECONDITION = 2


def from_status(code: int, message: str) -> Exception:
    """The exception for a status of the core, which the bindings raise."""
    if code == _INVALID_ARGUMENT:
        return ValueError(message)
    if code == _FAILED_PRECONDITION:
        return MismatchError(message)
    return DadInternalError(message)
