"""Loads dad._lib._torch for the torch that is installed."""

from __future__ import annotations

from pathlib import Path

import torch

from dad import _lib
from dad.libraries import LIB_DIR, op_folder

if not torch._C._GLIBCXX_USE_CXX11_ABI:
    raise ImportError(
        f"torch {torch.__version__} was compiled with the old C++ ABI, which dad does not use: "
        "pip install --upgrade torch"
    )
_folder = op_folder("torch", torch.__version__, Path(torch.__file__).parent)
if _folder != LIB_DIR:
    # In front: beside _core there may be a _torch for another version.
    _lib.__path__.insert(0, str(_folder))

from dad._lib import _torch  # noqa: E402  only now is it known where it is

__all__ = ["_torch"]
