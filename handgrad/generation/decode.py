"""The memory of generation, and the prefill of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.arena import Buffer
from handgrad.memory.rows import named
from handgrad.models import architecture
from handgrad.settings.config import ModelShape

KIND = "generation"
PREFILL_TOKENS = 2048  # of prompts at once, if the batch has as many: enough for a GPU's GEMMs to run at full speed
LEAST_CACHE = 1024  # tokens
LENGTH_MULTIPLE = 64  # of the lengths that prompts are padded to


def with_cache(shape: ModelShape, tokens: int) -> ModelShape:
    """The shape whose cache holds so many tokens: a power of two from `LEAST_CACHE` on, at most the model's context."""
    return replace(shape, sequence_length=min(shape.sequence_length, max(LEAST_CACHE, 1 << (tokens - 1).bit_length())))


def decode_buffers(
    shape: ModelShape, batch: int, dtype: torch.dtype, ops: ModuleType, *, prefill_tokens: int = PREFILL_TOKENS
) -> list[Buffer]:
    """The rows of the architecture's `Decoding`: `batch` sequences; prompts are prefilled by at most `prefill_tokens` at a
    time, but at least by one whole context."""
    tokens = max(shape.sequence_length, min(prefill_tokens, batch * shape.sequence_length))
    rows = architecture(shape).decoding(shape, batch, tokens, dtype, ops)
    return [Buffer(f"{KIND}.{row.name}", row.shape, row.dtype, KIND, row.ticks) for row in rows]


def decode_tensors(shape: ModelShape, views: dict[str, Tensor]) -> Any:
    """The architecture's `Decoding` over the views of `decode_buffers`."""
    return named(architecture(shape).Decoding, {name.removeprefix(f"{KIND}."): view for name, view in views.items()}, 2)


def padded_length(tokens: int, longest: int) -> int:
    """The length that prompts of so many tokens are padded to, at most `longest`: a multiple of `LENGTH_MULTIPLE`, from 512
    tokens on of a quarter of the power of two below. So few lengths occur, each of them a graph: 12 up to 1024 tokens, and
    four more with every doubling."""
    multiple = max(LENGTH_MULTIPLE, (1 << max(0, tokens - 1).bit_length()) // 8)
    return min(-(-tokens // multiple) * multiple, longest)


def prefill(
    launch: Callable[..., None],
    buf: Any,
    sequences: Sequence[Sequence[int]],
    slots: Sequence[int],
    starts: Sequence[int] | None = None,
) -> None:
    """The keys and values of sequences (each of at most maxT tokens, or none) into their slots, from position 0 on, or from
    `starts`, before which the slots hold earlier tokens. `launch(B', T, append=...)` runs the architecture's prefill over
    as many rows of the buffers of prompts; `append`: from `starts` on.

    Logits come from the step that reads the token after them. Longest first: sequences of about one length are padded
    together.
    """
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
