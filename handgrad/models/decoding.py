"""The buffers of generation. Architectures differ only in their blocks.

`prefill` reads all tokens of a prompt but the last, many at a time. `decode_step` reads the last one and then each chosen
token, one per sequence. The two share memory: ticks 1 and 2 are a block of the prefill, 3 and 4 a block of a step. Every
block overwrites the same buffers, and updates the residual stream in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, activation, activation_rows, dtypes_of
from handgrad.memory.arena import Clock
from handgrad.models.passes import Attention, Launch
from handgrad.models.windows import fill_window_starts
from handgrad.networks import ModelShape
from handgrad.ops.reference.attention import Mask

PROMPTS, STEP = ((1, 2),), ((3, 4),)
Block = TypeVar("Block")


@dataclass
class Sequences:
    """The state of B sequences, and the buffers for R prompt tokens or one token per sequence."""

    tokens: Tensor = activation("B", torch.int64)  # each sequence's last token, the next step's input
    chosen: Tensor = activation("B", torch.int64)  # the step's choice, or -1
    positions: Tensor = activation("B", torch.int64)  # of `tokens` in the context, from 0
    places: Tensor = activation("B", torch.int64)  # index of the next token in the whole text
    active: Tensor = activation("B", torch.int64)  # 1 for a slot in use, 0 for a free one
    seeds: Tensor = activation("B", torch.int64)
    arrivals: Tensor = activation("B H", torch.int32)  # zeros between launches: programs of a head that have ended
    seen: Tensor = activation("B V", torch.bool)  # the tokens each sequence has
    keys: Tensor = activation("L B K maxT D")
    values: Tensor = activation("L B K maxT D")
    scratch: Tensor = activation("scratch", torch.uint8)
    prompt_tokens: Tensor = activation("R", torch.int64, lives=lambda _: PROMPTS)
    prompt_positions: Tensor = activation("R", torch.int64, lives=lambda _: PROMPTS)  # of an append
    prompt_slots: Tensor = activation("B", torch.int64, lives=lambda _: PROMPTS)  # the slot of each prompt
    logits: Tensor = activation("B Vp", lives=lambda _: STEP)


def decode_rows(
    block: type, shape: ModelShape, batch: int, prompt_tokens: int, dtype: torch.dtype, ops: ModuleType
) -> Iterator[ActivationRow]:
    """The rows of `Sequences` and of two copies of `block`, for prefill and step. `batch`: sequences; `prompt_tokens`: most
    tokens per prefill."""
    tokens, C = max(batch, prompt_tokens), shape.channels
    sizes = {**shape.letters, "B": batch, "R": prompt_tokens}
    choosing = ops.decode.choosing_scratch_bytes(batch=batch, vocab_size=shape.vocab_size)
    sizes["scratch"] = max(choosing, ops.scratch_bytes(tokens=tokens, channels=C, widest=shape.widest))
    clock, dtypes = Clock(layers=2, stages=2, training=False), dtypes_of(dtype)
    yield from activation_rows(Sequences, sizes, dtypes, clock)
    turns = [sizes | {"B": 1, "T": prompt_tokens, "N": prompt_tokens}, sizes | {"T": 1, "N": batch}]
    for its_sizes, its_clock, ticks in zip(turns, clock.every_layer(), (PROMPTS, STEP), strict=True):
        for row in activation_rows(block, its_sizes, dtypes, its_clock, f"blocks.{its_clock.layer}."):
            yield replace(row, ticks=ticks) if row.name.endswith("residual_out") else row  # the stream


def step_attention(ops: ModuleType, block: Any, sequences: Sequences, layer: int, window: int = 0) -> Attention:
    """One token per sequence attends over the layer's cache, or over the last `window` tokens of it."""
    cache, memory = (sequences.keys[layer], sequences.values[layer]), step_memory(sequences)

    def attention(out: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        tensors = residual, block.qkv, sequences.positions, weight, bias
        ops.attention_linear_residual_forward(out, block.atty, *cache, *tensors, window=window, **memory)

    return attention


def store_prompts(ops: ModuleType, block: Any, sequences: Sequences, layer: int, batch: int, *, append: bool) -> None:
    """Stores the keys and values of `batch` prompts in the layer's cache, from 0 or, to `append`, `prompt_positions` on."""
    cache, slots = (sequences.keys[layer], sequences.values[layer]), sequences.prompt_slots[:batch]
    if append:
        positions = sequences.prompt_positions[: block.qkv.shape[0]]
        ops.decode.store_keys_values_at(*cache, block.qkv, slots, positions)
    else:
        ops.store_keys_values(*cache, block.qkv, slots)


def prompt_attention(
    ops: ModuleType, block: Any, sequences: Sequences, layer: int, batch: int, *, append: bool, window: int = 0
) -> Attention:
    """`prompts_attend`, with the output projection."""
    attend = prompts_attend(ops, block, sequences, layer, batch, append=append, window=window)

    def attention(out: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        attend()
        ops.linear_residual_forward(out, residual, block.atty, weight, bias, scratch=sequences.scratch)

    return attention


def prompts_attend(
    ops: ModuleType, block: Any, sequences: Sequences, layer: int, batch: int, *, append: bool, window: int
) -> Launch:
    """Stores the prompts' keys and values. Their tokens attend to their own prompt or, with `append`, to the whole cache of
    the layer; in both within a `window`, if it is not 0. Fills block.atty."""
    scratch = {"scratch": sequences.scratch}

    def attend() -> None:
        store_prompts(ops, block, sequences, layer, batch, append=append)
        if append:
            cache = sequences.keys[layer], sequences.values[layer]
            where = sequences.prompt_slots[:batch], sequences.prompt_positions[: block.qkv.shape[0]]
            ops.decode.attention_append(block.atty, *cache, block.qkv, *where, window=window, **scratch)
        elif 0 < window < block.lse.shape[2]:
            starts = torch.empty(batch, block.lse.shape[2], dtype=torch.int32, device=block.qkv.device)
            fill_window_starts(starts, None, window)
            ops.attention_forward(
                block.atty, block.lse, block.qkv, mask=Mask(starts, window, has_documents=False), **scratch
            )
        else:
            ops.attention_forward(block.atty, block.lse, block.qkv, **scratch)

    return attend


def step_attends(ops: ModuleType, block: Any, sequences: Sequences, layer: int, window: int) -> Launch:
    """`step_attention` without the output projection: fills block.atty."""
    tensors = sequences.keys[layer], sequences.values[layer], block.qkv, sequences.positions
    return partial(ops.attention_decode, block.atty, *tensors, window=window, **step_memory(sequences))


def step_memory(sequences: Sequences) -> dict[str, Tensor]:
    """The memory of a step's attention."""
    return {"scratch": sequences.scratch, "arrivals": sequences.arrivals}


def prefill_block(buffers: Block, batch: int, length: int) -> Block:
    """The prefill block's buffers, sliced to (`batch`, `length`) tokens."""
    N, views = batch * length, dict[str, Any]()
    for f in fields(buffers):  # type: ignore[arg-type]
        whole = getattr(buffers, f.name)
        views[f.name] = None if whole is None else whole[:N]
    heads = buffers.lse.shape[1]  # type: ignore[attr-defined]
    views["lse"] = buffers.lse.view(-1)[: N * heads].view(batch, heads, length)  # type: ignore[attr-defined]
    return type(buffers)(**views)
