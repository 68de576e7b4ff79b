"""`handgrad serve`: its answers are those of `Model.chat` and `Model.generate`, in the order of the requests; what it lacks
is refused; the page in a browser, where there is one."""

import dataclasses
import functools
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handgrad.api.model import Model, load
from handgrad.cli import main
from handgrad.errors import NumericsError, UsageError
from handgrad.generation.chat import Talk
from handgrad.generation.generate import SamplingOptions
from handgrad.serving.local_server import listen
from handgrad.serving.requests import COMPLETION, Request, Writer, read_request
from handgrad.serving.server import MOST_BYTES, Handler, Served, write_all
from tests.interop.models import make_checkpoint
from tests.screenshots import WIDTHS, ask, chromium
from tests.test_interrupts import start

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 24}
CONTEXT = 160


@pytest.fixture(autouse=True)
def no_thread_remains() -> Iterator[None]:
    """After a test: none waits for further requests, with a model in memory."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(60)
    assert not [thread.name for thread in left if thread.is_alive()]


class Client:
    """A served model with random weights on bytes, of a short context, and the lines that its terminal shows."""

    def __init__(self, model: Model, *, system: str = "", starts: bool = True):
        self.model, self.lines = model, []
        about = {"id": "name", "object": "model", "context": CONTEXT, "talks": True}
        about |= {"temperature": 0.8, "max_tokens": 24, "system": system}
        self.served = Served(about, Request(max_tokens=24, options=SamplingOptions(0.7)), system)
        self.writer = Writer(model._writing, Talk(model.tokenizer), context=CONTEXT, seed=5)
        self.server = listen(functools.partial(Handler, self.served), "127.0.0.1", 0, may_move=False)
        self.port = self.server.server_address[1]
        if starts:
            self.start()

    def start(self) -> None:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        threading.Thread(target=write_all, args=(self.served, self.writer, self.lines.append), daemon=True).start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.served.jobs.put(None)

    def send(self, path: str, content: Any = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if content is None:
            connection.request("GET", path)
        else:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse()

    def post(self, path: str, **content: Any) -> dict[str, Any]:
        answer = self.send(path, content)
        found = json.loads(answer.read())
        assert answer.status == 200, found
        return found

    def text(self, **content: Any) -> str:
        return self.post(CHAT, **content)["choices"][0]["message"]["content"]

    def refused(self, path: str, content: Any, **headers: str) -> str:
        answer = self.send(path, content, **headers)
        assert answer.status == 400 and answer.getheader("Content-Type") == "application/json"
        return json.loads(answer.read())["error"]["message"]

    def events(self, path: str, **content: Any) -> list[dict[str, Any]]:
        answer = self.send(path, content | {"stream": True})
        assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream"
        *events, done, rest = answer.read().decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "") and all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "run", "bytes", sizes=(2, 2, 32, CONTEXT), spread=0.5)[0]


@pytest.fixture
def client(run: Path) -> Iterator[Client]:
    with Client(load(run, device="cpu")) as client:
        yield client


def test_an_answer_is_that_of_the_model(client: Client, run: Path) -> None:
    """Whole and in pieces, in a conversation and as a text goes on."""
    model = load(run, device="cpu")
    said = "".join(model.chat(HELLO, **GREEDY))
    whole = client.post(CHAT, messages=HELLO, **GREEDY)
    prompt_tokens = len(Talk(model.tokenizer).prompt(HELLO, CONTEXT, 24).tokens)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": said} and len(said) > 5
    assert whole["choices"][0]["finish_reason"] == "length" and whole["object"] == "chat.completion"
    assert whole["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 24, "total_tokens": prompt_tokens + 24}
    first, *pieces, last, counted = client.events(CHAT, messages=HELLO, stream_options={"include_usage": True}, **GREEDY)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == said and len(pieces) > 5
    assert {piece["choices"][0]["finish_reason"] for piece in pieces} == {None}
    assert last["choices"][0] | {"logprobs": 0} == {"index": 0, "delta": {}, "finish_reason": "length", "logprobs": 0}
    assert (counted["choices"], counted["usage"]) == ([], whole["usage"])
    continued = model.generate("Once", **GREEDY)
    found = client.post(COMPLETIONS, prompt="Once", **GREEDY)
    assert found["choices"][0]["text"] == continued and found["usage"]["prompt_tokens"] == 5
    *pieces, last = client.events(COMPLETIONS, prompt=["Once"], **GREEDY)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == continued
    assert last["choices"][0]["finish_reason"] == "length" and last["object"] == "text_completion"
    assert client.lines[0].startswith(f"chat: {prompt_tokens} tokens read, 24 written at ")


def test_settings_are_those_of_the_request(client: Client, run: Path) -> None:
    model = load(run, device="cpu")
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3}
    said = "".join(model.chat(HELLO, max_tokens=20, **options))
    assert client.text(messages=HELLO, max_completion_tokens=20, max_tokens=None, **options) == said
    for stop in (said[7], [said[7], "never written"]):
        stopped = client.post(CHAT, messages=HELLO, max_tokens=20, stop=stop, **options)["choices"][0]
        assert stopped["finish_reason"] == "stop" and stopped["message"]["content"] == said[: said.index(said[7])]
    own = "".join(model.chat(HELLO, max_tokens=24, temperature=0.7, seed=5))
    assert client.text(messages=HELLO) == own, "of the command, and its seed"
    assert client.text(messages=HELLO) != own, "which counts up"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    neutral = {"n": 1, "best_of": None, "tools": [], "response_format": {"type": "text"}, "logprobs": False, "model": "x"}
    assert client.text(messages=parts, max_tokens=20, **options, **neutral) == said


def test_a_seed_gives_the_same_text_every_time(client: Client) -> None:
    """It takes the conversation in anew, where another one keeps the keys and values of earlier turns."""
    kept: list[bool] = []
    inner = client.writer.writing.decoder
    decoders = []

    def decoder(*given: Any) -> Any:
        decoders.append(inner(*given))
        return decoders[-1]

    client.writer.writing.decoder = decoder  # type: ignore[method-assign]
    turns = [*HELLO, {"role": "assistant", "content": client.text(messages=HELLO)}, *HELLO]
    for seed in (None, 3, 3):
        text = client.text(messages=turns, seed=seed)
        kept.append(decoders[-1].reuse_cache)
    assert kept == [True, False, False] and client.text(messages=turns, seed=3) == text


def test_the_system_of_the_server(run: Path) -> None:
    kind = {"role": "system", "content": "Be kind."}
    with Client(load(run, device="cpu"), system="Be kind.") as client, Client(load(run, device="cpu")) as plain:
        with_it, without = (
            client.text(messages=messages, **GREEDY) for messages in ([kind, *HELLO], [kind | {"content": ""}, *HELLO])
        )
        assert client.text(messages=HELLO, **GREEDY) == with_it != without
        assert without == plain.text(messages=HELLO, **GREEDY)


def test_a_conversation_that_does_not_fit(client: Client) -> None:
    long = [*HELLO, {"role": "assistant", "content": "x" * 100}, *HELLO]
    assert client.post(CHAT, messages=long)["note"].startswith("the oldest 2 messages are left out")
    assert client.events(CHAT, messages=long)[-1]["note"].startswith("the oldest 2 messages are left out")
    assert "the last 160 tokens" in client.post(COMPLETIONS, prompt="x" * 300)["note"]
    assert "note" not in client.post(CHAT, messages=HELLO)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (CHAT, b"{", "expected JSON"),
        (CHAT, b"[" * 100 + b"]" * 100, "expected JSON, found: values nested more"),
        (CHAT, b"[1]", "expected a JSON object"),
        (CHAT, {}, "expected 'messages' to be a list, found None"),
        (CHAT, {"messages": []}, "as the last one, found none"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "expected a role of"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "expected parts of a message to be texts",
        ),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "does not know 'tools'"),
        (CHAT, {"messages": HELLO, "n": 2}, "does not know 'n' (here 2)"),
        (CHAT, {"messages": HELLO, "n": 0}, "does not know 'n' (here 0)"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "does not know 'response_format'"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "expected 'temperature' to be a number, found 'hot'"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature must be"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}', "top_p must be"),
        (CHAT, {"messages": HELLO, "max_tokens": 2.5}, "expected 'max_tokens' to be a whole number"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens must be 1 or more"),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 161},
            "expected 'max_tokens' of at most 160, the model's context, found 161",
        ),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 10**9}, "expected 'max_completion_tokens' of at most 160"),
        (CHAT, {"messages": HELLO, "seed": -1}, "seed must be"),
        (CHAT, {"messages": HELLO, "stop": 3}, "expected 'stop' to be a text or a list of texts, found 3"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop must be some text"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "expected 'prompt' to be one text"),
        (COMPLETIONS, {"prompt": [1, 2]}, "expected 'prompt' to be one text"),
    ],
    ids=str,
)
def test_requests_that_nobody_can_answer(client: Client, path: str, content: Any, message: str) -> None:
    assert message in client.refused(path, content)
    assert client.text(messages=HELLO), "the next one is"


def test_a_body_as_curl_sends_it(client: Client) -> None:
    """`curl --data` names a form; a page of another site can send one too, and its browser then adds an Origin."""
    body, form = json.dumps({"messages": HELLO}).encode(), {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.send(CHAT, body, **form).status == 200
    for header in ({"Origin": "https://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert "from a page" in client.refused(CHAT, body, **form, **header)


def test_connections_that_are_none(client: Client) -> None:
    assert "expected Content-Type: application/json" in client.refused(CHAT, b"{}", **{"Content-Type": "text/plain"})
    assert "Content-Length of at most" in client.refused(CHAT, b"{}", **{"Content-Length": str(MOST_BYTES + 1)})
    assert client.send("/v1/engines").status == client.send("/v1/engines", {}).status == 404
    assert client.send("/favicon.ico").status == 204
    (model,) = json.loads(client.send("/v1/models").read())["data"]
    assert (model["id"], model["object"], model["context"]) == ("name", "model", CONTEXT)
    page = client.send("/")
    assert page.status == 200 and b"Content-Security-Policy" in page.read()


def test_requests_are_answered_in_their_order(client: Client) -> None:
    found: dict[int, str] = {}
    asked = [{"messages": [{"role": "user", "content": str(n)}], **GREEDY} for n in range(4)]

    def one(n: int) -> None:
        found[n] = client.text(**asked[n])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: client.text(**asked[n]) for n in range(4)} and len(set(found.values())) > 1


def test_a_model_that_has_diverged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first piece, and in the middle of a text; the server goes on."""
    write = client.writer.write

    def failing(request: Request) -> Iterator[Any]:
        yield from ["a"] * request.max_tokens if request.max_tokens < 24 else ()
        raise NumericsError("the model's logits are not finite")

    monkeypatch.setattr(client.writer, "write", failing)
    for tokens in (3, 24):
        answer = client.send(CHAT, {"messages": HELLO, "max_tokens": tokens})
        assert answer.status == 500 and "not finite" in json.loads(answer.read())["error"]["message"]
    answer = client.send(CHAT, {"messages": HELLO, "max_tokens": 3, "stream": True}).read().decode().split("\n\n")
    assert len(answer) == 6 and "not finite" in answer[-2]
    monkeypatch.setattr(client.writer, "write", write)
    assert client.text(messages=HELLO)


