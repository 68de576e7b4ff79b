"""handgrad chat: a conversation in the terminal, streamed; through a pipe, one answer per line; one for --prompt."""

import contextlib
import io
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from types import FrameType
from typing import Any

from handgrad.errors import DataError, UsageError, print_message
from handgrad.evaluation.load import LoadedModel, Weights, Writing, is_taught_to_talk, load_model, machine
from handgrad.format import human_bytes
from handgrad.generation.chat import Prompt, Talk
from handgrad.generation.generate import MAX_TOKENS, Continuation, Decoder, SamplingOptions, check_writing, stream_text
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.memory.arena import make_plan
from handgrad.run.console import output_wrap

NEW, QUIT = "/new", "/quit"


class Interrupts:
    """Handles Ctrl-C: while the model answers, it stops the answer; at any other time, it ends the command."""

    def __init__(self) -> None:
        self.answering = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.answering:
            raise KeyboardInterrupt
        self.answering = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def run(parsed: Namespace) -> int:
    check_writing(parsed.max_tokens, parsed.seed, parsed.stop)
    if parsed.prompt is not None and not parsed.prompt.strip():
        raise UsageError("--prompt is empty: expected a message")
    options = sampling_options(parsed)
    _, talk, writing = open_talking_model(parsed)
    interrupts = Interrupts()
    with interrupts.handled():
        converse(parsed, talk, writing, options, interrupts)
    return 0


def converse(parsed: Namespace, talk: Talk, writing: Writing, options: SamplingOptions, interrupts: Interrupts) -> None:
    context, described = context_of(writing, parsed.context)
    beginning: list[Any] = [{"role": "system", "content": parsed.system}] if parsed.system else []
    messages, answers = list(beginning), 0
    terminal = parsed.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        print(f"{'plain template' if talk.template.is_plain else 'template of its own'}, {described}", file=sys.stderr)
        print(f"Ctrl-C stops an answer, {NEW} forgets, {QUIT} ends", file=sys.stderr)
    for line in lines(terminal) if parsed.prompt is None else [parsed.prompt]:
        if line == QUIT and parsed.prompt is None:
            return
        if line == NEW and parsed.prompt is None:
            messages = list(beginning)
            continue
        try:
            prompt = talk.prompt([*messages, {"role": "user", "content": line}], context, parsed.max_tokens)
            longest = max(writing.size[1], len(prompt.tokens) + prompt.max_tokens)
            decoder = writing.decoder(1, longest, options, frozenset(talk.ends))
        except DataError as error:
            if not terminal:
                raise
            print_message(error, ends=False)
            continue
        if prompt.note:
            print(prompt.note, file=sys.stderr)
        said = answer(prompt, writing.model, decoder, parsed.stop, parsed.seed + answers, interrupts)
        messages, answers = [*prompt.messages, {"role": "assistant", "content": said}], answers + 1


def lines(terminal: bool) -> Iterator[str]:
    """Yields the user's lines, stripped, until the end of the input; skips blank lines."""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its history and editing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses bytes that are not text
    while sys.stdin is not None:  # it is None after `<&-`
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            raise
        if not terminal and not line:
            return
        if line := line.strip():
            yield line


def answer(
    prompt: Prompt, model: LoadedModel, decoder: Decoder, stops: list[str], seed: int, interrupts: Interrupts
) -> str:
    """Prints the answer while the model generates it, and returns it; after Ctrl-C, the part generated so far."""
    text, said, wrap = Continuation(prompt.tokens, prompt.max_tokens, seed), "", output_wrap()
    interrupts.answering = True
    for _, piece in stream_text(decoder, model.tokenizer, iter([text]), stops, reuse_cache=True):
        said += piece
        print(wrap.feed(piece), end="", flush=True)
        if not interrupts.answering:
            break
    interrupts.answering = False
    print(wrap.feed("", ends=True), flush=True)
    if text.stopped == MAX_TOKENS:
        print(f"the answer ends after {len(text.tokens)} tokens (--max-tokens)", file=sys.stderr)
    return said


# Shared with `serve` and `sample`.


def sampling_options(parsed: Namespace) -> SamplingOptions:
    """Raises `UsageError` for an option out of range."""
    return SamplingOptions(**{field.name: getattr(parsed, field.name) for field in fields(SamplingOptions)})


def open_talking_model(parsed: Namespace) -> tuple[Weights, Talk, Writing]:
    """Loads a model to talk with; notes if it never learnt to. Raises the errors of `open_weights` and `load_model`."""
    device, _, dtype, ops = machine(devices.resolve_device(parsed.device), parsed.precision, parsed.backend)
    weights = open_weights(parsed.checkpoint, strict=parsed.strict)
    talk = Talk(weights.tokenizer)
    model = load_model(weights, device, dtype, ops, [])
    if not is_taught_to_talk(weights.tokenizer, weights.checkpoint):
        print_message(
            f"{parsed.checkpoint} has no chat template, so this talks in the plain one; a base model continues text and"
            " seldom answers: finetune it on conversations, which `handgrad prepare --chat` takes",
            ends=False,
        )
    return weights, talk, Writing(model, dtype)


def context_of(writing: Writing, asked: int | None) -> tuple[int, str]:
    """(tokens of the longest conversation, in words): the context `asked` for, or the model's, if it fits in memory."""
    own = writing.model.shape.sequence_length
    wanted = min(asked or own, own)
    context = writing.fitting(wanted)
    memory = human_bytes(make_plan(writing.table(1, context)).total_bytes)
    less = f" of {wanted}: memory holds no more" if context < wanted else ", the model's longest" * ((asked or 0) > own)
    return context, f"context of {context}{less} ({memory} when it is full)"
