"""Horovod's common package, with dad's exceptions; the rest is the real one's, if there is one."""

from __future__ import annotations

import os

import horovod

__path__ += [  # type: ignore[name-defined]  # noqa: F821
    directory
    for directory in (os.path.join(place, "common") for place in horovod.__path__)
    if os.path.isdir(directory) and directory not in __path__  # type: ignore[name-defined]  # noqa: F821
]
