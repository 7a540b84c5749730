"""Hooks of mkdocs: pages above docs/ are part of the site, and links out of it lead to the sources."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def on_files(files, config):
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """docs/x.md from above, ../X.md from docs/; any other file of the tree is named, not linked."""

    def target(match):
        text, link = match.groups()
        link = link.removeprefix("../").removeprefix("docs/")
        path, _, _ = link.partition("#")
        if path and files.get_file_from_path(path) is None:
            return text
        return f"[{text}]({link})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(((?:\.\./|docs/)[^)\s]*)\)", target, markdown)
