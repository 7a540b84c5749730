"""Horovod's name for dad: `import horovod.torch as hvd` gives `dad.torch`.

Everything else (the launcher above all) comes from a real horovod further down sys.path, if
there is one; so an unmodified horovodrun launches scripts that run on dad.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_ALIASES = {"torch": "dad.torch", "tensorflow": "dad.tensorflow", "keras": "dad.keras"}
# Horovod's own files, from which scripts sometimes import what the package itself has too.
_HOROVOD_FILES = {"mpi_ops", "functions", "compression", "optimizer", "sync_batch_norm", "util"}


# Beneath our packages, but the real one's: name -> the folder in it that has them.
_PASSED_ON = {"horovod.tensorflow.data": "tensorflow"}


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod.torch.x` in `dad.torch.x`: the same module object, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _dad_name(fullname) is None:
            return None
        if fullname in _PASSED_ON:
            places = [os.path.join(directory, _PASSED_ON[fullname]) for directory in _real_directories()]
            return importlib.machinery.PathFinder.find_spec(fullname, places)
        if fullname.startswith(tuple(f"{name}." for name in _PASSED_ON)):
            return None  # found beside its package
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what it then finds in sys.modules.
        name = _dad_name(module.__name__)
        assert name is not None
        sys.modules[module.__name__] = _import(name)


class _NotHere(importlib.abc.MetaPathFinder):
    """The last to be asked: says why there is nothing of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if fullname.startswith("horovod."):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: dad takes the place of horovod.torch, horovod.tensorflow and "
                "horovod.keras only; the rest comes from a real horovod, and "
                + ("the one that is installed has no such module" if _real_directories() else _NO_HOROVOD),
                name=fullname,
            )


_NO_HOROVOD = (
    "none is installed (HOROVOD_SKIP_COMPILE=1 pip install horovod==0.28.1 installs its Python part, without "
    "a compiler). To launch without it: dadrun, or dad.run()"
)


def _dad_name(fullname: str) -> str | None:
    parts = fullname.split(".")
    if len(parts) < 2 or parts[0] != "horovod" or parts[1] not in _ALIASES:
        return None
    return ".".join([_ALIASES[parts[1]], *parts[2:]])


def _import(name: str) -> ModuleType:
    package, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or package == "dad" or last not in _HOROVOD_FILES:
            raise
        return importlib.import_module(package)


def _real_directories() -> list[str]:
    """The packages called horovod that this one hides."""
    own = os.path.realpath(os.path.dirname(__file__))
    found = []
    for entry in sys.path:
        directory = os.path.join(entry or os.getcwd(), "horovod")
        is_package = os.path.isfile(os.path.join(directory, "__init__.py"))
        if is_package and os.path.realpath(directory) != own and directory not in found:
            found.append(directory)
    return found


__path__ += _real_directories()  # type: ignore[name-defined]  # noqa: F821
sys.meta_path.insert(0, _AliasFinder())
sys.meta_path.append(_NotHere())


def _real_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return "0.28.1"  # whose interface dad has


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _real_version()
    if name == "run":
        has_runner = any(os.path.isdir(os.path.join(place, "runner")) for place in _real_directories())
        return importlib.import_module("horovod.runner" if has_runner else "dad").run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
