"""Hostile clients of `handgrad serve` and `watch`: each is answered, or its connection is closed, within a bound of time,
threads and bytes; the next client is served."""

import contextlib
import functools
import ipaddress
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handgrad.api.model import load
from handgrad.reports.serve import Handler, Watched
from handgrad.serving import local_server
from handgrad.serving.local_server import listen
from tests.interop.models import make_checkpoint
from tests.test_serve import CHAT, COMPLETIONS, CONTEXT, HELLO, Client

HI = {"messages": HELLO, "max_tokens": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "run", "bytes", sizes=(2, 2, 32, CONTEXT), spread=0.5)[0]


@pytest.fixture(scope="module")
def lasting(run: Path) -> Iterator[Client]:
    """One for all rows of the table."""
    with Client(load(run, device="cpu")) as client:
        yield client


@pytest.fixture
def client(run: Path) -> Iterator[Client]:
    with Client(load(run, device="cpu")) as client:
        yield client


def line(start: str = "GET /v1/models HTTP/1.1", *headers: str, host: str | None = "localhost") -> bytes:
    """A request without a body."""
    lines = [start, *([f"Host: {host}"] if host is not None else []), *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(body: Any, *headers: str, path: str = CHAT, length: object = None, kind: str = "application/json") -> bytes:
    """A request with a body, of the right length unless given (`length` "": none)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = [f"Content-Length: {len(content) if length is None else length}"] if length != "" else []
    return line(f"POST {path} HTTP/1.1", f"Content-Type: {kind}", *size, *headers) + content


def chat(**settings: Any) -> bytes:
    return post(HI | settings)


def said(content: Any, role: Any = "user") -> bytes:
    return chat(messages=[{"role": role, "content": content}])


def text(prompt: Any) -> bytes:
    return post({"prompt": prompt, "max_tokens": 1}, path=COMPLETIONS)


CLOSED = 0  # without an answer
GOOD = chat()
LINES = {
    CLOSED: [b"\r\n", b"   \r\n"],
    200: [b"GET / HTTP/1.1\nHost: localhost\n\n", line("GET\t/\tHTTP/1.1")],
    400: [
        *(b"\x00" * 9, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\rHost: localhost\r\r"),
        *(line(f"GET / {version}") for version in ("HTTP/1.1 more", "http/1.1", "HTTP/1", "HTTP/1.\xb2")),
        *(line(f"GET / {version}") for version in ("HTTP/-1.1", "HTTP/99999999999.1")),
        *(line("GET / HTTP/2.0"), line("PRI * HTTP/2.0"), line("POST /")),
    ],
    403: [b"GET /\r\n\r\n"],
    405: [
        line(f"{method} / HTTP/1.1")
        for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "get", "__init__", "G\x00ET", "M" * 9000)
    ],
    414: [b"A" * 70_000, b"GET /" + b"a" * 70_000],
}
PATHS = {
    200: ["//"],
    204: ["/favicon.ico"],
    404: [
        "/..",
        "/../etc/passwd",
        "/%2e%2e/",
        "/?x=[",
        "http://[::1",
        "http://localhost/",
        "*",
        "/\0",
        "/\xe9",
        "/<b>",
        CHAT,
    ],
}
HOSTS = {
    200: ["LOCALHOST:1", "localhost:", "127.0.0.1:99999", "[::1]", "[::1]:80"],
    403: [
        *(None, "", "evil.example", "localhost.evil.example:8361", "127.0.0.1@evil.example", "localhost:80:80"),
        *("localhost, evil.example", "0.0.0.0", "192.168.0.1", "::1", "[::1", "http://localhost", "localhost\x00"),
        *("localhost\r\nHost: evil.example", "localhost\r\nHost: localhost", "evil.example\r\nX-Forwarded-Host: localhost"),
    ],
}
HEADERS = {
    200: [["none"], ["X: \x00\xff\x9b"], ["Upgrade: websocket", "Connection: Upgrade"], ["Range: bytes=0-1"]],
    431: [["X: y"] * 100, ["X: " + "y" * 70_000]],
}
LENGTHS = ["abc", "-1", "+2", "2, 2", "\xb2", "", 0, 10**9, "9" * 5000]
KINDS = [
    "",
    "text/plain",
    "application/x-www-form-urlencoded\r\nOrigin: https://evil.example",
    "application/jsonx",
    "a/b\r\nContent-Type: application/json",
]
POSTS = {
    200: [
        *(post(HI, kind="APPLICATION/JSON;;"), post(HI, "Expect: 100-continue"), GOOD + GOOD, GOOD + b"\x00" * 70_000),
        *(
            said("\x00\x1b[2J\u202e<script>"),
            said("<|endoftext|>" * 9),
            said("x" * 100_000),
            said(""),
            text(""),
            text("\ufdd0"),
        ),
        *(post(b"\xef\xbb\xbf" + json.dumps(HI).encode()), chat(messages=HELLO * 500)),
    ],
    400: [
        *(post(body) for body in (b"", b"null", b"[]", b"{", b"{'messages': []}", b'{"a": 1} x', b"\xff\xfe")),
        *(post(body) for body in (b"[" * 5000, b'{"a":' * 5000, b'{"a": ' + b"1" * 5000 + b"}", b"\x00")),
        *(post(HI, length=length) for length in LENGTHS),
        *(post(HI, kind=kind) for kind in KINDS),
        *(post(HI, header) for header in ("Content-Length: 2", "Transfer-Encoding: identity", "Transfer-Encoding: x")),
        *(post(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=""), said("\ud800"), text("\ud800")),
    ],
    404: [post(HI, path="/"), post(HI, path=CHAT + "/")],
}
FIELDS = {
    200: {"top_k": [10**18], "stop": ["\ud800", ["x"] * 1000], "user": [{"a": [1]}], "stream": [False]},
    400: {
        "messages": ["x", None, {}, [], ["x"], [{"role": "user"}], [{"role": 1, "content": "x"}]],
        "temperature": ["hot", -1, True, float("inf")],
        "top_k": [1.5, -1],
        "top_p": [0, float("nan")],
        "min_p": [{}],
        "max_tokens": [0, "9", True, CONTEXT + 1, 10**9, 10**39],
        "max_completion_tokens": [-1],
        "repetition_penalty": [0],
        "seed": [-1, 2**32],
        "stop": [1, [1], ""],
        "stream": ["x"],
        "stream_options": ["x", [1], {"include_usage": "x"}],
        "n": [2],
        "\x1b]0;x\x07": [1],
    },
}
ROWS = [
    *((sent, status) for table in (LINES, POSTS) for status, each in table.items() for sent in each),
    *((line(f"GET {path} HTTP/1.1"), status) for status, paths in PATHS.items() for path in paths),
    *((line(host=host), status) for status, hosts in HOSTS.items() for host in hosts),
    *((line("GET / HTTP/1.1", *headers), status) for status, each in HEADERS.items() for headers in each),
    *((chat(**{name: value}), status) for status, each in FIELDS.items() for name in each for value in each[name]),
]


def exchange(port: int, sent: bytes, *, ends: bool = False) -> tuple[int, bytes]:
    """The status and the body of the answer to these bytes; CLOSED if the connection is closed without one. `ends`: the
    client sends no more, and says so."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # answered and closed before all was read
            connection.sendall(sent)
            if ends:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while block := connection.recv(1 << 16):
                answer += block
    head, _, body = answer.partition(b"\r\n\r\n")
    if head and b"text/html" not in head and b" 204 " not in head:
        assert b"Content-Type: application/json" in head and b"X-Frame-Options: DENY" in head
    return (int(head.split()[1]) if head else CLOSED), body


@pytest.mark.parametrize(("sent", "status"), ROWS, ids=lambda value: repr(value)[:60])
def test_a_hostile_request(lasting: Client, capsys: pytest.CaptureFixture, sent: bytes, status: int) -> None:
    found, body = exchange(lasting.port, sent, ends=b"\r\n\r\n" not in sent)
    assert found == status, body
    assert body == b"" if sent.startswith(b"HEAD") else status < 400 or json.loads(body)["error"]["message"]
    assert exchange(lasting.port, GOOD)[0] == 200 and capsys.readouterr() == ("", "")


def test_the_table_is_complete() -> None:
    assert len(dict(ROWS)) == len(ROWS) == 154


def test_a_client_that_ends_before_its_request_does(client: Client) -> None:
    """Half a body is none, even where it is JSON; a client that has closed one half of its connection counts as gone."""
    status, body = exchange(client.port, post(b'{"prompt": "Once"} ', path=COMPLETIONS, length=30), ends=True)
    assert status == 400 and "expected a body of 30 bytes, found 19" in json.loads(body)["error"]["message"]
    assert exchange(client.port, line(), ends=True)[0] == 200
    assert exchange(client.port, GOOD, ends=True)[0] == 400 and client.lines == ["chat: the client went away"]


@pytest.mark.fault(50)
@pytest.mark.parametrize("piece", ["a", ""], ids=["of pieces", "without a piece"])
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_ends_its_text(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, streams: bool, piece: str
) -> None:
    """A text without an end, and those of clients that left while they waited, of which nothing is written."""
    write = client.writer.write
    monkeypatch.setattr(
        client.writer, "write", lambda request: write(request) if request.kind == "chat" else itertools.repeat(piece)
    )
    body = json.dumps({"prompt": "Once", "stream": streams}).encode()
    waiting = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(3)]
    for connection in waiting:
        connection.sendall(request_bytes(COMPLETIONS, body) + b" further bytes")
    while client.served.jobs.qsize() < 2:
        time.sleep(0.01)
    waiting[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
    for connection in reversed(waiting):
        connection.close()
    assert client.text(messages=HELLO)
    assert client.lines[:3] == ["completion: the client went away"] * 3
    join_connections()
    assert capsys.readouterr().err == ""


def test_a_client_that_takes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "SEND_SECONDS", 0.3)
    write = client.writer.write
    monkeypatch.setattr(
        client.writer, "write", lambda request: write(request) if request.kind == "chat" else itertools.repeat("x" * 10**6)
    )
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(request_bytes(COMPLETIONS, b'{"prompt": "Once", "stream": true}'))
        assert connection.recv(1)  # its turn has come
        assert client.text(messages=HELLO) and client.lines[0] == "completion: the client went away"


