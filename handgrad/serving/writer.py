"""Writes the texts that are asked for, one after another, with one model in one thread."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from handgrad.evaluation.writing import Writing
from handgrad.generation.chat import Talk, listed_ends
from handgrad.generation.generate import Continuation
from handgrad.generation.text import cropped, document, stream_text
from handgrad.serving.requests import Request


@dataclass(frozen=True)
class Written:
    """The end of a text."""

    reason: str  # `generate.END_OF_TEXT`, `STOP` or `MAX_TOKENS`
    prompt_tokens: int
    tokens: int
    elapsed_seconds: float
    note: str  # a line about all of the prompt that was left out, or ""


class Writer:
    """A model that writes. `context`: the most tokens of a conversation; `seed`: of the first text that names none, each
    further one counts up."""

    def __init__(self, writing: Writing, talk: Talk, *, context: int, seed: int):
        self.writing, self.talk, self.context, self.seed = writing, talk, context, seed

    def write(self, request: Request) -> Iterator[str | Written]:
        """A piece of the text for each token, possibly empty, then the end.

        A conversation keeps the keys and values of its earlier turns, whose rounding depends on how they came there. So a
        request with a seed takes the whole of it in anew, and gives the same text every time.

        Raises `UsageError`, `DataError` for a conversation that the template refuses or without memory for its cache,
        `NumericsError` when the logits are not finite.
        """
        started, seed, reuse_cache = time.perf_counter(), request.seed, False
        if seed is None:
            seed, reuse_cache, self.seed = self.seed, request.kind == "chat", (self.seed + 1) % (1 << 32)
        tokenizer = self.writing.model.tokenizer
        if isinstance(request.prompt, str):
            ends = {tokenizer.end_of_text, *listed_ends(tokenizer)}
            text = Continuation(document(tokenizer, request.prompt), request.max_tokens, seed)
            note = cropped([text], self.context)
        else:
            ends, prompt = self.talk.ends, self.talk.prompt(request.prompt, self.context, request.max_tokens)
            text, note = Continuation(prompt.tokens, prompt.max_tokens, seed), prompt.note
        longest = min(max(self.writing.size[1], len(text.prompt) + text.max_tokens), self.context)
        decoder = self.writing.decoder(1, longest, request.options, frozenset(ends))
        for _, piece in stream_text(decoder, tokenizer, iter([text]), request.stops, reuse_cache=reuse_cache):
            yield piece
        yield Written(text.stopped, len(text.prompt), len(text.tokens), time.perf_counter() - started, note)
