"""`handgrad chat` and `Model.chat`: answers after the template, history, the context, ends of an answer, Ctrl-C."""

import dataclasses
import io
import json
import os
import pty
import select
import signal
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from handgrad.api.model import Model, load
from handgrad.cli import main
from handgrad.commands import chat as chat_command
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import UsageError
from handgrad.generation.chat import Talk, listed_ends
from handgrad.generation.decode import with_cache
from handgrad.generation.generate import Continuation, Decoder, stream_text
from tests.interop.models import make_checkpoint
from tests.interop.test_gguf import words
from tests.test_commands import refused
from tests.test_interrupts import listening, start

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TALK = [{"role": "system", "content": "Be kind."}, *HELLO, {"role": "assistant", "content": "Hm."}, *HELLO]


def with_template(**files: str) -> dict[str, str]:
    return {"tokenizer_config.json": '{"eos_token": "<|im_end|>"}', "chat_template.jinja": CHATML, **files}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 on bytes with random weights, without a template."""
    sizes = {"sizes": (2, 2, 32, 160), "spread": 0.5}
    run, _ = make_checkpoint(tmp_path_factory.mktemp("plain") / "run", "bytes", chat=True, **sizes)
    return str(run)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with random weights and a template of its own, of a context much longer than any chat here."""
    return llama(tmp_path_factory.mktemp("own") / "run")


def llama(out: Path, **files: str) -> str:
    shape = {"architecture": "llama", "sizes": (2, 4, 32, 131072), "llama": "kv_heads=2,feed_forward=64"}
    run, _ = make_checkpoint(out, words(with_template(**files)), spread=0.5, **shape)
    return str(run)


def likeliest(model: Model, tokens: list[int], count: int) -> list[int]:
    """Tokens after a prompt, by whole forwards."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(model.logits([found])[0][-1].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize("kind", ["plain", "own"])
def test_an_answer_follows_the_template(kind: str, request: pytest.FixtureRequest) -> None:
    model = load(request.getfixturevalue(kind), device="cpu")
    template = ChatTemplate(model.tokenizer)
    assert template.is_plain is (kind == "plain")
    prompt = template.render(TALK, True)
    pieces = list(model.chat(TALK, temperature=0, max_tokens=24))
    assert len(pieces) > 5 and "".join(pieces) == model.tokenizer.decode(likeliest(model, prompt, 24))


def test_every_token_that_ends_an_answer(own: str, tmp_path: Path) -> None:
    """The template's end of a turn, and all of generation_config.json, which travels with the model."""
    model = load(own, device="cpu")
    said = likeliest(model, ChatTemplate(model.tokenizer).render(HELLO, True), 12)
    unused = next(token for token in range(12) if token not in said)
    place = next(n for n in range(2, 12) if said[n] not in said[:n] and said[n] > unused)
    assert Talk(model.tokenizer).ends == {259} and listed_ends(model.tokenizer) == set()
    assert Talk(words(with_template(), end=258)).ends == {258, 259}
    refusing = {"chat_template.jinja": "{{ raise_exception('no') }}"}
    assert Talk(words(with_template(**refusing))).ends == {259}
    ends = json.dumps({"eos_token_id": [259, unused, said[place], 10**9, "x"]})
    other = load(llama(tmp_path / "run", **{"generation_config.json": ends}), device="cpu")
    assert Talk(other.tokenizer).ends == {259, unused, said[place]}
    assert "".join(other.chat(HELLO, temperature=0)) == model.tokenizer.decode(said[:place])
    assert "".join(model.chat(HELLO, temperature=0, max_tokens=12)) == model.tokenizer.decode(said)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert (tmp_path / "hf" / "generation_config.json").read_text() == ends
    again = load(tmp_path / "hf", device="cpu")
    assert "".join(again.chat(HELLO, temperature=0)) == model.tokenizer.decode(said[:place])


