"""handgrad chat: a conversation in the terminal, streamed; through a pipe an answer to each line."""

import contextlib
import io
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from handgrad import devices
from handgrad.arena import make_plan
from handgrad.backend import choose_backend
from handgrad.errors import DataError, tell_note
from handgrad.evaluation.load import LoadedModel, from_elsewhere, load_model
from handgrad.format import human_bytes
from handgrad.generation.chat import Prompt, Talk
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.fp8_weights import fp8_buffers, rounded, with_fp8_weights
from handgrad.generation.generate import MAX_TOKENS, Continuation, Decoder, SamplingOptions, check_writing
from handgrad.generation.text import stream_text
from handgrad.interop.sources import open_weights

NEW, QUIT = "/new", "/quit"


class Interrupts:
    """Handles Ctrl-C: one that comes while the model answers stops the answer, any other ends the command."""

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
    options = SamplingOptions(parsed.temperature, parsed.top_k, parsed.top_p, parsed.min_p, parsed.repetition_penalty)
    device = devices.resolve_device(parsed.device)
    precision = devices.settled_precision(parsed.precision, device)
    dtype = devices.use_precision(device, precision)
    ops = choose_backend(parsed.backend, device, precision)
    weights = open_weights(parsed.checkpoint, strict=parsed.strict)
    if parsed.fp8_weights:
        weights = replace(weights, weight=rounded(weights.shape, weights.weight))
    talk = Talk(weights.tokenizer)
    shape = replace(weights.shape, sequence_length=min(parsed.context, weights.shape.sequence_length))
    buffers = decode_buffers(shape, 1, dtype, ops)
    if parsed.fp8_weights:
        buffers += fp8_buffers(weights.shape, ops, device)
    model = load_model(weights, device, dtype, ops, buffers)
    buf, end_of_text = decode_tensors(shape, model.views), model.tokenizer.end_of_text
    ops = with_fp8_weights(ops, model.shape, model.weights, model.views)
    decoder = Decoder(model.shape, ops, model.weights, buf, options, end_of_text=end_of_text, ends=talk.ends)
    if talk.template.is_plain and from_elsewhere(weights):
        tell_note(
            f"{parsed.checkpoint} has no chat template, so this talks in the plain one; a base model continues text and"
            " seldom answers: finetune it on conversations, which `handgrad prepare --chat` takes"
        )
    interrupts = Interrupts()
    with interrupts.handled():
        converse(parsed, talk, model, decoder, interrupts, human_bytes(make_plan(buffers).total_bytes))
    return 0


def converse(
    parsed: Namespace, talk: Talk, model: LoadedModel, decoder: Decoder, interrupts: Interrupts, memory: str
) -> None:
    """`memory`: of the context, in words."""
    beginning: list[Any] = [{"role": "system", "content": parsed.system}] if parsed.system else []
    messages, answers, terminal = list(beginning), 0, sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        template = "plain template" if talk.template.is_plain else "template of its own"
        context = f"context of {decoder.longest} ({memory})"
        print(f"{template}, {context}; Ctrl-C stops an answer, {NEW} forgets, {QUIT} ends", file=sys.stderr)
    for line in lines(terminal):
        if line == QUIT:
            return
        if line == NEW:
            messages = list(beginning)
            continue
        try:
            prompt = talk.prompt([*messages, {"role": "user", "content": line}], decoder.longest, parsed.max_tokens)
        except DataError as error:
            if not terminal:
                raise
            tell_note(str(error))
            continue
        if prompt.note:
            print(prompt.note, file=sys.stderr)
        said = answer(prompt, model, decoder, parsed.stop, parsed.seed + answers, interrupts)
        messages, answers = [*prompt.messages, {"role": "assistant", "content": said}], answers + 1


def lines(terminal: bool) -> Iterator[str]:
    """The user's lines, without blanks around them, until the end of the input."""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its history and editing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer names what is no text
    while sys.stdin is not None:  # as it is after `<&-`
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
    """Prints the answer while it is written, and returns it, or as much as there was when Ctrl-C came."""
    text, said = Continuation(prompt.tokens, prompt.max_tokens, seed), ""
    interrupts.answering = True
    for _, piece in stream_text(decoder, model.tokenizer, iter([text]), stops, keeps=True):
        said += piece
        print(piece, end="", flush=True)
        if not interrupts.answering:
            break
    interrupts.answering = False
    print(flush=True)
    if text.stopped == MAX_TOKENS:
        print(f"the answer ends after {len(text.tokens)} tokens (--max-tokens)", file=sys.stderr)
    return said
