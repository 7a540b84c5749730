"""The compiled libraries of this installation, and the op library for the installed framework.

A package holds op libraries for some versions of torch and TensorFlow, and the sources of both. For
another version, the first import compiles one into a cache (compile_ops.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LIB_DIR = Path(__file__).parent / "_lib"
SOURCES = LIB_DIR / "src"  # of the op libraries, in a package; a development tree has none here
REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall . (in dad's source directory)"


def build_info() -> dict[str, Any]:
    """What the build recorded; empty if there was none."""
    try:
        info: dict[str, Any] = json.loads((LIB_DIR / "build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info


def is_built(name: str) -> bool:
    """Whether libdad_<name> is there; a development build may have left it for later."""
    return (LIB_DIR / f"libdad_{name}.so").exists()


def release(version: str) -> str:
    """The version without its variant: the interface of torch 2.13.0+cpu is that of 2.13.0+cu130.

    Other versions than releases stay as they are: what is behind their plus is what they are.
    """
    public = version.split("+")[0]
    return public if re.fullmatch(r"[0-9.]+", public) else version


def op_folders(framework: str) -> dict[str, Path]:
    """The op libraries of this installation: the release that each is for, and where it is."""
    folders = {}
    if built_for := build_info().get(framework):
        folders[release(built_for)] = LIB_DIR
    for folder in sorted((LIB_DIR / "ops").glob(f"{framework}-*")):
        folders[folder.name.removeprefix(f"{framework}-")] = folder
    return folders


def op_folder(framework: str, installed: str, root: Path) -> Path:
    """The folder with the op library for `framework`, compiled now if there is none.

    Args:
        framework: "torch" or "tensorflow".
        installed: the version that is loaded.
        root: the folder of its package.

    Raises:
        ImportError: in one line, where there is none and none can be made. Loading another version's
            would end in an undefined symbol.
    """
    folders = op_folders(framework)
    if folder := folders.get(release(installed)):
        return folder
    built = f"dad was built for {framework} {' and '.join(folders)}" if folders else ""
    what = f"{built or f'dad was built without {framework}'}, but {framework} {installed} is loaded"
    if not SOURCES.exists():
        raise ImportError(f"{what}: {REBUILD}")
    from dad.compile_ops import compile_once

    try:
        return compile_once(framework, installed, root)
    except (OSError, RuntimeError) as error:
        instead = f", or pip install {framework}=={list(folders)[-1]}" if folders else ""
        raise ImportError(f"{what}: {error}{instead}") from error
