"""Code blocks of the documentation: fragments run, commands and flags exist, messages are those of the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import docs_blocks
from dad.cli import _make_parser as dad_parser
from dad.runner.elastic.options import elastic_plan
from dad.runner.flags import make_parser as dadrun_parser
from dad.runner.hosts import parse_hosts
from dad.runner.settings import variables_from
from docs_blocks import ROOT, blocks
from util import job_environment

# Commands of others, whose flags are not checked.
FOREIGN = (
    "mpirun",
    "torchrun",
    "srun",
    "horovodrun",
    "cmake",
    "pip",
    "ssh",
    "sysctl",
    "bible",
    "sudo",
    "apt-get",
)
OURS = ("dadrun", "dad", "make", "python")
PLACES = ("tools/", "scripts/", "examples/", "benchmarks/", "tests/")
OF_THE_READER = ("train.py", "hosts.sh")


def command_of(line: str) -> list[str]:
    """The words of a command, without the comment behind it and the variables in front of it."""
    text = re.split(r"\s{2,}|\s#\s", line.strip().removeprefix("$ "))[0]
    text = text.split(" && ")[0].replace("$(dad overlay)", "overlay")
    words = shlex.split(text)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def known(word: str) -> bool:
    return word.split("/")[-1] in OURS or word in FOREIGN or word.startswith((*PLACES, "build/"))


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in blocks():
        if block.language not in ("", "shell", "sh", "bash"):
            continue
        lines = [line for line in block.text.splitlines() if line.strip()]
        if block.language == "" and not (lines and re.match(r"[\w./$=() -]+", lines[0])):
            continue
        for line in lines:
            try:
                words = command_of(line)
            except ValueError:  # output with a quote in it
                continue
            if words and known(words[0]):
                found.append((block.where, words))
    return found


def check_script(words: list[str]) -> None:
    """What python or a shell is given to run is there."""
    for word in words:
        if word.startswith(PLACES) and "=" not in word:
            assert (ROOT / word).exists(), f"there is no {word}"


def check_dadrun(words: list[str]) -> None:
    args = dadrun_parser().parse_args(words)
    variables_from(args)  # LaunchError for an option that is out of range
    elastic_plan(args)
    if args.hosts:
        parse_hosts(args.hosts, args.slots_per_host or 1)
    check_script(args.command)
    if args.command[:1] == ["python"]:
        script = args.command[1]
        assert script.startswith(PLACES) or script in OF_THE_READER or script in scripts(), script


def scripts() -> set[str]:
    return {match[1] for block in blocks() if (match := docs_blocks.SCRIPT.match(block.text))}


def check(words: list[str]) -> None:
    name = words[0].split("/")[-1]
    if name == "dadrun":
        check_dadrun(words[1:])
    elif name == "dad":
        dad_parser().parse_args(words[1:])
    elif name == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets, f"make has no target {words[1]}"
    check_script(words)


def test_commands_and_their_flags_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # files that a flag names are made here
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    found = commands()
    assert len(found) > 60
    for where, words in found:
        try:
            check(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{where}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize(
    "line", ["dadrun -np 2 --compresion auto python train.py", "make nothing", "python examples/none.py"]
)
def test_a_command_that_does_not_exist_is_found(line, capsys):
    with pytest.raises((AssertionError, SystemExit)):
        check(command_of(line))


@pytest.mark.parametrize(("framework", "least"), [("torch", 8), ("keras", 2)])
def test_fragments_run(tmp_path, framework, least):
    pytest.importorskip("torch" if framework == "torch" else "tensorflow")
    assert len(docs_blocks.fragments(framework)) >= least
    command = [sys.executable, "-m", "dad.runner.cli", "-np", "2", sys.executable, docs_blocks.__file__]
    job = subprocess.run(
        [*command, framework],
        cwd=tmp_path,
        env=job_environment(TF_CPP_MIN_LOG_LEVEL="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert job.returncode == 0 and "ran " in job.stdout, job.stdout


def test_python_that_does_not_compile_is_found():
    """Also in blocks that are complete scripts or are not run."""
    for block in blocks():
        text = docs_blocks.python_of(block)
        if text is not None:
            compile(text, block.where, "exec")


def literals() -> str:
    """The sources, with strings that are written in several parts as one."""
    sources = []
    for folder in ("dad_core", "torch_ops", "tf_ops", "python/dad"):
        files = (ROOT / folder).rglob("*")
        sources += [file.read_text() for file in files if file.suffix in (".py", ".cc", ".h")]
    return re.sub(r"""["']\s*\+?\s*f?["']""", "", "\n".join(sources))


def missing_messages(page: str, sources: str) -> list[str]:
    """Messages in a list like that of troubleshooting.md of which some part is not in the sources."""
    messages = re.findall(r"^ *- `([^`]+)`", page, re.M)
    parts = ((message, part.strip()) for message in messages for part in message.split("…"))
    return [message for message, part in parts if part not in sources]


def test_messages_of_troubleshooting_are_those_of_the_code():
    page, sources = (ROOT / "docs/troubleshooting.md").read_text(), literals()
    assert page.count("- `") > 60
    assert not missing_messages(page, sources)
    assert missing_messages("- `ranks disagree on the … colour of a zebra`", sources)


def prose_lines(page: Path) -> list[str]:
    """Lines that are neither code nor rows of a table."""
    text = docs_blocks.BLOCK.sub("", page.read_text())
    return [line for line in text.splitlines() if not line.startswith(("|", "<!--"))]


def test_prose_keeps_to_a_hundred_columns():
    long = [
        (page.name, line) for page in docs_blocks.pages() for line in prose_lines(page) if len(line) > 100
    ]
    assert not long


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_spelling():
    pytest.importorskip("codespell_lib", reason="make setup brings it; pip install codespell")
    files = [*docs_blocks.pages(), *sorted((ROOT / "examples").rglob("*.py"))]
    command = [sys.executable, "-m", "codespell_lib", *map(str, files)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # [tool.codespell]
    assert checked.returncode == 0, checked.stdout + checked.stderr
