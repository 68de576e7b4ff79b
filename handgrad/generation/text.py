"""Turns tokens into text as they come: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from handgrad.data.tokenizer import Tokenizer
from handgrad.generation.generate import STOP, Continuation, Decoder, SamplingOptions
from handgrad.settings.config import ModelShape


def document(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a document that begins with `text`: end-of-text first, or the model's own begin (`prompt_start`)."""
    return [*tokenizer.prompt_start, *tokenizer.encode(text).tolist()]


def cropped(texts: Sequence[Continuation], context: int) -> str:
    """A line about prompts longer than the model's context, of which only the last tokens are read; "" if there is none."""
    long = {tuple(text.prompt) for text in texts if len(text.prompt) > context}
    if not long:
        return ""
    number = f"{len(long)} prompts are" if len(long) > 1 else "the prompt is"
    return f"{number} cropped to the model's context, the last {context} tokens of up to {max(map(len, long))}"


class TextStream:
    """The text of one continuation, piece by piece.

    It ends before the stop string that is complete first (of several with the same end, the one that begins first), however
    the tokens cut it: it holds back any possible beginning of a stop string until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        assert all(stops)
        self.tokenizer, self.stops = tokenizer, stops
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.decoded = 0  # tokens of the continuation
        self.held = ""

    def read(self, text: Continuation) -> str:
        """The new text to show; ends the continuation at a stop string."""
        ids = text.tokens[self.decoded :]
        self.decoded += len(ids)
        self.held += self.decoder.decode(self.tokenizer.decode_bytes(ids), final=bool(text.stopped))
        ends = [(start + len(stop), start) for stop in self.stops if (start := self.held.find(stop)) >= 0]
        if ends:
            text.stopped = STOP
            show, self.held = self.held[: min(ends)[1]], ""
            return show
        kept = 0 if text.stopped else max((beginning(stop, self.held) for stop in self.stops), default=0)
        show, self.held = self.held[: len(self.held) - kept], self.held[len(self.held) - kept :]
        return show


def beginning(stop: str, text: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def stream_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    texts: Iterator[Continuation],
    stops: Sequence[str] = (),
    *,
    reuse_cache: bool = False,
) -> Iterator[tuple[Continuation, str]]:
    """`Decoder.generate` with the new piece of each text, possibly empty."""
    streams: dict[Continuation, TextStream] = {}
    for text in decoder.generate(texts, reuse_cache=reuse_cache):
        stream = streams.setdefault(text, TextStream(tokenizer, stops))
        piece = stream.read(text)
        if text.stopped:
            del streams[text]
        yield text, piece


def write_document(
    shape: ModelShape, ops: ModuleType, weights: Any, buf: Any, tokenizer: Tokenizer, *, max_tokens: int, seed: int
) -> str:
    """A document of up to `max_tokens` tokens from its beginning, sampled as `handgrad sample` does by default."""
    decoder = Decoder(shape, ops, weights, buf, SamplingOptions(), end_of_text=tokenizer.end_of_text)
    document = Continuation(list(tokenizer.prompt_start), max_tokens, seed)
    return "".join(piece for _, piece in stream_text(decoder, tokenizer, iter([document])))
