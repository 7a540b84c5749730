"""One rank of dad.run(): `python -m dad.runner.run_task ADDR PORT`."""

from __future__ import annotations

import os
import sys
import traceback

from dad.runner.kv import KeyValueClient
from dad.runner.payload import FUNCTION, RESULT_SCOPE, SECRET_VARIABLE, pack, unpack
from dad.world import WorldError, discover


def main(argv: list[str]) -> int:
    address, port = argv
    # The function may start processes of its own, which must not get the key.
    secret = os.environ.pop(SECRET_VARIABLE)
    client = KeyValueClient(f"http://{address}:{port}", request_timeout=60.0)
    packed = client.get(*FUNCTION)
    if packed is None:
        sys.exit(f"there is no function at {client.url}")
    try:
        function, args, kwargs = unpack(packed, secret)
        answer = pack(("result", function(*args, **kwargs)), secret)
        code = 0
    except Exception as error:
        traceback.print_exc()
        answer = _pack_error(error, secret)
        code = 1
    # Not before: in an elastic job the rank may change.
    client.put(RESULT_SCOPE, str(_rank()), answer)
    return code


def _rank() -> int:
    try:
        return discover(os.environ).rank
    except WorldError:
        # An elastic job learns its size in init(), which the function has not called.
        return int(os.environ["DAD_RANK"])


def _pack_error(error: Exception, secret: str) -> bytes:
    text = traceback.format_exc()
    try:
        packed = pack(("error", error, text), secret)
        unpack(packed, secret)  # an exception may pickle and still fail to unpickle
    except Exception:
        return pack(("error", RuntimeError(f"{type(error).__name__}: {error}"), text), secret)
    return packed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
