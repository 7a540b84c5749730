"""Writes docs/options.md from the option table of the core (dad_core/util/options.cc).

With --check it changes nothing and fails if the page is not current.
"""

import sys
from pathlib import Path

from dad._lib import _core

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

Settings of the core. Each is read from the environment at `init()`: the DAD variable first, then
Horovod's, else the default. A value that does not parse is an error that names variable, value and what
was expected. `dadrun` has flags for the common ones ([launching.md](launching.md)).

This page is made by `make docs` from the table in `dad_core/util/options.cc`.

| option | default | variables | meaning |
|---|---|---|---|
"""


def code(text):
    return f"`{text}`" if text else ""


def page():
    rows = []
    for name, default, dad_variable, horovod_variable, meaning in _core.option_table():
        variables = " ".join(code(variable) for variable in (dad_variable, horovod_variable) if variable)
        meaning = meaning.replace("|", "\\|")
        rows.append(f"| {name} | {code(default)} | {variables} | {meaning} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != page():
            sys.exit("docs/options.md is not current: run `make docs`")
    else:
        PAGE.write_text(page())
