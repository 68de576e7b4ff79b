"""A model to ask: its logits, the losses of tokens, the texts it writes."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from handgrad import checkpoint, devices
from handgrad.api.memory import GrowingMemory
from handgrad.arena import Buffer, make_plan
from handgrad.backend import choose_backend
from handgrad.config import BACKENDS, DEVICES, PRECISIONS, ModelShape
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import UsageError
from handgrad.evaluation.load import check_available
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions, check_writing
from handgrad.generation.text import document, stream_text
from handgrad.interop.sources import is_ours, open_weights
from handgrad.models import (
    architecture,
    forward_buffers,
    named_activations,
    named_weights,
    parameter_table,
)
from handgrad.models.passes import run
from handgrad.models.rows import count_parameters, flat_elements

MICRO_BATCH = 8  # rows that go through the model at once, as in `handgrad evaluate`

Prompts = TypeVar("Prompts", str, list[str])
Tokens = str | Tensor | np.ndarray | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class Model:
    """Weights that do not change, and the memory to compute with them.

    What a call needs beside the weights is planned like everything else, and kept for the next one: one allocation for the
    activations of up to 8 rows of tokens, one for the texts that are written at once. Each is made when it is first needed
    and made anew when more is asked for, so it is as large as the largest call so far. Results are tensors of their own.

    Wherever `tokens` are taken, they are

        "a text"                           its document: end-of-text, then its tokens
        [464, 2068, 7586]                  one row
        ["a text", "another"], [[464], [2068, 7586]], a tensor or array (T) or (B, T)      rows, of any lengths
    """

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        ops: ModuleType,
        device: torch.device,
        precision: str,
        *,
        origin: dict[str, Any],
        data: str = "",
    ):
        """Memory for the weights, zeroed; `load` and `Training.model` fill it. Raises `DataError` if it is not there."""
        ops.check_sizes(length=shape.sequence_length, num_heads=shape.num_heads, channels=shape.channels)
        self.shape, self.tokenizer, self.ops = shape, tokenizer, ops
        self.model = architecture(shape)
        self.device, self.precision = device, precision
        self.dtype = devices.use_precision(device, precision)
        self.origin = origin  # where the weights are from
        self.data = data  # the shards they were trained on, if they are known
        self.table = parameter_table(shape)
        buffer = Buffer("parameters", (flat_elements(self.table),), self.dtype, "parameters")
        check_available(buffer.size_bytes, device, "a model", "try --precision bf16")
        self.flat = make_plan([buffer]).allocate(device)["parameters"]
        self.weights = named_weights(shape, self.flat, self.table)
        self._activation_memory, self._decoding_memory = GrowingMemory(device), GrowingMemory(device)
        self._passed: tuple[tuple[int, int], Any] | None = None  # and of how many rows, of how many tokens
        self._decoder: tuple[int, Decoder] | None = None  # and for how many texts
        self._writing: object = None  # what the decoder's memory holds at the moment

    def __repr__(self) -> str:
        s, words = self.shape, self.tokenizer
        return (
            f"<handgrad.Model: {s.num_layers} layers, {s.num_heads} heads, {s.channels} channels, context"
            f" {s.sequence_length}, {words.kind} vocabulary of {words.vocab_size},"
            f" {count_parameters(self.table):,} parameters in {self.precision} on {self.device}>"
        )

    # Tokens in, numbers out.

    def tokens(self, text: str) -> list[int]:
        """The document that begins with `text`: end-of-text, as in training, then the text's tokens."""
        return document(self.tokenizer, text)

    def logits(self, tokens: Tokens) -> Tensor:
        """(B, T, V) in the model's precision: after each token the logits of the next one. The softmax over the last
        dimension is what `generate` draws from at temperature 1.

        T is the longest row's length; behind the end of a shorter row stands NaN. Raises `UsageError` for a row that is
        longer than the model's context, or that has no token.
        """
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
        found = torch.full((len(rows), longest, V), math.nan, dtype=self.dtype, device=self.device)
        for first in range(0, len(rows), MICRO_BATCH):
            group = rows[first : first + MICRO_BATCH]
            act = self._take_in(group, longest)
            run(self.model.forward(self.ops, self.weights, act))
            theirs = found[first : first + len(group)].view(-1, V)
            for place, logits in self.model.head_logits(self.ops, self.weights, act):
                theirs[place] = logits[:, :V]
        for row, line in zip(rows, found, strict=True):
            line[len(row) :] = math.nan
        return found

    def losses(self, tokens: Tokens) -> Tensor:
        """(B, T-1) float32: the cross-entropy of each token but the first, given those before it, in nats; -loss is its
        log-likelihood. Of a text, that is every token of it.

        Behind the end of a shorter row stands NaN. A row longer than the context is cut into contexts that share one token,
        as the validation split is in training, so each token but the first is predicted once. Raises `UsageError` for a
        row of fewer than two tokens.
        """
        return self._losses(self._rows(tokens, least=2))

    def loss(self, tokens: Tokens) -> float:
        """The mean of `losses` over all tokens that have one, in nats."""
        rows = self._rows(tokens, least=2)
        lines = self._losses(rows).cpu().double()
        # By the rows' lengths, not by what is no NaN: weights that diverged must not hide.
        sums = [line[: len(row) - 1].sum().item() for row, line in zip(rows, lines, strict=True)]
        return sum(sums) / sum(len(row) - 1 for row in rows)

    def _losses(self, rows: list[list[int]]) -> Tensor:
        context = self.shape.sequence_length
        windows = [(number, start) for number, row in enumerate(rows) for start in range(0, len(row) - 1, context)]
        found = torch.full((len(rows), max(map(len, rows)) - 1), math.nan, device=self.device)
        for first in range(0, len(windows), MICRO_BATCH):
            group = windows[first : first + MICRO_BATCH]
            parts = [rows[number][start : start + context + 1] for number, start in group]
            longest = max(map(len, parts)) - 1
            act = self._take_in([part[:-1] for part in parts], longest)
            act.targets.copy_(padded([part[1:] for part in parts], longest))
            self.model.loss(self.ops, self.weights, act, vocab_size=self.shape.vocab_size)
            for (number, start), part, losses in zip(group, parts, act.losses.view(len(group), longest), strict=True):
                found[number, start : start + len(part) - 1] = losses[: len(part) - 1]
        return found

    def _rows(self, tokens: Tokens, *, least: int) -> list[list[int]]:
        """Whatever was given as rows of ids that the model knows."""
        given: Any = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else tokens
        if isinstance(given, str) or (given and all(isinstance(one, int | np.integer) for one in given)):
            given = [given]
        rows = []
        for row in given:
            ids = self.tokens(row) if isinstance(row, str) else row.tolist() if hasattr(row, "tolist") else list(row)
            odd = next((one for one in ids if not isinstance(one, int | np.integer)), None)
            if odd is not None:
                raise UsageError(f"expected token ids, found {odd!r:.40}; give a text, ids, or rows of them")
            wrong = next((one for one in ids if not 0 <= one < self.shape.vocab_size), None)
            if wrong is not None:
                raise UsageError(f"expected token ids from 0 to {self.shape.vocab_size - 1}, found {wrong}")
            if len(ids) < least:
                raise UsageError(f"expected at least {least} token(s) in row {len(rows)}, found {len(ids)}")
            rows.append(ids)
        if not rows:
            raise UsageError("expected tokens, found none; give a text, ids, or rows of them")
        return rows

    def _take_in(self, rows: list[list[int]], length: int) -> Any:
        """Activations of (rows, length), with the rows as their tokens. Padding stands on the right, where attention, which
        is causal, lets nobody see it."""
        act = self.forward_buffers(len(rows), length)
        act.tokens.copy_(padded(rows, length))
        return act

    def forward_buffers(self, batch: int, length: int) -> Any:
        """The buffers of a forward pass over `batch` rows of `length` tokens: those of the last one, if it was as large."""
        devices.use_precision(self.device, self.precision)  # torch keeps it for the process; another model may differ
        if self._passed is None or self._passed[0] != (batch, length):
            self._passed = None  # which would keep its memory
            table = forward_buffers(self.shape, batch, length, self.dtype, self.ops)
            act = named_activations(self.shape, self._activation_memory.lay(table, f"{batch} x {length} tokens"))
            self._passed = (batch, length), act
        return self._passed[1]

    # Text.

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
        stop: str | Sequence[str] = (),
        seed: int = 0,
        batch: int = 8,
    ) -> Prompts:
        """What follows a prompt: a str, or of a list of prompts a list of them. The options are those of `handgrad sample`;
        prompt number i has the seed `seed` + i, and `batch` texts are written at once.

        Raises `UsageError` for an option that cannot be, `NumericsError` when the logits are not finite.
        """
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        if batch < 1:
            raise UsageError(f"--batch must be 1 or more, found {batch}")
        stops = checked_stops(max_tokens, seed, stop)
        texts = [Continuation(self.tokens(prompt), max_tokens, seed + number) for number, prompt in enumerate(given)]
        written: dict[Continuation, str] = dict.fromkeys(texts, "")
        if texts:
            for text, piece in self._write(texts, options, stops, min(batch, len(texts))):
                written[text] += piece
        found: Any = "".join(written.values()) if isinstance(prompts, str) else list(written.values())
        return found

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
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """`generate` of one prompt, piece by piece as it is written. It ends, as `UsageError`, when the same model begins
        another text."""
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)
        stops = checked_stops(max_tokens, seed, stop)
        texts = [Continuation(self.tokens(prompt), max_tokens, seed)]
        return (piece for _, piece in self._write(texts, options, stops, 1) if piece)

    def _write(
        self, texts: list[Continuation], options: SamplingOptions, stops: Sequence[str], batch: int
    ) -> Iterator[tuple[Continuation, str]]:
        devices.use_precision(self.device, self.precision)
        mine = self._writing = object()
        for text, piece in stream_text(self._decoder_of(batch, options), self.tokenizer, iter(texts), stops):
            yield text, piece
            if self._writing is not mine:
                raise UsageError("this stream ended when its model began another text; load the model twice to have both")

    def _decoder_of(self, batch: int, options: SamplingOptions) -> Decoder:
        """The last one, with its recorded graph, if it fits."""
        if self._decoder is None or self._decoder[0] != batch:
            self._decoder = None  # which would keep its memory
            table = decode_buffers(self.shape, batch, self.dtype, self.ops)
            buffers = decode_tensors(self.shape, self._decoding_memory.lay(table, f"writing {batch} text(s) at once"))
        else:
            last = self._decoder[1]
            if last.options == options:
                return last
            buffers = last.buf
        end_of_text = self.tokenizer.end_of_text
        decoder = Decoder(self.shape, self.ops, self.weights, buffers, options, end_of_text=end_of_text)
        self._decoder = batch, decoder
        return decoder


