"""DAD_METRICS_PORT: what a rank sends, in Prometheus' format, at http://127.0.0.1:PORT/metrics.

It listens on the loopback interface only. The ranks of one host use the ports PORT, PORT + 1, … in the order
of their local ranks.
"""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dad._lib import _core

_ADDRESS = "127.0.0.1"
_TOTALS = {
    "steps": "Steps of the tensor that was exchanged most often.",
    "wire_bytes_sent": "Bytes sent at the socket.",
    "wire_bytes_received": "Bytes received at the socket.",
    "messages_sent": "Messages sent.",
    "dense_bytes": "Bytes that a dense allreduce of the same tensors would have sent.",
}
_OF_TENSORS = {
    "wire_bytes_sent": ("counter", "Bytes sent for a tensor."),
    "effective": ("gauge", "Rank of what was applied in the last step, or part of the elements sent."),
}


def text(stats: dict[str, Any], rank: int) -> str:
    """In Prometheus' text format."""
    lines = []
    for name, meaning in _TOTALS.items():
        metric = f"dad_{name}_total"
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} counter"]
        lines.append(f'{metric}{{rank="{rank}"}} {stats[name]}')
    for name, (kind, meaning) in _OF_TENSORS.items():
        metric = f"dad_tensor_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        for tensor, values in stats["tensors"].items():
            if values.get(name) is not None:
                lines.append(f'{metric}{{rank="{rank}",tensor="{_escaped(tensor)}"}} {values[name]}')
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404, "it is at /metrics")
            return
        if not _core.is_initialized():
            self.send_error(503, "the ranks have not met, or have parted")
            return
        body = text(_core.stats(), _core.rank()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


_server: tuple[int, ThreadingHTTPServer] | None = None  # and the process that it belongs to


def serve() -> None:
    """Begins to answer if DAD_METRICS_PORT is set; called when ranks have met. If the port is taken, that is
    logged, and training continues."""
    global _server
    asked = os.environ.get("DAD_METRICS_PORT")
    if not asked or (_server is not None and _server[0] == os.getpid()):
        return
    from dad.log import log

    try:
        port = int(asked)
        if not 1 <= port <= 65535 - _core.local_rank():
            raise ValueError
    except ValueError:
        raise ValueError(f"DAD_METRICS_PORT={asked} is not possible; a port, 1 to 65535") from None
    port += _core.local_rank()
    try:
        server = ThreadingHTTPServer((_ADDRESS, port), _Handler)
    except OSError as error:
        log.warning("no metrics at %s:%d (DAD_METRICS_PORT): %s", _ADDRESS, port, error.strerror)
        return
    server.daemon_threads = True
    _server = os.getpid(), server
    threading.Thread(target=server.serve_forever, name="dad metrics", daemon=True).start()
