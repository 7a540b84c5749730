"""dad's exceptions under Horovod's names, so that `except HorovodInternalError` catches ours.

A real horovod's launcher wants a few more names from this module; they come from its own file.
"""

from __future__ import annotations

import os
import runpy

import horovod.common

from dad.errors import HorovodInternalError, HostsUpdatedInterrupt

_OURS = {"HorovodInternalError": HorovodInternalError, "HostsUpdatedInterrupt": HostsUpdatedInterrupt}

for _directory in horovod.common.__path__[1:]:
    _file = os.path.join(_directory, "exceptions.py")
    if os.path.isfile(_file):
        _names = runpy.run_path(_file, run_name=__name__)
        globals().update({k: v for k, v in _names.items() if not k.startswith("_") and k not in _OURS})
        break