def test_a_conversation_longer_than_the_context(plain: str) -> None:
    """Its oldest turns go, the system's message stays; of a message that is too long by itself the end is read."""
    talk = Talk(load_tokenizer("bytes"))
    assert talk.prompt(TALK, 200, 10).note == "" and talk.prompt(TALK, 200, 10).messages == TALK
    whole, last = (len(talk.template.render(messages, True)) for messages in (TALK, [TALK[0], TALK[-1]]))
    fits = talk.prompt(TALK, whole + 10, 10)
    assert fits.messages == TALK and fits.max_tokens == 10
    cut = talk.prompt(TALK, whole + 9, 10)
    assert cut.messages == [TALK[0], TALK[-1]] and len(cut.tokens) == last
    assert cut.note == f"the oldest 2 messages are left out: the context has {whole + 9} tokens"
    assert talk.prompt(TALK, whole + 9, 1000).max_tokens == whole + 9 - last
    long = talk.prompt([{"role": "user", "content": "x" * 500}], 100, 40)
    assert len(long.tokens) == 75 and long.tokens == talk.template.render(long.messages, True)[-75:]
    assert long.note.startswith("the message has 5") and long.note.endswith("the last 75 are read: the context has 100")
    counted, answer = Talk(load_tokenizer("bytes")), {"role": "assistant", "content": "Hm."}
    turns = [message for n in range(500) for message in ({"role": "user", "content": f"{n}"}, answer)]
    render, rendered = counted.template.render, []
    counted.template.render = lambda *given: rendered.append(given) or render(*given)  # type: ignore[method-assign]
    left = counted.prompt([TALK[0], *turns, *HELLO], 300, 10)
    assert len(rendered) < 15 and len(left.messages) % 2 == 0 and left.messages[0] == TALK[0]
    longer = [TALK[0], *turns[2 - len(left.messages) - 2 :], *HELLO]
    assert len(left.tokens) <= 290 < len(render(longer, True)) and longer[3:] == left.messages[1:]
    assert left.note == f"the oldest {1002 - len(left.messages)} messages are left out: the context has 300 tokens"
    model = load(plain, device="cpu")
    with pytest.warns(UserWarning, match="the oldest 2 messages are left out"):
        list(model.chat([*TALK[:2], {"role": "assistant", "content": "m" * 90}, *HELLO], max_tokens=60))


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "found none"),
        (["Hello"], "found 'Hello' as number 1"),
        ([{"role": "user"}], "as number 1"),
        ([*HELLO, {"role": "tool", "content": ""}], "found 'tool' in message 2"),
        (TALK[:3], "as the last one, found assistant"),
    ],
)
def test_messages_that_nobody_can_answer(messages: list, told: str, own: str) -> None:
    with pytest.raises(UsageError, match=told):
        load(own, device="cpu").chat(messages)


