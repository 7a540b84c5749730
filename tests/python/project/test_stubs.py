"""The stubs of the compiled modules say what these have: every name, every argument, keywords and defaults."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path

import pytest

STUBS = Path(__file__).parents[3] / "python/dad/_lib"
# What is imported before a module, which loads its libraries.
MODULES = {"_core": "dad", "_torch": "dad.torch"}


def arguments_of_stub(function: ast.FunctionDef) -> list[str]:
    """`name`, `name=` with a default, and `*` before those that are keywords only."""
    arguments = function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    # pybind11 numbers those without a name, which cannot be keywords.
    words = [f"arg{i}" for i in range(len(arguments.posonlyargs))]
    words += [
        one.arg + "=" * (value is not None) for one, value in zip(arguments.args, defaults, strict=True)
    ]
    if arguments.kwonlyargs:
        words.append("*")
        both = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        words += [one.arg + "=" * (value is not None) for one, value in both]
    return [word for word in words if word != "self"]


def arguments_of_doc(doc: str) -> list[str]:
    """The same of the first line that pybind11 writes."""
    line = doc.splitlines()[0]
    text, depth, words = line[line.index("(") + 1 :], 0, [""]
    for letter in text:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    names = [word.split(":")[0].strip() + "=" * (" = " in word) for word in words if word.strip()]
    return [name for name in names if name not in ("self", "/")]


def described_by(stub: ast.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = arguments_of_stub(node)
        elif isinstance(node, ast.ClassDef):
            members: dict[str, object] = {}
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    members[one.target.id] = None  # an attribute
                if isinstance(one, ast.FunctionDef):
                    members[one.name] = None if one.decorator_list else arguments_of_stub(one)
            found[node.name] = members
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def described_by_module(module: types.ModuleType) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            members: dict[str, object] = {}
            for member, one in vars(value).items():
                if isinstance(one, property):
                    members[member] = None
                elif callable(one) and (not member.startswith("_") or member == "__init__"):
                    doc = one.__doc__ or ""
                    if doc.startswith(member + "("):  # else it cannot be constructed from Python
                        members[member] = arguments_of_doc(doc)
            found[name] = members
        else:
            found[name] = arguments_of_doc(value.__doc__) if callable(value) else None
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_stub_says_what_its_module_has(name):
    framework = MODULES[name].partition(".")[2]
    if framework:
        pytest.importorskip(framework)
    importlib.import_module(MODULES[name])
    module = importlib.import_module(f"dad._lib.{name}")
    stub = described_by(ast.parse((STUBS / f"{name}.pyi").read_text()))
    there = described_by_module(module)
    assert stub.keys() == there.keys()
    for key, members in there.items():
        assert stub[key] == members, key
