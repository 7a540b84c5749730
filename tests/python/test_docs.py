"""The pages agree with the code."""

import re
import subprocess
import sys


def test_the_options_page_is_current(source_dir):
    subprocess.run([sys.executable, source_dir / "scripts/gen_options_doc.py", "--check"], check=True)


def test_links_between_pages_lead_somewhere(source_dir):
    pages = [*source_dir.glob("*.md"), *source_dir.glob("docs/*.md")]
    assert pages
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
