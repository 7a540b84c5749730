"""The pages agree with the code."""

import re
import subprocess
import sys


def test_the_options_page_is_current(source_dir):
    subprocess.run([sys.executable, source_dir / "scripts/gen_options_doc.py", "--check"], check=True)


def test_the_figures_of_the_readme_are_those_of_the_results(source_dir):
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