def join_connections() -> None:
    """The thread of a connection outlives the client's part of it."""
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(60)


def request_bytes(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.fault(50)
def test_clients_that_come_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are answered, by as many threads as the server has connections."""
    monkeypatch.setattr(local_server, "MOST_CONNECTIONS", 8)
    before = threading.active_count()
    with Client(load(run, device="cpu"), starts=False) as client:
        body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        connections = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(200)]
        for connection in connections:
            connection.sendall(request_bytes(COMPLETIONS, body))
        client.start()
        answers, most = [], 0
        for connection in connections:
            with connection, connection.makefile("rb") as answer:
                answers.append(answer.readline())
                most = max(most, threading.active_count())
    assert answers == [b"HTTP/1.0 200 OK\r\n"] * 200 and most <= before + 2 + 8


@pytest.mark.fault(50)
def test_a_request_that_never_comes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may trickle in; its time is that of the whole."""
    monkeypatch.setattr(local_server, "READ_SECONDS", 0.3)
    whole = request_bytes(CHAT, b"{}")
    for sent in (b"", whole[:9], whole[:-4], whole[:-1]):
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionError):  # closed before it was read
                assert connection.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection, pytest.raises(OSError):
        for _ in range(6000):
            connection.sendall(b"x")
            time.sleep(0.01)
    monkeypatch.undo()
    assert client.text(messages=HELLO)


