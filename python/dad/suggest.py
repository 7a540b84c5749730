"""Suggests what a mistyped name may have meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean rank_dad?)`, or nothing if no known name is close (cutoff: 1 means equal)."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {found[0]}?)" if found else ""


class Parser(argparse.ArgumentParser):
    """Names the option or command that is nearest to an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        if unknown:
            message += nearest(unknown[1], self._option_string_actions)
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        super().error(message)
