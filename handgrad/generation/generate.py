"""Texts from a model, a batch at a time: whoever ends makes room for the next, and the device never waits for the host."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.errors import NumericsError, UsageError
from handgrad.generation.decode import prefill
from handgrad.graphs import Replayed
from handgrad.models import architecture
from handgrad.ops.reference.decode import SMALLEST_TEMPERATURE

END_OF_TEXT, STOP, MAX_TOKENS = "end_of_text", "stop", "max_tokens"  # why a text ended


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen (`ops.choose_tokens`). Raises `UsageError` for what cannot be."""

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
    """Raises `UsageError` for what no text can be written with."""
    if max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, found {max_tokens}")
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed must be at least 0 and below 2^32, found {seed}")
    if not all(stops):
        raise UsageError("--stop must be some text, found none")


@dataclass(eq=False)
class Continuation:
    """A text that is being written. Whoever reads it may end it by setting `stopped`."""

    prompt: list[int]  # at least one token: end-of-text starts a document
    max_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)  # after the prompt, without the end-of-text that ended it
    stopped: str = ""  # END_OF_TEXT, STOP or MAX_TOKENS; empty while it goes on


@dataclass
class Slot:
    """A place in the batch and the text in it."""

    text: Continuation
    position: int  # in the context, of the token that the next step takes in
    left: int  # steps until max_tokens


@dataclass
class Launched:
    """A step on its way: whom it is for, and where its tokens will be."""

    texts: list[Continuation | None]
    tokens: Tensor  # (B) int64 that the host may read when it is `ready`
    ready: torch.cuda.Event | None


class Decoder:
    """Writes texts with the weights that it is given, as many at a time as `buf` has slots.

    A step is all that a token takes, the choice included: on a GPU it is recorded once as a CUDA graph and replayed. The
    host learns of a token while the device works on the next. What a step computes for a text that has ended in the
    meantime is dropped.
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
    ):
        """`weights` and `buf`: of the architecture of `shape`; `end_of_text`: the token that ends a text, and that no
        repetition is held against; None if there is none."""
        self.model, self.ops, self.weights, self.buf, self.options = architecture(shape), ops, weights, buf, options
        self.vocab_size, self.end_of_text = shape.vocab_size, end_of_text
        self.longest = buf.keys.shape[3]
        self.slots: list[Slot | None] = [None] * buf.tokens.shape[0]
        cuda = buf.tokens.is_cuda
        self.step = Replayed([self.launch_step]) if cuda and ops.CAPTURABLE else self.launch_step
        # Where tokens arrive on the host, in turns; a CPU's are there already.
        self.arrivals = [torch.empty_like(buf.chosen, device="cpu", pin_memory=True) for _ in range(2)] if cuda else []

    def launch_step(self) -> None:
        """The next token of every sequence, from its last one; nothing here asks the host."""
        buf, o = self.buf, self.options
        self.model.decode_step(self.ops.decode, self.weights, buf)
        self.ops.decode.choose_tokens(
            buf.chosen,
            buf.logits,
            None if o.repetition_penalty == 1 else buf.seen,
            buf.seeds,
            buf.places,
            vocab_size=self.vocab_size,
            temperature=o.temperature,
            top_k=o.top_k,
            top_p=o.top_p,
            min_p=o.min_p,
            repetition_penalty=o.repetition_penalty,
            scratch=buf.scratch,
        )
        torch.clamp(buf.chosen, min=0, out=buf.tokens)  # -1 is no token; the host ends the text when it sees it
        buf.positions.add_(buf.active)
        buf.places.add_(1)

    def generate(self, texts: Iterable[Continuation]) -> Iterator[Continuation]:
        """Yields a text whenever it got a token or ended, until all have ended; `texts` is read as slots become free.

        When a context is full, its older half is forgotten and the rest taken in again at the positions it then has.
        Raises `NumericsError` when the model's logits are not finite.
        """
        waiting = iter(texts)
        on_its_way: Launched | None = None
        self.slots = [None] * len(self.slots)  # a reader that lost interest may have left texts in them
        self.buf.active.zero_()
        self.buf.positions.zero_()
        while True:
            self.fill_slots(waiting)
            busy = [slot for slot in self.slots if slot]
            full = [place for place, slot in enumerate(self.slots) if slot and slot.position == self.longest]
            if on_its_way and (full or not busy):
                arrived, on_its_way = on_its_way, None  # its tokens are part of what is taken in again
                yield from self.take(arrived)
                continue
            if not busy:
                return
            if full:
                self.enter({place: slot.text for place in full if (slot := self.slots[place])}, self.longest // 2)
            launched = self.launch()
            if self.arrivals:
                launched, on_its_way = on_its_way, launched
            if launched:
                yield from self.take(launched)

    def fill_slots(self, waiting: Iterator[Continuation]) -> None:
        """Frees the slots of texts that have ended, or will have with the steps on their way, and gives them to others."""
        entering: dict[int, Continuation] = {}
        for place, slot in enumerate(self.slots):
            if slot is None or slot.text.stopped or not slot.left:
                text = next(waiting, None)
                if text is not None:
                    assert text.prompt and text.max_tokens > 0
                    self.slots[place] = Slot(text, 0, text.max_tokens)
                    entering[place] = text
                elif slot is not None:
                    self.slots[place] = None
                    self.buf.active[place] = 0
                    self.buf.positions[place] = 0
        if entering:
            self.enter(entering, self.longest)

    def enter(self, texts: dict[int, Continuation], most: int) -> None:
        """Takes in the last tokens of these texts, at most `most` (and at least one), each at its slot's beginning."""
        buf = self.buf
        contexts = {place: (text.prompt + text.tokens)[-max(1, most) :] for place, text in texts.items()}
        prefill(self.model, self.ops, self.weights, buf, [context[:-1] for context in contexts.values()], list(contexts))
        for place, context in contexts.items():
            slot, text = self.slots[place], texts[place]
            assert slot is not None
            slot.position = len(context) - 1
            buf.tokens[place] = context[-1]
            buf.positions[place] = slot.position
            buf.places[place] = len(text.prompt) + len(text.tokens)
            buf.active[place] = 1
            buf.seeds[place] = text.seed
            if self.options.repetition_penalty != 1:
                seen = torch.zeros(buf.seen.shape[1], dtype=torch.bool)
                seen[[*text.prompt, *text.tokens]] = True
                if self.end_of_text is not None:
                    seen[self.end_of_text] = False  # it began the document: that is no reason not to end it
                buf.seen[place].copy_(seen)

    def launch(self) -> Launched:
        self.step()
        texts = []
        for slot in self.slots:
            texts.append(slot.text if slot else None)
            if slot:
                slot.position += 1
                slot.left -= 1
        if not self.arrivals:
            return Launched(texts, self.buf.chosen, None)
        self.arrivals.reverse()
        self.arrivals[0].copy_(self.buf.chosen, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Launched(texts, self.arrivals[0], ready)

    def take(self, launched: Launched) -> Iterator[Continuation]:
        """Hands each text the token that the step chose for it."""
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
            if token == self.end_of_text:
                text.stopped = END_OF_TEXT
            else:
                text.tokens.append(token)
                if len(text.tokens) == text.max_tokens:
                    text.stopped = MAX_TOKENS
            yield text
