"""Horovod's name for the collectives, for scripts that use `hvd.mpi_ops` or import from it."""

from dad import basics as _basics  # noqa: F401  scripts read the ids of process sets from it
from dad.torch import *  # noqa: F403