def padded(rows: list[list[int]], length: int) -> Tensor:
    """(rows, length) int64: the rows, and token 0 behind them."""
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])


def checked_stops(max_tokens: int, seed: int, stop: str | Sequence[str]) -> Sequence[str]:
    stops = [stop] if isinstance(stop, str) else list(stop)
    check_writing(max_tokens, seed, stops)
    return stops


def load(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    precision: str = "fp32",
    backend: str = "auto",
    tokenizer: str = "",
) -> Model:
    """The model at `source`: a run (its newest checkpoint), RUN/best, a checkpoint, a folder of transformers, a name on the
    Hub, a .bin of llm.c. The options are those of `handgrad sample` and, for weights of others, of `handgrad import`.

    Raises `DataError`, `UsageError` in one line: nothing of the kind is there, it is damaged, or it does not fit.
    """
    choices = {"device": (device, DEVICES), "precision": (precision, PRECISIONS), "backend": (backend, BACKENDS)}
    for name, (value, known) in choices.items():
        if value not in known or value == "fp8":
            names = ", ".join(choice for choice in known if choice != "fp8")
            raise UsageError(f"{name} must be one of {names}; found {value!r}")
    name = os.fspath(source)
    found = open_weights(name, tokenizer)
    where = devices.resolve_device(device)
    path = Path(name)
    config = (checkpoint.peek_config(path.parent if checkpoint.means_best(path) else path) or {}) if is_ours(path) else {}
    model = Model(
        found.shape,
        found.tokenizer,
        choose_backend(backend, where, precision),
        where,
        precision,
        origin=found.origin,
        data=config.get("data", ""),
    )
    for row in model.table:
        row.stored(model.flat).copy_(found.weight(row))
    return model
