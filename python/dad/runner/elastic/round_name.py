"""The name that dadrun gives each round of an elastic job, in its store; elastic/round.py reads it."""

from __future__ import annotations

import json
import secrets

SCOPE = "dad_round"
KEY = "given"


def new_name(job: str) -> bytes:
    """token: of this round alone. job: the name of the job, for reports."""
    return json.dumps({"token": secrets.token_hex(8), "job": job}).encode()
