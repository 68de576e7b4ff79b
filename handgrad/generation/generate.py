"""Writes texts in a batch: the next text takes the slot of one that ends, and the device never waits for the host. Tokens
become text as they come: whole characters only, and nothing of a stop string."""

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import NumericsError, UsageError
from handgrad.generation.decode import prefill
from handgrad.machine.graphs import Replayed
from handgrad.models import architecture
from handgrad.ops.reference.decode import SMALLEST_TEMPERATURE
from handgrad.settings.config import ModelShape

END_OF_TEXT, STOP, MAX_TOKENS = "end_of_text", "stop", "max_tokens"  # reasons for the end of a text


@dataclass(frozen=True)
class SamplingOptions:
    """The rules for choosing the next token (`ops.choose_tokens`). Raises `UsageError` for an invalid one."""

    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def expect(holds: bool, name: str, wanted: str) -> None:
            if not holds:
                raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, found {getattr(self, name)}")

        warm = SMALLEST_TEMPERATURE <= self.temperature < math.inf
        expect(self.temperature == 0 or warm, "temperature", f"0 (greedy) or at least {SMALLEST_TEMPERATURE}")
        expect(self.top_k >= 0, "top_k", "0 (all tokens) or more")
        expect(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (all tokens)")
        expect(0 <= self.min_p <= 1, "min_p", "from 0 (all tokens) to 1")
        expect(0.001 <= self.repetition_penalty <= 1000, "repetition_penalty", "from 0.001 to 1000 (1: none)")


def check_writing(max_tokens: int, seed: int, stops: Sequence[str]) -> None:
    """Raises `UsageError` for an invalid option."""
    if max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, found {max_tokens}")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed must be at least 0 and below 2^32, found {seed}")
    if not all(stops):
        raise UsageError("--stop must be some text, found none")


@dataclass(eq=False)
class Continuation:
    """A text in progress. Its reader may end it by setting `stopped`."""

    prompt: list[int]  # at least one token: end-of-text starts a document
    max_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)  # after the prompt, without the end-of-text that ended it
    stopped: str = ""  # END_OF_TEXT, STOP or MAX_TOKENS; empty while it continues


@dataclass
class Slot:
    """A row of the batch and its text."""

    text: Continuation
    steps_left: int  # until max_tokens
    position: int = 0  # in the context, of the next step's input token
    context: list[int] = field(default_factory=list)  # with which the text entered the cache
    before: int = 0  # tokens of the text that the context has already

    def cached_tokens(self) -> list[int]:
        """The tokens whose keys and values the cache holds, also once the text has ended."""
        return (self.context + self.text.tokens[self.before :])[: self.position]


@dataclass
class DecodeInFlight:
    """A step in flight: its texts and the buffer for their tokens."""

    texts: list[Continuation | None]
    tokens: Tensor  # (B) int64 that the host may read when it is `ready`
    ready: torch.cuda.Event | None


