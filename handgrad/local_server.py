"""HTTP on this machine, for the pages of commands: a server of Python's own, on a port that is free."""

import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from handgrad.errors import UsageError

HTML = "text/html; charset=utf-8"


class LocalServer(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True


class LocalHandler(BaseHTTPRequestHandler):
    """Answers that no cache keeps."""

    def answer(self, status: HTTPStatus, content: bytes = b"", kind: str = HTML) -> None:
        with contextlib.suppress(ConnectionError):  # the browser went away
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal is for errors."""


def listen(handler: Callable[..., BaseHTTPRequestHandler], host: str, port: int, *, may_move: bool) -> LocalServer:
    """A server on `port`, or if `may_move` and that is taken on a free one. Raises `UsageError`: taken, or no such host."""
    refused = OSError()
    for number in (port, 0) if may_move else (port,):
        try:
            return LocalServer((host, number), handler)
        except OSError as error:
            refused = error
    reason = refused.strerror or refused
    remedy = "name another --port, or none to take a free one"
    if isinstance(refused, socket.gaierror):
        remedy = "name another --host, or none for this machine alone"
    raise UsageError(f"cannot listen on {host}, port {port}: {reason}; {remedy}")
