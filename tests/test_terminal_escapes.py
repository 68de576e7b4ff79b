"""Escape sequences in generated text, in names, paths and templates: a terminal shows them and does not obey them.

In a pipe a text is what the model wrote."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.commands import chat, sample
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError, print_message, storage_error
from handgrad.generation.generate import Continuation, TextStream
from handgrad.reports.page import write_report
from handgrad.reports.serve import Watched
from handgrad.run.console import Display
from handgrad.serving.server import PAGE
from tests.interop.models import make_checkpoint
from tests.test_chat import llama
from tests.test_report import make_run, start_line, step_line

COLUMNS = 120
ATTACKS = {  # and the text that a terminal shows
    "a color": ("\x1b[31mred", "\\x1b[31mred"),
    "a title": ("\x1b]0;stolen\x07", "\\x1b]0;stolen\\x07"),
    "a cleared screen": ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
    "a link": ("\x1b]8;;http://evil.example\x1b\\", "\\x1b]8;;http://evil.example\\x1b\\"),
    "the clipboard": ("\x1b]52;c;cm0gLXJm\x07", "\\x1b]52;c;cm0gLXJm\\x07"),
    "a question to the terminal": ("\x1b[6n", "\\x1b[6n"),
    "a sequence that begins with C1": ("\x9b31mred", "\\x9b31mred"),
    "a C1 string": ("\x9d0;stolen\x9c", "\\x9d0;stolen\\x9c"),
    "a carriage return": ("good\revil", "good\\revil"),
    "a backspace": ("good\x08\x08\x08\x08evil", "good\\x08\\x08\\x08\\x08evil"),
    "another character set": ("\x0eq\x0f\x00\x7f", "\\x0eq\\x0f\\x00\\x7f"),
    "a direction": ("\u202elive\u202c", "\\u202elive\\u202c"),
    "an isolated direction": ("\u2066\u2067live\u2069", "\\u2066\\u2067live\\u2069"),
}
rows = pytest.mark.parametrize(("attack", "visible"), ATTACKS.values(), ids=ATTACKS)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[bytes, pyte.Screen]]]:
    """Standard output is a terminal; yields a function that closes it, and returns its bytes and what it shows."""
    ours, theirs = os.openpty()
    received = bytearray()

    def read() -> None:
        try:
            while block := os.read(ours, 65536):
                received.extend(block)
        except OSError:  # the other side is closed
            return

    reader = threading.Thread(target=read)
    reader.start()

    def ended() -> tuple[bytes, pyte.Screen]:
        stdout.flush()
        stdout.close()
        reader.join(60)
        screen = pyte.Screen(COLUMNS, 24)
        screen.title = "mine"
        pyte.ByteStream(screen).feed(bytes(received))
        return bytes(received), screen

    with os.fdopen(theirs, "w", encoding="utf-8") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setenv("COLUMNS", str(COLUMNS))
        yield ended
    os.close(ours)


def check(seen: tuple[bytes, pyte.Screen], visible: str) -> None:
    """The text is on the screen as it stands, on one line, and nothing was obeyed."""
    received, screen = seen
    assert visible in "\n".join(screen.display) and screen.title == "mine"
    assert not {cell.fg for row in screen.buffer.values() for cell in row.values()} - {"default"}
    assert not set(received.decode()) & {
        chr(code) for code in (*range(10), *range(11, 13), *range(14, 32), *range(127, 160))
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("plain") / "run", "bytes", chat=True, sizes=(2, 2, 32, 160))[0])


@pytest.mark.fault(52)
@pytest.mark.parametrize("command", [sample, chat], ids=["sample", "chat"])
@rows
def test_generated_text(
    run: str, command: Any, attack: str, visible: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each token is a byte, so characters end in the middle of tokens; in a pipe the text is exact."""

    def written(decoder: Any, tokenizer: Tokenizer, texts: Iterator[Continuation], *_: Any, **__: Any) -> Iterator[Any]:
        text, stream = next(texts), TextStream(tokenizer)
        for token in tokenizer.encode(f"naïve 🦉{attack}").tolist():
            text.tokens.append(token)
            yield text, stream.read(text)
        text.stopped = "end_of_text"
        yield text, stream.read(text)

    monkeypatch.setattr(command, "stream_text", written)
    asked = ["sample", run, "--prompt", attack] if command is sample else ["chat", run]
    prompt = (attack, visible) if command is sample else ("", "")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    with terminal(monkeypatch) as ended:
        assert main([*asked, "--device", "cpu"]) == 0
        check(ended(), f"{prompt[1]}naïve 🦉{visible}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main([*asked, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{prompt[0]}naïve 🦉{attack}\n"


@pytest.mark.fault(52)
@rows
def test_names(
    attack: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A run's name in a list, a missing folder's in an error, a sample's text in the lines of a run."""
    attack, visible = (text.replace("/", "|").replace("\\x00", "").replace("\0", "") for text in (attack, visible))
    make_run(tmp_path / attack, [start_line(), step_line(1)])
    with terminal(monkeypatch) as ended:
        assert main(["runs", str(tmp_path)]) == 0
        check(ended(), visible)
    with terminal(monkeypatch) as ended:
        display = Display(10, 0, "lines")
        display.print(f"step 1, the model writes: {attack}")
        display.close()
        check(ended(), f"step 1, the model writes: {visible}")
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "none" / attack), "--device", "cpu"]) != 0
    print_message(f"a text, {attack}", ends=False)
    message, text = capsys.readouterr().err.splitlines()
    assert visible in message and text == f"handgrad: a text, {visible}"
    assert visible in str(storage_error(OSError(5, "broken", attack), f"reading {attack}"))


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """A template that refuses every message with the message itself."""
    template = "{{ raise_exception(messages[0]['content']) }}"
    return ChatTemplate(load(llama(tmp_path_factory.mktemp("own") / "run", **{"chat_template.jinja": template})).tokenizer)


@pytest.mark.fault(52)
@rows
def test_a_template(refusing: ChatTemplate, attack: str, visible: str) -> None:
    with pytest.raises(DataError) as raised:
        refusing.render([{"role": "user", "content": attack}], True)
    assert visible in str(raised.value)


def test_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and texts are text in the report, on the page of watch, and on that of serve."""
    monkeypatch.setattr("handgrad.reports.page.png", lambda plot, runs: b"")
    name, wrong = "<img src=x onerror=alert(1)>", "<img src=x onerror=alert(2)>"
    folder = make_run(tmp_path / name, [start_line(), step_line(1), {"kind": "sample", "step": 1, "text": wrong}])
    for page in (write_report([folder], tmp_path / "page.html").read_text(), Watched([tmp_path]).page("") or ""):
        assert "<img src=x" not in page and page.count("&lt;img src=x onerror=alert(1)&gt;") > 1
        assert "&lt;img src=x onerror=alert(2)&gt;" in page
    source = PAGE.read_text()
    assert "textContent" in source and not any(
        word in source for word in ("innerHTML", "outerHTML", "insertAdjacent", "write(")
    )
