"""Takes requests over HTTP and sends answers back. Each connection has a thread; the model has one, which writes one text
after another, in the order of the requests. If a client closes its connection, the model stops writing its text."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from handgrad.errors import HandgradError, NumericsError, UsageError
from handgrad.generation.generate import MAX_TOKENS
from handgrad.serving.local_server import LocalHandler
from handgrad.serving.requests import CHAT, PATHS, Request, Writer, Written, read_request

PAGE = Path(__file__).with_name("page.html")
JSON, EVENTS = "application/json", "text/event-stream"
CURLS = "application/x-www-form-urlencoded"  # what `curl --data` says of any body
MOST_BYTES = 8 << 20  # of a request: a conversation of a million tokens takes half of it


@dataclass
class Job:
    """A request to the model, and the queue of its answer: pieces, then the end or an error."""

    request: Request
    has_left: Callable[[], bool]  # True if the client closed the connection, which stays open here until the end arrives
    arrived: SimpleQueue[str | Written | HandgradError] = field(default_factory=SimpleQueue)
    dropped: bool = False  # the client no longer reads

    def expect_client(self) -> None:
        if self.dropped or self.has_left():
            raise UsageError("the client went away")


@dataclass
class Served:
    """The state that connections share: the model's description, the defaults of requests, the queue to the model."""

    about: dict[str, Any]  # of the model, as `/v1/models` lists it
    default: Request
    system: str
    jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    numbers: Iterator[int] = field(default_factory=partial(count, 1))  # of the answers


def write_all(served: Served, writer: Writer, tell: Callable[[str], object]) -> None:
    """Writes the text of each job in the queue until it gets None; passes `tell` a line about each."""
    while (job := served.jobs.get()) is not None:
        try:
            job.expect_client()  # before its prompt is read
            for part in writer.write(job.request):
                job.expect_client()
                if part:
                    job.arrived.put(part)
                if isinstance(part, Written):
                    speed = part.tokens / max(part.elapsed_seconds, 1e-9)
                    said = f"{part.prompt_tokens} tokens read, {part.tokens} written at {speed:.0f} tokens/s"
                    tell(f"{job.request.kind}: {said} ({part.reason})")
        except HandgradError as error:
            job.arrived.put(error)
            tell(f"{job.request.kind}: {error}")


class Handler(LocalHandler):
    """GET / returns the page, GET /v1/models the model; answers a POST as a whole or, with `stream`, as events."""

    def __init__(self, served: Served, *connection: Any):
        self.served = served
        super().__init__(*connection)

    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(HTTPStatus.OK, PAGE.read_bytes())
        elif self.path == "/favicon.ico":
            self.answer(HTTPStatus.NO_CONTENT)
        elif self.path == "/v1/models":
            self.answer_json({"object": "list", "data": [self.served.about]})
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"nothing is at {self.path:.80}; the page is at /, the API at /v1")

    def do_POST(self) -> None:
        if (kind := PATHS.get(self.path)) is None:
            self.refuse(HTTPStatus.NOT_FOUND, f"nothing is at {self.path:.80}; POST to {' or '.join(PATHS)}")
            return
        served, context = self.served, self.served.about["context"]
        try:
            request = read_request(kind, self.content(), served.default, context, served.system)
        except UsageError as error:
            self.refuse_with(error)
            return
        job = Job(request, self.has_left)
        self.served.jobs.put(job)
        if isinstance(first := job.arrived.get(), HandgradError):
            self.refuse_with(first)
        elif request.streams:
            self.send_events(job, first)
        else:
            self.send_whole(job, first)

    def content(self) -> bytes:
        """The body of the request, which must be JSON: a browser sends JSON to another site's server only after a preflight
        request, which this server refuses, so no page from elsewhere can use the model. curl sends it without this type;
        so can a page, but a browser adds the page's Origin to every POST. Raises `UsageError`."""
        kind = self.headers.get_content_type() if "Content-Type" in self.headers else CURLS
        from_page = "Origin" in self.headers or self.headers.get("Sec-Fetch-Site", "none") != "none"
        if kind != JSON and (kind != CURLS or from_page):
            raise UsageError(f"expected Content-Type: {JSON}, found {kind}{' from a page' * from_page}")
        length = ", ".join(self.headers.get_all("Content-Length", []))
        if "Transfer-Encoding" in self.headers:
            length = "a Transfer-Encoding"
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MOST_BYTES:
            raise UsageError(f"expected a Content-Length of at most {MOST_BYTES}, found {length or 'none':.40}")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise UsageError(f"expected a body of {length} bytes, found {len(content)}")
        return content

    def has_left(self) -> bool:
        """True if the client has closed the connection. Discards what it sends after its request."""
        try:
            return not os.read(self.connection.fileno(), 1 << 16)  # does not block: the connection has a time-out
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_whole(self, job: Job, part: str | Written | HandgradError) -> None:
        """Sends the answer as one JSON object."""
        text = ""
        while isinstance(part, str):
            text += part
            part = job.arrived.get()
        if isinstance(part, HandgradError):
            self.refuse_with(part)
            return
        said = {"message": {"role": "assistant", "content": text}} if job.request.kind == CHAT else {"text": text}
        self.answer_json(self.head(job) | {"choices": [choice(said, part)], "usage": usage(part)} | noted(part))

    def send_events(self, job: Job, part: str | Written | HandgradError) -> None:
        """Sends the answer as server-sent events: an object for each piece, one for the end, and the word [DONE]."""
        is_chat, head = job.request.kind == CHAT, self.head(job, "chat.completion.chunk")
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", EVENTS)
            self.end_headers()
            if is_chat:
                self.send_event(head | {"choices": [choice({"delta": {"role": "assistant", "content": ""}})]})
            while isinstance(part, str):
                self.send_event(head | {"choices": [choice({"delta": {"content": part}} if is_chat else {"text": part})]})
                part = job.arrived.get()
            if isinstance(part, HandgradError):
                self.send_event(failure(str(part)))
                return
            self.send_event(head | {"choices": [choice({"delta": {}} if is_chat else {"text": ""}, part)]} | noted(part))
            if job.request.counts:
                self.send_event(head | {"choices": [], "usage": usage(part)})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client left, or read nothing for a minute
            job.dropped = True
            while isinstance(part, str):
                part = job.arrived.get()

    def send_event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def head(self, job: Job, chat_object: str = "chat.completion") -> dict[str, Any]:
        name = chat_object if job.request.kind == CHAT else "text_completion"
        answer = {"id": f"handgrad-{next(self.served.numbers)}", "object": name, "created": int(time.time())}
        return answer | {"model": self.served.about["id"]}

    def answer_json(self, value: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.answer(status, json.dumps(value).encode(), JSON)

    def refuse(self, status: HTTPStatus, message: str) -> None:
        self.answer_json(failure(message), status)

    def refuse_with(self, error: HandgradError) -> None:
        diverged = isinstance(error, NumericsError)
        self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR if diverged else HTTPStatus.BAD_REQUEST, str(error))


def failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def choice(said: dict[str, Any], end: Written | None = None) -> dict[str, Any]:
    reason = None if end is None else "length" if end.reason == MAX_TOKENS else "stop"
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def usage(end: Written) -> dict[str, int]:
    total = end.prompt_tokens + end.tokens
    return {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.tokens, "total_tokens": total}


def noted(end: Written) -> dict[str, str]:
    """The line about a prompt that was cropped, as `note`: OpenAI's API has no field for it."""
    return {"note": end.note} if end.note else {}