@pytest.mark.fault(51)
@pytest.mark.parametrize(
    ("address", "named"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "192.168.0.1"), ("::", "[fe80::1]")]
)
def test_a_page_under_a_foreign_name(tmp_path: Path, capsys: pytest.CaptureFixture, address: str, named: str) -> None:
    """A name that another site resolves to this machine. A server on all addresses warns, and answers under any of them."""
    with listen(functools.partial(Handler, Watched([tmp_path])), "127.0.0.1", 0, may_move=False) as watching:
        watching.address = ipaddress.ip_address(address)  # as if it were bound there: no test listens on the network
        thread = threading.Thread(target=watching.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        hosts = {
            named: b"200",
            "localhost": b"200",
            "evil.example": b"403",
            "192.168.0.1.evil": b"403",
            "http://[::1": b"403",
        }
        for host, status in hosts.items():
            with socket.create_connection(("127.0.0.1", watching.server_address[1]), timeout=60) as connection:
                connection.sendall(line("GET / HTTP/1.1", host=host))
                answer = connection.makefile("rb").read()
            assert answer.split()[1] == status and (b"Waiting" in answer) == (status == b"200")
            assert b"frame-ancestors 'none'" in answer and b"X-Frame-Options: DENY" in answer
        with socket.create_connection(("127.0.0.1", watching.server_address[1]), timeout=60) as connection:
            connection.sendall(line("GET http://[::1 HTTP/1.1"))
            assert b" 404 " in connection.makefile("rb").readline()
        watching.shutdown()
        thread.join(60)
    told = capsys.readouterr().err
    assert "Traceback" not in told and ("every machine of the network" in told) == (address != "127.0.0.1")
