"""The memory of generation, and the intake of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.config import ModelShape
from handgrad.models import architecture
from handgrad.models.rows import named

KIND = "generation"
PREFILL_TOKENS = 2048  # of prompts at once, if the batch has as many: enough for a GPU's GEMMs to run at full speed
LEAST_CACHE = 1024  # tokens
LENGTH_MULTIPLE = 64  # prompts are padded to a multiple of it, so that GEMMs of few shapes occur


def with_cache(shape: ModelShape, tokens: int) -> ModelShape:
    """The shape whose cache holds so many tokens: a power of two from `LEAST_CACHE` on, at most the model's context."""
    return replace(shape, sequence_length=min(shape.sequence_length, max(LEAST_CACHE, 1 << (tokens - 1).bit_length())))


def decode_buffers(
    shape: ModelShape, batch: int, dtype: torch.dtype, ops: ModuleType, *, prefill_tokens: int = PREFILL_TOKENS
) -> list[Buffer]:
    """The rows of the architecture's `Decoding`: `batch` sequences; prompts are taken in by at most `prefill_tokens` at a
    time, but at least by one whole context."""
    tokens = max(shape.sequence_length, min(prefill_tokens, batch * shape.sequence_length))
    rows = architecture(shape).decoding(shape, batch, tokens, dtype, ops)
    return [Buffer(f"{KIND}.{row.name}", row.shape, row.dtype, KIND, row.ticks) for row in rows]


def decode_tensors(shape: ModelShape, views: dict[str, Tensor]) -> Any:
    """The architecture's `Decoding` over the views of `decode_buffers`."""
    return named(architecture(shape).Decoding, {name.removeprefix(f"{KIND}."): view for name, view in views.items()}, 2)


def prefill(launch: Callable[[int, int], None], buf: Any, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
    """The keys and values of whole sequences (each of at most maxT tokens, or none) into their slots, from position 0 on.
    `launch(B', T)` runs the architecture's prefill over as many rows of `buf.prompt_tokens` and of `buf.prompt_slots`.

    Logits come from the step that takes in the token after them. Longest first: those of about one length are padded
    together.
    """
    waiting = sorted((pair for pair in zip(sequences, slots, strict=True) if pair[0]), key=lambda pair: -len(pair[0]))
    rows, longest = buf.prompt_tokens.shape[0], buf.keys.shape[3]
    while waiting:
        length = min(-(-len(waiting[0][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)
        group, waiting = waiting[: rows // length], waiting[rows // length :]
        padded = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence, _ in group])
        buf.prompt_tokens[: padded.numel()].view(padded.shape).copy_(padded)
        buf.prompt_slots[: len(group)].copy_(torch.tensor([slot for _, slot in group]))
        launch(len(group), length)
