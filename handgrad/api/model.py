"""A loaded model: its logits, its losses, the texts that it generates."""

import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Number
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.evaluation.load import (
    GrowingMemory,
    Weights,
    Writing,
    check_available,
    is_taught_to_talk,
    load_model,
    machine,
    usual_window,
)
from handgrad.generation.chat import Talk, listed_ends
from handgrad.generation.generate import Continuation, SamplingOptions, check_writing, cropped, document, stream_text
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.memory.rows import count_parameters
from handgrad.models import architecture, compute_losses, forward_buffers, named_activations, parameter_table
from handgrad.models.passes import head_logits, run
from handgrad.names import check_choice
from handgrad.settings.config import AUTO, BACKENDS, DEVICES, PRECISIONS

MICRO_BATCH = 8  # rows that go through the model at once, as in `handgrad evaluate`

Prompts = TypeVar("Prompts", str, list[str])
Texts = str | Sequence[str]
Tokens = str | Tensor | np.ndarray | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class Model:
    """Weights that do not change, and the memory to compute with them.

    Besides the weights, a model has two planned allocations: the activations of up to 8 rows of tokens, and the state of
    the texts in one batch of generation. The first call that needs one allocates it; a larger call allocates it again.
    Results are separate tensors.

    Arguments named `tokens` are

        "a text"                           its document: end-of-text or the model's begin-of-text, then its tokens
        [464, 2068, 7586]                  one row
        ["a text", "another"], [[464], [2068, 7586]], a tensor or array (T) or (B, T)      rows, of any lengths
    """

    def __init__(self, source: Weights, ops: ModuleType, device: torch.device, precision: str):
        """Copies the weights of `source`. Raises `DataError` if they do not fit in memory."""
        self.device, self.precision = device, precision
        self.dtype = devices.dtype_of(device, precision)
        loaded = load_model(source, device, self.dtype, ops, [])
        self.shape, self.tokenizer, self.ops = loaded.shape, loaded.tokenizer, ops
        self.model, self.table = architecture(self.shape), parameter_table(self.shape)
        self.flat, self.weights = loaded.views["parameters"], loaded.weights
        self._writing = Writing(loaded, self.dtype)
        self.origin = source.origin  # the source of the weights
        self.data = "" if source.config.reward else source.config.data  # the shards they were trained on, if known
        self.talks = is_taught_to_talk(source.tokenizer, source.checkpoint)
        self.eval_stride, self.packing = source.config.eval_stride, source.config.packing  # of its run's validations
        self.eval_context = usual_window(source)  # tokens per window of `handgrad.evaluate`
        self._activation_memory = GrowingMemory(device)
        self._forward: tuple[tuple[int, int, bool], Any] | None = None  # ((rows, tokens, packed), their buffers)
        self._talk: Talk | None = None
        self._writer: object = None  # the call that owns the decoder's memory
        self.lock = threading.RLock()  # threads take turns: each call writes into the same memory

    def __repr__(self) -> str:
        s, words = self.shape, self.tokenizer
        return (
            f"<handgrad.Model: {s.variant}{s.num_layers} layers, {s.num_heads} heads, {s.channels} channels, context"
            f" {s.sequence_length}, {words.kind} vocabulary of {words.vocab_size},"
            f" {count_parameters(self.table):,} parameters in {self.precision} on {self.device}>"
        )

    def tokens(self, text: str) -> list[int]:
        """The tokens of the document that begins with `text`: `Tokenizer.prompt_start`, then the text's own tokens."""
        return document(self.tokenizer, text)

    def logits(self, tokens: Tokens) -> Tensor:
        """(B, T, V) in the model's precision: after each token, the logits of the next one. At temperature 1, `generate`
        samples from their softmax over the last dimension.

        T is the longest row's length; shorter rows end in NaN. Raises `UsageError` for a row without a
        token or longer than the model's context."""
        rows = self._rows(tokens, least=1)
        longest = max(map(len, rows))
        if longest > self.shape.sequence_length:
            raise UsageError(
                f"expected at most {self.shape.sequence_length} tokens, the model's context, found {longest};"
                " cut the text (`losses` and `loss` take longer ones)"
            )
        V = self.shape.vocab_size
        size_bytes = len(rows) * longest * V * self.dtype.itemsize
        check_available(size_bytes, self.device, f"logits of {len(rows)} x {longest} tokens", "ask for fewer")
        result = torch.full((len(rows), longest, V), math.nan, dtype=self.dtype, device=self.device)
        for first in range(0, len(rows), MICRO_BATCH):
            group = rows[first : first + MICRO_BATCH]
            theirs = result[first : first + len(group)].view(-1, V)
            with self.lock:
                act = self.forward_buffers(len(group), longest)
                act.tokens.copy_(padded(group, longest))
                run(self.model.forward(self.ops, self.weights, act, self.shape))
                for chunk, logits in head_logits(self.ops, self.weights, act):
                    if self.shape.softcap:
                        self.ops.softcap_forward(logits, softcap=self.shape.softcap)
                    theirs[chunk] = logits[:, :V]
        for row, line in zip(rows, result, strict=True):
            line[len(row) :] = math.nan
        return result

    def losses(self, tokens: Tokens) -> Tensor:
        """(B, T-1) float32: the cross-entropy in nats of each token but the first, given the tokens before it; -loss is its
        log-likelihood. A text has a loss for each of its tokens, because its document begins with another token.

        Shorter rows end in NaN. A row longer than the context is cut into contexts that share one token, as training cuts
        the validation split, so each token but the first is predicted once. Raises `UsageError` for a
        row of fewer than two tokens."""
        return self._losses(self._rows(tokens, least=2))

    def loss(self, tokens: Tokens) -> float:
        """The mean of `losses` over all tokens that have one, in nats."""
        rows = self._rows(tokens, least=2)
        lines = self._losses(rows).cpu().double()
        # Sum by the rows' lengths instead of skipping NaN: diverged weights must show.
        sums = [line[: len(row) - 1].sum().item() for row, line in zip(rows, lines, strict=True)]
        return sum(sums) / sum(len(row) - 1 for row in rows)

    def _losses(self, rows: list[list[int]]) -> Tensor:
        context = self.shape.sequence_length
        windows = [(number, start) for number, row in enumerate(rows) for start in range(0, len(row) - 1, context)]
        result = torch.full((len(rows), max(map(len, rows)) - 1), math.nan, device=self.device)
        for first in range(0, len(windows), MICRO_BATCH):
            group = windows[first : first + MICRO_BATCH]
            cut = [rows[number][start : start + context + 1] for number, start in group]
            longest = max(map(len, cut)) - 1
            with self.lock:
                act = self.forward_buffers(len(cut), longest)
                act.tokens.copy_(padded([ids[:-1] for ids in cut], longest))
                act.targets.copy_(padded([ids[1:] for ids in cut], longest))
                compute_losses(self.ops, self.weights, act, self.shape)
                for (number, start), ids, losses in zip(group, cut, act.losses.view(len(group), longest), strict=True):
                    result[number, start : start + len(ids) - 1] = losses[: len(ids) - 1]
        return result

    def _rows(self, tokens: Tokens, *, least: int) -> list[list[int]]:
        """The argument as rows of at least `least` ids that the model knows. Raises `UsageError` for any other."""
        values: Any = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else tokens
        values = [values] if isinstance(values, str | Number) else values or ()
        several: Any = [values] if values and all(isinstance(one, Number) for one in values) else values
        rows = []
        for row in several:
            ids = self.tokens(row) if isinstance(row, str) else row.tolist() if hasattr(row, "tolist") else list(row)
            for one in ids:
                if not isinstance(one, int | np.integer):
                    raise UsageError(f"expected token ids, found {one!r:.40}; give a text, ids, or rows of them")
                if not 0 <= one < self.shape.vocab_size:
                    raise UsageError(f"expected token ids from 0 to {self.shape.vocab_size - 1}, found {one}")
            if len(ids) < least:
                raise UsageError(f"expected at least {least} token(s) in row {len(rows)}, found {len(ids)}")
            rows.append(list(map(int, ids)))  # numpy's 16-bit integers have no common type with others
        if not rows:
            raise UsageError("expected tokens, found none; give a text, ids, or rows of them")
        return rows

    def forward_buffers(self, batch: int, length: int, *, packed: bool = False) -> Any:
        """The buffers of a forward pass over `batch` rows of `length` tokens, reused while the arguments stay the same.
        `packed`: a row holds several documents.

        Pad shorter rows on the right, where causal attention hides the padding."""
        devices.set_arithmetic(self.device, self.precision)  # another model may have changed it
        sizes = batch, length, packed
        if self._forward is None or self._forward[0] != sizes:
            self._forward = None  # frees its memory first
            table = forward_buffers(self.shape, batch, length, self.dtype, self.ops, packed=packed)
            act = named_activations(self.shape, self._activation_memory.lay(table, f"{batch} x {length} tokens"))
            self._forward = sizes, act
        return self._forward[1]

    def generate(
        self,
        prompts: Prompts = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Texts = (),
        seed: int = 0,
        batch: int = 8,
    ) -> Prompts:
        """Continues a prompt and returns a str; for a list of prompts, a list. Takes the options of `handgrad sample`.
        Prompt number i has the seed `seed` + i; the model generates `batch` texts at a time.

        Raises `UsageError` for an invalid option, `NumericsError` when the logits are not finite."""
        if not isinstance(batch, Integral) or batch < 1:
            raise UsageError(f"batch must be 1 or more, and whole, found {batch}")
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)
        texts = self._texts(prompts, max_tokens, stop, seed)
        written = dict.fromkeys(texts, "")
        with self.lock:
            for text, piece in self._write(texts, options, stop, batch):
                written[text] += piece
        strings: Any = list(written.values())
        return strings[0] if isinstance(prompts, str) else strings

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Texts = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Like `generate` for one prompt, but yields pieces. Raises `UsageError` if the model begins another text."""
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)
        texts = self._texts([prompt], max_tokens, stop, seed)
        return (piece for _, piece in self._write(texts, options, stop, 1) if piece)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int = 512,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Texts = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Yields the assistant's answer to a conversation in pieces. `messages`: like {"role": "user", "content": "Hello"},
        the last one from the user. Uses the chat template of the model's tokenizer, or the plain one.

        Leaves out the oldest turns, with a warning, if the conversation and an answer of `max_tokens` (or of a quarter of
        the context) do not fit the model's context, or the part of it that fits in memory. Raises `UsageError` for
        messages that it cannot answer."""
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)
        check_writing(max_tokens, seed, texts_of(stop))
        if self._talk is None:
            self._talk = Talk(self.tokenizer)
        prompt = self._talk.prompt(messages, self._writing.fitting(self.shape.sequence_length), int(max_tokens))
        if prompt.note:
            warnings.warn(prompt.note, stacklevel=2)
        text = Continuation(prompt.tokens, prompt.max_tokens, int(seed))
        return (piece for _, piece in self._write([text], options, stop, 1, self._talk) if piece)

    def _texts(self, prompts: Texts, max_tokens: int, stop: Texts, seed: int) -> list[Continuation]:
        """The texts to write. Raises `UsageError` for an invalid option."""
        check_writing(max_tokens, seed, texts_of(stop))
        listed, most, seed = texts_of(prompts, "prompts"), int(max_tokens), int(seed)  # numpy's are not Python's
        texts = [Continuation(self.tokens(prompt), most, seed + number) for number, prompt in enumerate(listed)]
        if note := cropped(texts, self.shape.sequence_length):
            warnings.warn(note, stacklevel=3)
        return texts

    def _write(
        self, texts: list[Continuation], options: SamplingOptions, stop: Texts, batch: int, talk: Talk | None = None
    ) -> Iterator[tuple[Continuation, str]]:
        """Generates the texts, `batch` at a time; yields (text, its next piece). `talk`: for a conversation, which keeps
        the keys and values of its earlier turns."""
        if not texts:
            return
        claim, batch = object(), min(batch, len(texts))
        longest = max(len(text.prompt) + text.max_tokens for text in texts)
        ends = frozenset((self.tokenizer.end_of_text, *(talk.ends if talk else listed_ends(self.tokenizer))))
        with self.lock:
            devices.set_arithmetic(self.device, self.precision)
            if talk and self._writing.size[0] == batch:
                longest = max(longest, self._writing.size[1])
            decoder, self._writer = self._writing.decoder(batch, longest, options, ends), claim
        pieces = stream_text(decoder, self.tokenizer, iter(texts), texts_of(stop), reuse_cache=talk is not None)
        while True:
            with self.lock:
                if self._writer is not claim:
                    raise UsageError("this stream ended when its model began another text; load the model twice for both")
                if (piece := next(pieces, None)) is None:
                    return
            yield piece


def texts_of(value: Texts, name: str = "stop") -> list[str]:
    """One text, or several, as a list. Raises `UsageError` for anything else."""
    texts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"{name} must be a text, or several, found {text!r:.40}")
    return texts


def padded(rows: list[list[int]], length: int) -> Tensor:
    """(rows, length) int64: the rows, each followed by zeros."""
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])


def load(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    precision: str = "auto",
    backend: str = "auto",
    tokenizer: str = "",
) -> Model:
    """Loads the model at `source`: a run (its newest checkpoint), RUN/best, a checkpoint, a transformers folder, a name on
    the Hub, a .bin of llm.c. Takes the options of `handgrad sample` and, for imported weights, of `handgrad import`.

    Raises `DataError` or `UsageError` if the model does not exist, is damaged, or does not fit."""
    choices = {"device": (device, DEVICES), "precision": (precision, (AUTO, *PRECISIONS)), "backend": (backend, BACKENDS)}
    for name, (value, known) in choices.items():
        check_choice(name, value, (choice for choice in known if choice != "fp8"))
    weights, on = open_weights(os.fspath(source), tokenizer), machine(devices.resolve_device(device), precision, backend)
    return Model(weights, on.ops, on.device, on.precision)
