"""Docstrings of public names: one line, then arguments, result, errors and an example. Read, not imported."""

from __future__ import annotations

import ast
import re

import pytest

griffe = pytest.importorskip("griffe", reason="make setup brings it with mkdocstrings-python")

MODULES = ("dad", "dad.torch", "dad.tensorflow", "dad.keras")
PARTS = ("dad.torch.elastic", "dad.tensorflow.elastic", "dad.keras.elastic", "dad.keras.callbacks")
# "Arguments and errors are those of allreduce()."
LIKE = re.compile(r"those\s+of\s+`?(\w+)\(\)")


@pytest.fixture(scope="module")
def package(pytestconfig):
    sources = [str(pytestconfig.rootpath / "python")]
    loader = griffe.GriffeLoader(search_paths=sources, allow_inspection=False)
    root = loader.load("dad")
    loader.resolve_aliases(implicit=True, external=False)
    return root


def public(package, module):
    """The functions and classes of a module, by name; those of other packages and submodules are left out."""
    found = {}
    here = package if module == "dad" else package[module.removeprefix("dad.")]
    for name, member in here.members.items():
        if name.startswith("_") or (here.exports is not None and name not in map(str, here.exports)):
            continue
        try:
            target = member.final_target if member.is_alias else member
        except griffe.GriffeError:
            continue  # made when it is asked for, or of another package
        if target.is_function or target.is_class:
            found[name] = target
    return found


def parameters(function):
    return [
        p.name
        for p in function.parameters
        if p.name not in ("self", "cls", "_") and not p.name.startswith("*")
    ]


def sections(docstring):
    """The text of each section of a docstring of Google's style, by its head."""
    parts = re.split(r"^(Args|Returns|Raises|Examples?)::?\n", docstring, flags=re.M)
    return {
        head.removesuffix("s") if head.startswith("Ex") else head: text
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def raises(function):
    """Whether it raises by itself, as the user's mistake."""
    source = "\n".join(function.source.splitlines())
    tree = ast.parse(re.sub(r"^\s+(?=@|def )", "", source, count=1) if source.startswith(" ") else source)
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def problems(name, item, others):
    doc = item.docstring.value if item.docstring else ""
    if not doc:
        return [f"{name} has no docstring"]
    first = doc.splitlines()[0]
    wrong = []
    if not first.endswith((".", ":")) or len(first) > 110:
        wrong.append(f"{name}: the first line is a sentence of its own: {first}")
    if item.is_class:
        bases = [str(base) for base in item.bases]
        if any("Error" in base or "Interrupt" in base for base in bases) or name.endswith(
            ("Error", "Interrupt")
        ):
            return wrong
        function = item.members.get("__init__") if "__init__" in item.members else None
        wanted = parameters(function) if function is not None and function.is_function else []
        result = "None"
    else:
        wanted, result = parameters(item), str(item.returns)
        if not wanted:
            return wrong
    has = sections(doc)
    if like := LIKE.search(doc):
        base = others.get(like[1])
        if base is None or base.docstring is None:
            return [*wrong, f"{name} names {like[1]}(), which has no docstring"]
        has = {**sections(base.docstring.value), **has}
    named = set(re.findall(r"^ {4}(?:\*{0,2})((?:\w+)(?:, \w+)*):", has.get("Args", ""), re.M))
    named = {one for names in named for one in names.split(", ")}
    if missing := [one for one in wanted if one not in named]:
        wrong.append(f"{name}: Args misses {', '.join(missing)}")
    if result not in ("None", "NoReturn") and "Returns" not in has:
        wrong.append(f"{name}: no Returns")
    if "Example" not in has:
        wrong.append(f"{name}: no Example")
    if item.is_function and raises(item) and "Raises" not in has:
        wrong.append(f"{name}: no Raises")
    return wrong


@pytest.mark.parametrize("module", [*MODULES, *PARTS])
def test_public_names_say_what_they_take_give_and_raise(package, module):
    names = public(package, module)
    assert names
    wrong = [text for name, item in names.items() for text in problems(f"{module}.{name}", item, names)]
    assert not wrong, "\n".join(wrong)


def test_a_missing_part_is_found(tmp_path):
    source = 'def f(a, b=1) -> int:\n    """Adds.\n\n    Args:\n        a: one.\n    """\n    raise ValueError(a)\n'
    (tmp_path / "m.py").write_text(source)
    module = griffe.GriffeLoader(search_paths=[str(tmp_path)], allow_inspection=False).load("m")
    assert problems("f", module["f"], {}) == [
        "f: Args misses b",
        "f: no Returns",
        "f: no Example",
        "f: no Raises",
    ]
