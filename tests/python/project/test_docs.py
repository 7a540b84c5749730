"""The pages agree with the code."""

import os
import re
import subprocess
import sys

import pytest

from util import job_environment


def test_the_options_page_is_current(source_dir):
    subprocess.run([sys.executable, source_dir / "scripts/gen_options_doc.py", "--check"], check=True)


def test_figures_are_those_of_the_results(source_dir):
    subprocess.run([sys.executable, source_dir / "scripts/gen_figures.py", "--check"], check=True)


def test_the_options_page_has_every_variable_that_the_code_reads(source_dir):
    page = (source_dir / "docs/options.md").read_text()
    documented = set(re.findall(r"`((?:DAD|HOROVOD)_[A-Z0-9_]+)`", page))
    quoted = re.compile(r"""["']((?:DAD|HOROVOD)_[A-Z0-9_]*[A-Z0-9])\b""")
    found = {}
    for folder in ("dad_core", "torch_ops", "tf_ops", "python"):
        for file in (source_dir / folder).rglob("*"):
            if file.suffix in (".py", ".cc", ".h", ".cu") and file.name != "variables.py":
                found.update(dict.fromkeys(quoted.findall(file.read_text()), file))
    assert len(found) > 50
    missing = {name: str(file) for name, file in found.items() if name not in documented}
    assert not missing, f"add to python/dad/variables.py, then `make docs`: {missing}"
    place = {
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
    }  # put together in world.py
    stale = documented - set(found) - {f"{family}_{name}" for family in ("DAD", "HOROVOD") for name in place}
    assert not stale, f"no code reads these: {stale}"


def test_links_between_pages_lead_somewhere(source_dir):
    pages = [*source_dir.glob("*.md"), *source_dir.glob("docs/*.md")]
    assert pages
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_the_site_builds_without_a_warning(source_dir, tmp_path):
    pytest.importorskip(
        "mkdocs", reason="make setup brings it; pip install mkdocs-material mkdocstrings-python"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=source_dir, env=environment, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    assert 'id="dad.torch.DistributedOptimizer"' in (tmp_path / "api" / "index.html").read_text()


SCRIPT = re.compile(r"```python\n(# (\w+\.py): dadrun -np (\d) python \2.*?\n.*?)```", re.S)
PAGES = ("getting_started.md", "from_ddp.md", "checkpoints.md")


def scripts_of(page):
    return SCRIPT.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_scripts_in_the_documentation_run(source_dir, tmp_path, page):
    scripts = scripts_of(source_dir / "docs" / page)
    assert scripts
    for text, name, ranks in scripts:
        (tmp_path / name).write_text(text)
        job = subprocess.run(
            [sys.executable, "-m", "dad.runner.cli", "-np", ranks, sys.executable, name],
            cwd=tmp_path,
            env=job_environment(TF_CPP_MIN_LOG_LEVEL="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        assert job.returncode == 0 and "loss" in job.stdout, job.stdout


def test_every_script_that_names_its_command_is_run(source_dir):
    pages = {page.name for page in (source_dir / "docs").glob("*.md") if scripts_of(page)}
    assert pages <= set(PAGES), f"add to PAGES: {pages - set(PAGES)}"
