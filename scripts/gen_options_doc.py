"""Writes docs/options.md from the tables of settings: dad_core/util/options.cc and python/dad/variables.py.

With --check it changes nothing and fails if the page is not current.
"""

import re
import sys
from pathlib import Path

from dad import variables
from dad.runner.settings import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

Every setting, as an environment variable. dad reads the DAD variable first, then Horovod's, else it
uses the default. A value that does not parse is an error that names the variable, the value and
what was expected. `dadrun` sets those that have a flag ([launching.md](launching.md)); `dad
options` prints this page as text.

`make docs` makes this page from the tables in `dad_core/util/options.cc` and
`python/dad/variables.py`.
"""

TABLE = """
## {title}

| option | default | variables | flag of dadrun | meaning |
|---|---|---|---|---|
"""

TAIL = """
## Other names

Names that appear in the code but are not settings:

| variable | reason |
|---|---|
"""


def code(text):
    return f"`{text}`" if text else ""


def linked(text):
    return re.sub(r"\b(\w+\.md)\b", r"[\1](\1)", text.replace("|", "\\|"))


def page():
    flags = {name: "--" + row.argument.replace("_", "-") for row in SETTINGS for name in row.variables}
    text = HEAD
    for title, rows in variables.sections().items():
        text += TABLE.format(title=title)
        for row in rows:
            names = [name for name in (row.dad_variable, row.horovod_variable) if name]
            cells = (row.name, code(row.default), " ".join(map(code, names)), code(flags.get(names[0])))
            text += f"| {' | '.join(cells)} | {linked(row.meaning)} |\n"
    text += TAIL
    for name, reason in variables.NOT_SETTINGS.items():
        text += f"| {code(name)} | {reason} |\n"
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != page():
            sys.exit("docs/options.md is not current: run `make docs`")
    else:
        PAGE.write_text(page())
