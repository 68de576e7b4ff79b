"""The memory of generation, and the prefill of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import named
from handgrad.models import architecture
from handgrad.settings.config import ModelShape

KIND = "generation"
PREFILL_TOKENS = 2048  # most prompt tokens per prefill: enough for a GPU's GEMMs to run at full speed
LEAST_CACHE = 1024  # tokens
LENGTH_MULTIPLE = 32  # padded prompt lengths are multiples of this


def with_cache(shape: ModelShape, tokens: int) -> ModelShape:
    """The shape with a cache for `tokens`: a power of two, at least `LEAST_CACHE`, at most the model's context."""
    return replace(shape, sequence_length=min(shape.sequence_length, max(LEAST_CACHE, 1 << (tokens - 1).bit_length())))


def decode_buffers(
    shape: ModelShape, batch: int, dtype: torch.dtype, ops: ModuleType, *, prefill_tokens: int = PREFILL_TOKENS
) -> list[Buffer]:
    """The rows of the architecture's `Decoding` for `batch` sequences. One prefill takes at most `prefill_tokens` tokens,
    or one whole context if that is longer. Raises `UsageError` for a network of pictures."""
    if shape.network.pictures:
        raise UsageError(
            f"{shape.architecture} writes no text; `handgrad prepare --images FOLDER --codes RUN` takes its codes"
        )
    tokens = max(shape.sequence_length, min(prefill_tokens, batch * shape.sequence_length))
    rows = architecture(shape).decoding(shape, batch, tokens, dtype, ops)
    return [Buffer(f"{KIND}.{row.name}", row.shape, row.dtype, KIND, row.ticks) for row in rows]


def decode_tensors(shape: ModelShape, views: dict[str, Tensor]) -> Any:
    """The architecture's `Decoding` over the views of `decode_buffers`."""
    return named(architecture(shape).Decoding, {name.removeprefix(f"{KIND}."): view for name, view in views.items()}, 2)


def padded_length(tokens: int, longest: int) -> int:
    """The padded length of a prompt, at most `longest`: a multiple of `LENGTH_MULTIPLE` or, from 256 tokens on,
    of a quarter of the power of two below. Each length needs its own graph; this rule limits them to 16 up to 1024 tokens,
    and four more per doubling."""
    multiple = max(LENGTH_MULTIPLE, (1 << max(0, tokens - 1).bit_length()) // 8)
    return min(-(-tokens // multiple) * multiple, longest)


def prefill(
    launch: Callable[..., None],
    buf: Any,
    sequences: Sequence[Sequence[int]],
    slots: Sequence[int],
    starts: Sequence[int] | None = None,
) -> None:
    """Writes the keys and values of sequences (0 to maxT tokens each) into their slots, from position 0 on or, after
    tokens already in the slots, from `starts` on. `launch(B', T, append=...)` runs the architecture's prefill over that
    many rows of the prompt buffers; `append`: from `starts` on.

    A prefill computes no logits: the step that reads the next token does. Takes the longest first, so that sequences of
    similar length are padded together."""
    rows, longest = buf.prompt_tokens.shape[0], buf.keys.shape[3]
    everything = list(zip(sequences, slots, starts or [0] * len(slots), strict=True))
    for append in (False, True):
        waiting = sorted((one for one in everything if one[0] and bool(one[2]) == append), key=lambda one: -len(one[0]))
        while waiting:
            length = padded_length(len(waiting[0][0]), longest)
            group, waiting = waiting[: rows // length], waiting[rows // length :]
            padded = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence, _, _ in group])
            buf.prompt_tokens[: padded.numel()].view(padded.shape).copy_(padded)
            buf.prompt_slots[: len(group)].copy_(torch.tensor([slot for _, slot, _ in group]))
            if append:
                positions = torch.tensor([start for _, _, start in group]).unsqueeze(1) + torch.arange(length)
                buf.prompt_positions[: padded.numel()].copy_(positions.clamp_(max=longest - 1).view(-1))
            launch(len(group), length, append=append)
