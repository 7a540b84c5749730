"""The logger "dad". Where the script has set up logging, its lines go there; else they look as the core's
do, at the level of DAD_LOG_LEVEL."""

from __future__ import annotations

import logging
import os
import sys

from dad._lib import _core

_LEVELS = {"TRACE": logging.DEBUG, "FATAL": logging.CRITICAL}


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        place = f"dad rank {_core.rank()}" if _core.is_initialized() else "dad"
        # One write, so that lines of many processes do not mix.
        sys.stderr.write(f"[{place}] {record.levelname}: {record.getMessage()}\n")


def _make() -> logging.Logger:
    logger = logging.getLogger("dad")
    name = (os.environ.get("DAD_LOG_LEVEL") or os.environ.get("HOROVOD_LOG_LEVEL") or "WARNING").upper()
    logger.setLevel(_LEVELS.get(name, getattr(logging, name, logging.WARNING)))
    logger.addHandler(_Stderr())
    return logger


log = _make()
