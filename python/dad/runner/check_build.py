"""What this installation was built with: `dadrun --check-build`. Must work when nothing is built."""

from __future__ import annotations

import importlib.util

from dad._version import __version__
from dad.libraries import SOURCES, op_folders

FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch"}
PLUGINS = {"MPI": "mpi", "Gloo": "gloo"}


def framework_status(module: str) -> tuple[bool, str]:
    """Whether dad can be used with the installed framework; if not, why not."""
    versions = list(op_folders(module))
    if not versions and not SOURCES.exists():
        return False, f"dad was built without it; with it installed: {rebuild_command()}"
    if importlib.util.find_spec(module) is None:
        return False, f"{module} is not installed: pip install {'=='.join([module, *versions[-1:]])}"
    built_for = f"built for {' and '.join(versions)}" if versions else "compiled at the first import"
    others = "; for other versions compiled at the first import" if versions and SOURCES.exists() else ""
    return True, built_for + others


def plugin_status(name: str) -> tuple[bool, str]:
    """Whether the plug-in of the transport can be opened; if not, why not."""
    try:
        from dad._lib import _core
    except ImportError as error:
        return False, f"the core is not there ({error}); build it: {rebuild_command()}"
    available, text = _core.plugin_status(name)
    return bool(available), str(text)


def rebuild_command() -> str:
    return "pip install --no-build-isolation --force-reinstall --no-deps ."


def describe_build() -> str:
    frameworks = {name: framework_status(module)[0] for name, module in FRAMEWORKS.items()}
    plugins = {name: plugin_status(plugin)[0] for name, plugin in PLUGINS.items()}
    lines = [f"dad v{__version__}:", "", "Available Frameworks:"]
    lines += _marks(frameworks)
    lines += ["", "Available Controllers:", *_marks(plugins)]
    operations = {"NCCL": False, **plugins}
    lines += ["", "Available Tensor Operations:", *_marks(operations)]
    return "\n".join(lines)


def _marks(entries: dict[str, bool]) -> list[str]:
    return [f"    [{'X' if there else ' '}] {name}" for name, there in entries.items()]
