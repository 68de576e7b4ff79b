"""The buffers of generation, which differ between architectures in their blocks alone.

A prompt's tokens but the last go through `prefill`, many at once; the last one, and then every token that was chosen,
through `decode_step`, one per sequence. The two take turns in the same memory: ticks 1 and 2 are a block of the prefill,
3 and 4 one of a step. Every block writes its buffers anew, the stream in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, activation, activation_rows, dtypes_of
from handgrad.memory.arena import Clock
from handgrad.models.passes import Attention
from handgrad.networks import ModelShape

PROMPTS, STEP = ((1, 2),), ((3, 4),)
Block = TypeVar("Block")


@dataclass
class Sequences:
    """The state of B sequences, and the buffers for R tokens of prompts or one token per sequence."""

    tokens: Tensor = activation("B", torch.int64)  # the last token of each, which the next step reads
    chosen: Tensor = activation("B", torch.int64)  # the step's choice, or -1
    positions: Tensor = activation("B", torch.int64)  # of `tokens` in the context, from 0
    places: Tensor = activation("B", torch.int64)  # of the token to be chosen in the whole text
    active: Tensor = activation("B", torch.int64)  # 1 where a sequence is, 0 where a slot is free
    seeds: Tensor = activation("B", torch.int64)
    seen: Tensor = activation("B V", torch.bool)  # the tokens each sequence has
    keys: Tensor = activation("L B K maxT D")
    values: Tensor = activation("L B K maxT D")
    scratch: Tensor = activation("scratch", torch.uint8)
    prompt_tokens: Tensor = activation("R", torch.int64, lives=lambda _: PROMPTS)
    prompt_positions: Tensor = activation("R", torch.int64, lives=lambda _: PROMPTS)  # of an append
    prompt_slots: Tensor = activation("B", torch.int64, lives=lambda _: PROMPTS)  # the sequences that they belong to
    logits: Tensor = activation("B Vp", lives=lambda _: STEP)


def decode_rows(
    block: type, shape: ModelShape, batch: int, prompt_tokens: int, dtype: torch.dtype, ops: ModuleType
) -> Iterator[ActivationRow]:
    """The rows of `Sequences` and of two of `block`, the prefill's and the step's, for `batch` sequences, and for prompts
    that are prefilled by `prompt_tokens` at a time."""
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


def step_attention(ops: ModuleType, block: Any, sequences: Sequences, layer: int) -> Attention:
    """One token per sequence attends over the layer's cache."""
    cache = sequences.keys[layer], sequences.values[layer]

    def attention(out: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        tensors = residual, block.qkv, sequences.positions, weight, bias
        ops.attention_linear_residual_forward(out, block.atty, *cache, *tensors, scratch=sequences.scratch)

    return attention


def store_prompts(ops: ModuleType, block: Any, sequences: Sequences, layer: int, batch: int, *, append: bool) -> None:
    """The keys and values of `batch` prompts into the layer's cache: from position 0 on, or, with `append`, at
    `prompt_positions`."""
    cache, slots = (sequences.keys[layer], sequences.values[layer]), sequences.prompt_slots[:batch]
    if append:
        positions = sequences.prompt_positions[: block.qkv.shape[0]]
        ops.decode.store_keys_values_at(*cache, block.qkv, slots, positions)
    else:
        ops.store_keys_values(*cache, block.qkv, slots)


def prompt_attention(
    ops: ModuleType, block: Any, sequences: Sequences, layer: int, batch: int, *, append: bool
) -> Attention:
    """Stores the keys and values of prompts, whose tokens attend to each other, or, with `append`, over the layer's
    cache."""

    def attention(out: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        store_prompts(ops, block, sequences, layer, batch, append=append)
        if append:
            cache = sequences.keys[layer], sequences.values[layer]
            places = sequences.prompt_slots[:batch], sequences.prompt_positions[: block.qkv.shape[0]]
            ops.decode.attention_append(block.atty, *cache, block.qkv, *places, scratch=sequences.scratch)
        else:
            ops.attention_forward(block.atty, block.lse, block.qkv, scratch=sequences.scratch)
        ops.linear_residual_forward(out, residual, block.atty, weight, bias, scratch=sequences.scratch)

    return attention


def prefill_block(buffers: Block, batch: int, length: int, num_heads: int) -> Block:
    """The buffers of the prefill's block, cut to (`batch`, `length`) tokens."""
    N, found = batch * length, dict[str, Any]()
    for f in fields(buffers):  # type: ignore[arg-type]
        whole = getattr(buffers, f.name)
        found[f.name] = None if whole is None else whole[:N]
    found["lse"] = buffers.lse.view(-1)[: N * num_heads].view(batch, num_heads, length)  # type: ignore[attr-defined]
    return type(buffers)(**found)
