"""The position of this process's main thread, for the core and for ranks that ask.

A thread answers questions, so an answer needs no more than the interpreter's lock for a moment: a main thread
that is stuck in a collective, in a system call or in a loop of Python releases that lock.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path

from dad._lib import _core

_pid: int | None = None  # the process that has the thread
_LIBRARIES = tuple(
    dict.fromkeys(
        os.path.realpath(folder) + os.sep
        for name in ("purelib", "platlib", "stdlib", "platstdlib")
        if (folder := sysconfig.get_path(name))
    )
)
_DAD = str(Path(__file__).resolve().parents[1]) + os.sep


def start() -> None:
    """Begins to answer; does nothing if this process already does."""
    global _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    threading.Thread(target=_answer, name="dad position", daemon=True).start()


def _answer() -> None:
    while True:
        _core.await_program_question()
        try:
            where, stack = position()
        except Exception as error:  # the question must be answered
            where, stack = f"not known: {error!r}", ""
        # Names of files need not be UTF-8.
        _core.tell_program_position(*(text.encode(errors="replace").decode() for text in (where, stack)))


def position() -> tuple[str, str]:
    """The line of the user's code in which the main thread is, and its stack with the innermost line last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "has ended", ""
    frames = traceback.extract_stack(frame)
    return describe(frames), "\n".join(_line(one) for one in frames)


def describe(frames: list[traceback.FrameSummary]) -> str:
    """The innermost line of the user's code, and what it called if that is not the user's."""
    own = [one for one in frames if not _is_library(one.filename)]
    innermost = frames[-1]
    if not own:
        return _line(innermost)
    if own[-1] is innermost:
        return _line(innermost)
    return f"{_line(own[-1])} [in {_place(innermost)}, {innermost.name}]"


def _is_library(filename: str) -> bool:
    path = os.path.realpath(filename)
    return filename.startswith("<frozen") or path.startswith((*_LIBRARIES, _DAD))


def _line(frame: traceback.FrameSummary) -> str:
    name = "" if frame.name == "<module>" else f" in {frame.name}"
    code = f": {frame.line}" if frame.line else ""
    return f"{_place(frame)}{name}{code}"


def _place(frame: traceback.FrameSummary) -> str:
    """`torch/utils/data/dataloader.py:31`; a file of the user's relative to the working directory."""
    path = os.path.realpath(frame.filename) if os.path.exists(frame.filename) else frame.filename
    here = os.getcwd() + os.sep
    folders = (
        here,
        *sorted(_LIBRARIES, key=len, reverse=True),
        os.path.dirname(_DAD.rstrip(os.sep)) + os.sep,
    )
    for folder in folders:
        if path.startswith(folder):
            path = path[len(folder) :]
            break
    return f"{path}:{frame.lineno}"