def test_the_command(run: Path, capsys: pytest.CaptureFixture) -> None:
    """It says where it is, answers, and ends by Ctrl-C; a port that is taken is told."""
    process = start(["-m", "handgrad", "serve", str(run), "--device", "cpu", "--system", "Be kind.", "--temperature", "0"])
    assert process.stdout and process.stdout.readline() == f"model      {run}, context of 160 (309.5 KiB when it is full)\n"
    page, api = process.stdout.readline(), process.stdout.readline()
    assert page.startswith("page       http://127.0.0.1:") and api.startswith("API        http://127.0.0.1:")
    port = int(page.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    content = json.dumps({"messages": HELLO, "max_tokens": 24})
    connection.request("POST", CHAT, content, {"Content-Type": "application/json"})
    kind = {"role": "system", "content": "Be kind."}
    said = "".join(load(run, device="cpu").chat([kind, *HELLO], **GREEDY))
    assert json.loads(connection.getresponse().read())["choices"][0]["message"]["content"] == said
    assert main(["serve", str(run), "--device", "cpu", "--port", str(port)]) == 64
    assert "name another --port" in capsys.readouterr().err
    process.send_signal(2)
    assert process.communicate(timeout=20)[1].splitlines()[-1] == "handgrad: interrupted" and process.returncode == 130


DRIVE = """
    const at = (id) => page.document.getElementById(id);
    const until = async (holds) => {  // a request takes its time, where Chromium's virtual clock leaps over a timeout
        for (let n = 0; n < 2000 && !holds(); n++) await page.fetch("favicon.ico");
        if (!holds()) throw new Error(`waited for ${holds}`);
    };
    await until(() => at("name").textContent === "name");
    const sent = async () => { at("send").click(); await until(() => at("stop").disabled); };
    const send = async (text) => { at("message").value = text; await sent(); };
    const turns = () => [...at("turns").children].map((turn) => turn.textContent);
"""
browser = pytest.mark.skipif(chromium() is None, reason="no chromium on PATH")


@browser
def test_the_page_talks(client: Client, run: Path) -> None:
    """A second turn is read after the first; New forgets; an error gives the message back."""
    model = load(run, device="cpu")
    shown, console = ask(
        f"http://127.0.0.1:{client.port}/",
        f"{DRIVE} at('temperature').value = 0; await send('Hello'); await send('Hello'); const two = turns();"
        "at('new').click(); const none = turns(); at('temperature').value = -1; await send('Hello');"
        "return JSON.stringify([two, none, turns(), at('message').value, at('status').textContent]);",
    )
    two, none, after, message, status = json.loads(shown)
    first = "".join(model.chat(HELLO, **GREEDY))
    second = "".join(model.chat([*HELLO, {"role": "assistant", "content": first}, *HELLO], **GREEDY))
    assert two == ["Hello", first, "Hello", second] and none == after == [] and message == "Hello"
    assert "temperature must be" in status and all("400" in line for line in console)


@browser
def test_the_page_continues_a_text(client: Client, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stops it on request, with what there is."""
    write = client.writer.write

    def slowly(request: Request) -> Iterator[Any]:
        for part in write(request):
            time.sleep(0.1 * (request.max_tokens == CONTEXT))
            yield part

    monkeypatch.setattr(client.writer, "write", slowly)
    shown, console = ask(
        f"http://127.0.0.1:{client.port}/",
        f"{DRIVE} at('write').click(); at('temperature').value = 0; at('text').value = 'Once'; at('send').click();"
        "await until(() => at('stop').disabled && at('text').value !== 'Once'); const text = at('text').value;"
        "at('max_tokens').value = 160; at('send').click(); await until(() => at('text').value.length > text.length + 3);"
        "at('stop').click(); await until(() => at('stop').disabled);"
        "return JSON.stringify([text, at('status').textContent]);",
    )
    text, status = json.loads(shown)
    assert text == "Once" + load(run, device="cpu").generate("Once", **GREEDY) and (status, console) == ("stopped", [])


@browser
@pytest.mark.parametrize("width", WIDTHS.values())
def test_the_page_fits_its_screen(client: Client, width: int) -> None:
    url = f"http://127.0.0.1:{client.port}/"
    assert ask(url, "return page.document.documentElement.scrollWidth;", width) == (str(width), [])


def test_the_settings_of_a_body_come_before_the_servers() -> None:
    """And of two names of one, the newer; true is no number."""
    server = Request(max_tokens=5, stops=("A",), seed=3)
    body = {"prompt": "x", "max_tokens": 7, "max_completion_tokens": 9, "stop": "B", "seed": 4}
    asked = read_request(COMPLETION, json.dumps(body).encode(), server, 32)
    assert (asked.max_tokens, asked.stops, asked.seed) == (9, ("B",), 4)
    assert read_request(COMPLETION, b'{"prompt": "x"}', server, 32) == dataclasses.replace(server, prompt="x")
    with pytest.raises(UsageError, match="expected 'seed' to be a whole number, found True"):
        read_request(COMPLETION, b'{"seed": true}', server, 32)
