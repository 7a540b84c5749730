"""util.py for TensorFlow and Keras: the checks of a file run on several ranks in one launch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from util import Results, imitate_hosts, launch, load_checks, slow_link

# Few threads and no chatter: ranks share the cores of one machine.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}


class Lazy:
    """A module that is imported when it is used: pytest itself needs no TensorFlow, and importing it takes
    seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not there")


def launched_once(file: str, num_ranks: int, *modules: str, **environment: str) -> Any:
    """The fixture `results` of a test file."""

    @pytest.fixture(scope="module")
    def results() -> Results:
        needs(*(modules or ("tensorflow", "keras")))
        return launch(file, num_ranks, timeout=280, runner=__file__, **ENVIRONMENT, **environment)

    return results


tf: Any = Lazy("tensorflow")


def hvd() -> Any:
    """dad.tensorflow, which only the ranks import."""
    return importlib.import_module("dad.tensorflow")


def raises(kind: type[BaseException], function: Any, *words: str) -> None:
    with pytest.raises(kind) as error:
        function()
    for word in words:
        assert word in str(error.value), str(error.value)


def run_checks(file: str, folder: str) -> None:
    """One rank: runs the checks and appends [name, outcome] lines to a file of its own."""
    import dad.basics as basics
    from dad._lib import _core

    checks = load_checks(file)
    imitate_hosts()
    basics.init()
    only = os.environ.get("CHECKS", "").split(",")
    with slow_link(), (Path(folder) / f"{basics.rank()}.json").open("w", buffering=1) as out:
        for name, module in checks.items():
            if not any(part in name for part in only):
                continue
            started = time.process_time()
            try:
                if hasattr(module, "before_check"):
                    module.before_check()
                getattr(module, name)()
                outcome = "passed"
            except pytest.skip.Exception:
                outcome = "passed"  # not for this framework
            except BaseException:
                outcome = traceback.format_exc()
                print(outcome, file=sys.stderr, flush=True)
            out.write(json.dumps([name, outcome]) + "\n")
            if os.environ.get("CHECK_TIMES"):
                print(f"{name}: {time.process_time() - started:.1f} s of CPU", flush=True)
            try:
                _core.barrier()
            except RuntimeError:
                # The check has killed the engine on all ranks; the next ones get a new one.
                basics.shutdown()
                basics.init()
    basics.shutdown()


if __name__ == "__main__":
    run_checks(sys.argv[1], sys.argv[2])
