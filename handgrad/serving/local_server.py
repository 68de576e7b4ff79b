"""HTTP on this machine, for the pages of commands: Python's own server, on a free port.

The owner of another site can make its name resolve to this machine (DNS rebinding); its pages could then read the answers
of a server here. A server therefore answers only to its own names. It bounds the number and the time of connections.
"""

import errno
import io
import ipaddress
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from handgrad.errors import UsageError, print_message

HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
MOST_CONNECTIONS = 128  # each has a thread
READ_SECONDS, SEND_SECONDS = 20, 60  # for a whole request, for a piece of an answer
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",  # for browsers without the line above
    "X-Content-Type-Options": "nosniff",
}
LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]"}


class LocalServer(ThreadingHTTPServer):
    """A thread for each connection; connections above `MOST_CONNECTIONS` wait for a free one."""

    request_queue_size = 1024  # connections that wait; the system may allow fewer

    def __init__(self, host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]):
        super().__init__((host, port), handler)
        self.free = threading.Semaphore(MOST_CONNECTIONS)
        self.address = ipaddress.ip_address(str(self.server_address[0]))
        self.names = {*LOCAL_NAMES, host.lower()} - {""}

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        if not self.address.is_loopback:
            reach = "every machine of the network can use this server, which asks for no password"
            print_message(f"{reach}; without --host it serves this machine alone", ends=False)
        super().serve_forever(poll_interval)

    def is_named(self, host: str) -> bool:
        """True if `host`, a Host header, names this server; any address does if it listens on all addresses."""
        name = re.sub(r":\d*$", "", host.lower())
        return name in self.names or (self.address.is_unspecified and bool(re.fullmatch(r"[\d.]+|\[[\da-f:.]+\]", name)))

    def process_request(self, request: Any, client_address: Any) -> None:
        self.free.acquire()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError: the client left
            super().handle_error(request, client_address)


class Incoming(socket.SocketIO):
    """Reads from a client, which has `READ_SECONDS` to send everything."""

    def __init__(self, connection: socket.socket):
        super().__init__(connection, "r")
        self.connection, self.end = connection, time.monotonic() + READ_SECONDS

    def readinto(self, b: Any) -> int | None:
        self.connection.settimeout(max(self.end - time.monotonic(), 1e-3))
        try:
            return super().readinto(b)
        finally:
            self.connection.settimeout(SEND_SECONDS)


class LocalHandler(BaseHTTPRequestHandler):
    """Sends answers that no cache may store and no page may frame."""

    timeout = SEND_SECONDS
    default_request_version = "HTTP/1.0"  # of a line without a version: its answer has a status, too

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Incoming(self.connection))

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        assert isinstance(self.server, LocalServer)
        host = ", ".join(self.headers.get_all("Host", []))
        if not (named := self.server.is_named(host)):
            remedy = "use localhost, or serve with another --host"
            self.refuse(HTTPStatus.FORBIDDEN, f"expected the Host of this server, found {host or 'none':.80}; {remedy}")
        return named

    def answer(self, status: HTTPStatus, content: bytes = b"", kind: str = HTML) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def refuse(self, status: HTTPStatus, message: str) -> None:
        self.answer(status, message.encode(errors="replace"), TEXT)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses a request that Python's server cannot parse; an unsupported method or version is the client's error."""
        status = {501: HTTPStatus.METHOD_NOT_ALLOWED, 505: HTTPStatus.BAD_REQUEST}.get(code, HTTPStatus(code))
        self.refuse(status, f"{message or status.phrase:.200}")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the terminal is for errors."""


def listen(handler: Callable[..., BaseHTTPRequestHandler], host: str, port: int, *, may_move: bool) -> LocalServer:
    """A server on `port`; if that is taken and `may_move`, on a free port. Raises `UsageError`: taken, or no such host."""
    refused = OSError()
    for number in (port, 0) if may_move else (port,):
        try:
            return LocalServer(host, number, handler)
        except OSError as error:
            refused = error
    reason = refused.strerror or refused
    remedy = "name another --port, or none to take a free one"
    if isinstance(refused, socket.gaierror) or refused.errno == errno.EADDRNOTAVAIL:  # no name, or another machine's
        remedy = "name another --host, or none for this machine alone"
    raise UsageError(f"cannot listen on {host}, port {port}: {reason}; {remedy}")