@pytest.fixture
def chat(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The output of `handgrad chat`, with these lines as its input."""

    def said(run: str, lines: str, *options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        capsys.readouterr()
        assert main(["chat", run, "--device", "cpu", *options]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return said


def test_a_line_an_answer(own: str, chat: Callable[..., str]) -> None:
    """With what was said before, until /new; blank lines are none, /quit ends."""
    model, options = load(own, device="cpu"), {"max_tokens": 9, "temperature": 0.9}

    def answer(messages: list, seed: int) -> str:
        return "".join(model.chat(messages, seed=seed, **options))

    system = [{"role": "system", "content": "Be kind."}]
    first = answer([*system, *HELLO], 5)
    second = answer([*system, *HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "And?"}], 6)
    third = answer([*system, *HELLO], 7)
    told = chat(own, "Hello\n\n  And? \n/new\nHello\n/quit\nmore\n", "--system", "Be kind.", "--seed", "5", *flags(options))
    assert told == f"{first}\n{second}\n{third}\n" and len({first, second, third}) == 3


def flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def test_options_reach_the_answer(
    plain: str, chat: Callable[..., str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = chat(plain, "Hello", "--temperature", "0", "--max-tokens", "30")
    assert chat(plain, "Hello", "--top-k", "1", "--max-tokens", "30") == greedy
    assert chat(plain, "Hello", "--temperature", "0", "--repetition-penalty", "1.5", "--max-tokens", "30") != greedy
    letter = greedy.strip()[4]
    assert chat(plain, "Hello", "--temperature", "0", "--stop", letter) == greedy[: greedy.index(letter)] + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" + "Hi\n" * 3))
    assert main(["chat", plain, "--device", "cpu", "--max-tokens", "40", "--context", "100"]) == 0
    told = capsys.readouterr().err
    assert "messages are left out: the context has 100 tokens" in told and "the answer ends after 40 tokens" in told
    assert "--context must be" in refused(capsys, 64, "chat", plain, "--context", "1")
    assert "max_tokens must be 1 or more" in refused(capsys, 64, "chat", plain, "--max-tokens", "0")


def test_the_memory_is_that_of_the_conversation(own: str, chat: Callable[..., str]) -> None:
    """And of the samples: not of a context of 131,072 tokens."""
    model = load(own, device="cpu")
    list(model.chat(HELLO, max_tokens=3))
    decoder = model._writing.last  # type: ignore[index]
    assert decoder.longest == 1024
    model.generate("Hello", max_tokens=1100)
    assert model._writing.last.longest == 2048  # type: ignore[index]
    small = dataclasses.replace(model.shape, sequence_length=77)
    assert with_cache(small, 5).sequence_length == with_cache(small, 500).sequence_length == 77
    assert [with_cache(model.shape, n).sequence_length for n in (1, 1024, 1025, 10**6)] == [1024, 1024, 2048, 131072]
    caches: list[int] = []
    make = Decoder.__init__

    def made(self: Decoder, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        caches.append(self.longest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__init__", made)
        lines = "Hello\n" + "x" * 700 + "\nHello\n/new\nHello"
        assert chat(own, lines, "--max-tokens", "400", "--temperature", "0").count("\n") >= 4
    assert caches == [1024, 2048], "it grows with the conversation, and stays"
    assert main(["sample", own, "--device", "cpu", "--max-tokens", "3"]) == 0


def test_in_a_terminal(own: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that the template refuses is one line, and the conversation goes on; Ctrl-D ends it."""
    given = iter(["\ufdd0", "Hello"])

    def read(prompt: str) -> str:
        assert prompt == "> "
        if (line := next(given, None)) is None:
            raise EOFError
        return line

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", read)
    before = signal.getsignal(signal.SIGINT)
    assert main(["chat", own, "--device", "cpu", "--max-tokens", "5", "--temperature", "0", "--context", "200000"]) == 0
    shown, told = capsys.readouterr()
    assert shown == "".join(load(own, device="cpu").chat(HELLO, max_tokens=5, temperature=0)) + "\n\n"
    assert "template of its own, context of 131072, the model's longest (" in told
    assert " when it is full)\nCtrl-C stops an answer" in told
    assert "handgrad: expected text, found noncharacter U+FDD0 in message 1" in told
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufdd0"))
    assert "found noncharacter" in refused(capsys, 65, "chat", own, "--device", "cpu")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    assert "found a lone surrogate" in refused(capsys, 65, "chat", own, "--device", "cpu")
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", own, "--device", "cpu"]) == 0


def test_a_base_model_says_that_it_is_one(plain: str, own: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Weights without a template, of a run of ours that was not trained on the plain one as well."""
    text = make_checkpoint(tmp_path / "text", "bytes")[0]
    assert main(["export", str(text), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")]) == 0
    silent = [(plain, False), (own, False)]
    for model, told in ((text, True), (tmp_path / "hf", True), (tmp_path / "imported", True), *silent):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", None)
            assert main(["chat", str(model), "--device", "cpu"]) == 0
        assert ("has no chat template, so this talks in the plain one" in capsys.readouterr().err) == told


def test_an_answer_that_is_stopped_stays_in_the_conversation(
    own: str, chat: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it came: the token under way is its last."""
    prompts, answers = [], []

    def interrupted(
        decoder: Decoder, tokenizer: Tokenizer, texts: Iterator[Continuation], stops: list[str], *, reuse_cache: bool
    ) -> Iterator:
        text = next(texts)
        prompts.append(text.prompt)
        answers.append("")
        for count, (_, piece) in enumerate(stream_text(decoder, tokenizer, iter([text]), stops, reuse_cache=reuse_cache)):
            if count == 3:
                signal.raise_signal(signal.SIGINT)
            answers[-1] += piece
            yield text, piece
        raise AssertionError("not stopped")

    monkeypatch.setattr(chat_command, "stream_text", interrupted)
    told = chat(own, "Hello\nHello\n", "--temperature", "0")
    assert told == f"{answers[0]}\n{answers[1]}\n" and answers[0]
    history = [*HELLO, {"role": "assistant", "content": answers[0]}, *HELLO]
    assert prompts[1] == ChatTemplate(load(own, device="cpu").tokenizer).render(history, True)


SLOW = (
    "import sys, time\n"
    "from handgrad.__main__ import main\n"
    "from handgrad.generation.generate import Decoder\n"
    "launch = Decoder.launch\n"
    "def slowly(self):\n    time.sleep(0.02)\n    return launch(self)\n"
    "Decoder.launch = slowly\n"
    "sys.exit(main())\n"
)


def test_ctrl_c_stops_the_answer_and_not_the_program(own: str) -> None:
    """Then a next message is answered; at the prompt it ends the program, with code 130."""
    terminal, ours = pty.openpty()

    def own_terminal() -> None:
        listening()
        ioctl(ours, termios.TIOCSCTTY, 0)

    how = {"stdin": ours, "stdout": ours, "stderr": ours, "start_new_session": True, "preexec_fn": own_terminal}
    process = start(["-c", SLOW, "chat", own, "--device", "cpu", "--max-tokens", "1000"], **how)
    os.close(ours)
    try:
        until(terminal, lambda text: text.endswith(b"> "))
        for _ in range(2):
            os.write(terminal, b"Hello\n")
            until(terminal, lambda text: len(text) > 15)
            os.write(terminal, b"\x03")
            assert b"the answer ends after" not in until(terminal, lambda text: text.endswith(b"\n> "))
        shown, ended, tries = b"", False, 0
        while not ended and tries < 30:  # Python's readline loses a signal between its prompt and its wait for a key
            os.write(terminal, b"\x03")
            piece, ended = read_for(terminal, seconds=2)
            shown, tries = shown + piece, tries + 1
        assert ended and process.wait(30) == 130, shown
        assert b"handgrad: interrupted" in shown and b"Traceback" not in shown
    finally:
        process.kill()
        os.close(terminal)


def read_for(terminal: int, seconds: float) -> tuple[bytes, bool]:
    """(the terminal's output until none comes for so many seconds, True if it has ended)."""
    text = b""
    while select.select([terminal], [], [], seconds)[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            return text, True
        if not piece:
            return text, True
        text += piece
    return text, False


def until(terminal: int, enough: Callable[[bytes], bool], seconds: float = 60) -> bytes:
    """The terminal's output until it is enough, or ends."""
    text, deadline = b"", time.monotonic() + seconds
    while not enough(text):
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        text += piece
    return text