class Decoder:
    """Writes texts with given weights, as many at a time as `buf` has slots.

    A step computes and chooses one token per text; on a GPU it is captured once as a CUDA graph and replayed. The host
    reads a token while the device works on the next. The token of a text that ended in the meantime is dropped.
    """

    def __init__(
        self,
        shape: ModelShape,
        ops: ModuleType,
        weights: Any,
        buf: Any,
        options: SamplingOptions,
        *,
        end_of_text: int | None,
        ends: Iterable[int] = (),
    ):
        """`weights` and `buf`: of the architecture of `shape`; `end_of_text`: the token that ends a text, or None; `ends`:
        others that end one. They are exempt from the repetition penalty."""
        self.model, self.shape, self.ops, self.weights, self.buf = architecture(shape), shape, ops, weights, buf
        self.options, self.reuse_cache = options, False
        self.ends = frozenset(ends) if end_of_text is None else frozenset((end_of_text, *ends))
        self.longest = buf.keys.shape[3]
        self.slots: list[Slot | None] = [None] * buf.tokens.shape[0]
        cuda = buf.tokens.is_cuda
        self.graphs = cuda and ops.BACKEND.capturable
        self.step = Replayed([self.launch_step]) if self.graphs else self.launch_step
        self.cached: list[Slot | None] = [None] * len(self.slots)
        self.prefills: dict[tuple[int, int, bool], Callable[[], None]] = {}  # by sequences, padded length, append
        # Tokens arrive on the host in two buffers by turns; a CPU's are there already.
        self.host_tokens = [torch.empty_like(buf.chosen, device="cpu", pin_memory=True) for _ in range(2)] if cuda else []

    def launch_step(self) -> None:
        """Chooses the next token of every sequence from its last one, without the host."""
        buf, o = self.buf, self.options
        self.model.decode_step(self.ops.decode, self.weights, buf, self.shape)
        self.ops.decode.choose_tokens(
            buf.chosen,
            buf.logits,
            None if o.repetition_penalty == 1 else buf.seen,
            buf.seeds,
            buf.places,
            vocab_size=self.shape.vocab_size,
            **asdict(o),
            scratch=buf.scratch,
        )
        self.ops.decode.advance(buf.tokens, buf.positions, buf.places, buf.chosen, buf.active)

    def prefill(self, batch: int, length: int, *, append: bool = False) -> None:
        """Runs the model's prefill; on a GPU its ~80 launches are captured once per size, and replayed."""
        size = batch, length, append
        if size not in self.prefills:
            tensors = self.ops, self.weights, self.buf, self.shape
            launch = partial(self.model.prefill, *tensors, batch, length, append=append)
            self.prefills[size] = Replayed([launch]) if self.graphs else launch
        self.prefills[size]()

    def generate(self, texts: Iterable[Continuation], *, reuse_cache: bool = False) -> Iterator[Continuation]:
        """Yields a text whenever it has a new token or ends, until all have ended; reads `texts` as slots become free.

        When a context is full, this drops its older half and prefills the rest at its new positions. With `reuse_cache`, a
        prompt that begins with the tokens of the last text in its slot reuses their keys and values, also from an
        earlier call; its logits then depend, in their rounding, on the texts before it. Raises `NumericsError` when the
        model's logits are not finite.
        """
        self.reuse_cache = reuse_cache
        waiting = iter(texts)
        in_flight: DecodeInFlight | None = None
        self.slots = [None] * len(self.slots)  # the reader of an earlier call may have stopped halfway
        self.buf.active.zero_()
        self.buf.positions.zero_()
        while True:
            self.fill_slots(waiting)
            busy = [slot for slot in self.slots if slot]
            full = [index for index, slot in enumerate(self.slots) if slot and slot.position == self.longest]
            if in_flight and (full or not busy):
                arrived, in_flight = in_flight, None  # its tokens belong to the context that enters again
                yield from self.deliver(arrived)
                continue
            if not busy:
                return
            if full:
                self.enter({index: slot.text for index in full if (slot := self.slots[index])}, self.longest // 2)
            launched = self.launch()
            if self.host_tokens:
                launched, in_flight = in_flight, launched
            if launched:
                yield from self.deliver(launched)

    def fill_slots(self, waiting: Iterator[Continuation]) -> None:
        """Frees the slots of texts that have ended, or will with the steps in flight, and fills them with waiting ones."""
        entering: dict[int, Continuation] = {}
        for index, slot in enumerate(self.slots):
            if slot is None or slot.text.stopped or not slot.steps_left:
                text = next(waiting, None)
                if text is not None:
                    assert text.prompt and text.max_tokens > 0
                    self.slots[index] = Slot(text, text.max_tokens)
                    entering[index] = text
                elif slot is not None:
                    self.slots[index] = None
                    self.buf.active[index] = 0
                    self.buf.positions[index] = 0
        if entering:
            self.enter(entering, self.longest)

    def enter(self, texts: dict[int, Continuation], most: int) -> None:
        """Prefills the last tokens of these texts, at most `most` (and at least one), each at its slot's beginning."""
        buf = self.buf
        contexts = {index: (text.prompt + text.tokens)[-max(1, most) :] for index, text in texts.items()}
        prefixes = [self.cached_prefix(index, context[:-1]) for index, context in contexts.items()]
        new = [context[start:-1] for context, start in zip(contexts.values(), prefixes, strict=True)]
        prefill(self.prefill, buf, new, list(contexts), prefixes)
        for index, context in contexts.items():
            slot, text = self.slots[index], texts[index]
            assert slot is not None
            slot.position = len(context) - 1
            slot.context, slot.before = context, len(text.tokens)
            self.cached[index] = slot
            buf.tokens[index] = context[-1]
            buf.positions[index] = slot.position
            buf.places[index] = len(text.prompt) + len(text.tokens)
            buf.active[index] = 1
            buf.seeds[index] = text.seed
            if self.options.repetition_penalty != 1:
                seen = torch.zeros(buf.seen.shape[1], dtype=torch.bool)
                seen[[*text.prompt, *text.tokens]] = True
                seen[list(self.ends)] = False  # end-of-text began the document, which is no reason not to end it
                buf.seen[index].copy_(seen)

    def cached_prefix(self, index: int, tokens: Sequence[int]) -> int:
        """The number of first tokens whose keys and values the slot holds already, and may reuse."""
        cached = self.cached[index]
        held = cached.cached_tokens() if self.reuse_cache and cached else []
        differing = (n for n, (token, its) in enumerate(zip(tokens, held, strict=False)) if token != its)
        return next(differing, min(len(tokens), len(held)))

    def launch(self) -> DecodeInFlight:
        self.step()
        texts = []
        for index, slot in enumerate(self.slots):
            texts.append(slot.text if slot else None)
            if slot is None:
                self.cached[index] = None  # the step writes at the beginning of a free slot
            else:
                slot.position += 1
                slot.steps_left -= 1
        if not self.host_tokens:
            return DecodeInFlight(texts, self.buf.chosen, None)
        self.host_tokens.reverse()
        self.host_tokens[0].copy_(self.buf.chosen, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return DecodeInFlight(texts, self.host_tokens[0], ready)

    def deliver(self, launched: DecodeInFlight) -> Iterator[Continuation]:
        """Appends to each text the token that the step chose for it."""
        if launched.ready:
            launched.ready.synchronize()
        for text, token in zip(launched.texts, launched.tokens.tolist(), strict=True):
            if text is None or text.stopped:
                continue
            if token < 0:
                raise NumericsError(
                    "the model's logits are not finite: its weights have diverged; use an earlier checkpoint, or train"
                    " again with a lower --learning-rate"
                )
            if token in self.ends:
                text.stopped = END_OF_TEXT
            else:
                text.tokens.append(token)
                if len(text.tokens) == text.max_tokens:
                    text.stopped = MAX_TOKENS
            yield text


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
