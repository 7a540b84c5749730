"""The benchmarks of dad, one table each: python benchmarks/run.py (or make bench)

    --only NAME    that one; may be given several times. Those that train to the end take hours and run
                   only by name: accuracy_fashion, accuracy_text, frontier
    --quick        fewer cells and less time for each: some minutes in all
    --json FILE    the rows, for programs

Times are ratios against torch.distributed in the same processes, taking turns. Without root the
shaped links are left out, and named. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import Settings, exit_on_sigterm, progress

BENCHMARKS = ("overhead", "allreduce", "small_tensors", "latency", "optimizer", "bytes", "methods")
LONG = ("accuracy_fashion", "accuracy_text", "frontier")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=(*BENCHMARKS, *LONG), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    exit_on_sigterm()

    results: dict[str, Any] = {}
    failed = []
    for name in arguments.only or BENCHMARKS:
        start = time.monotonic()
        result = importlib.import_module(name).run(Settings(quick=arguments.quick))
        if result.failed:
            failed.append(name)
        progress(f"{name}: {time.monotonic() - start:.0f} s")
        print(f"{result.text()}\n", flush=True)
        results[name] = asdict(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
