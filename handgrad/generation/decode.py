"""The next token of every sequence of a batch: keys and values are computed once and kept.

A prompt's tokens but the last are taken in by `prefill`, many at once; the last one, and then every token that was chosen,
by `decode_step`, one per sequence. Each sequence has a slot of the batch, with its own place in its own context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import ALWAYS, Buffer, Interval
from handgrad.config import ModelShape
from handgrad.models.parameters import ModelTensors

KIND = "generation"
PREFILL_TOKENS = 2048  # of prompts at once, if the batch has as many: enough for a GPU's products to run at full speed
LENGTH_MULTIPLE = 64  # prompts are padded to a multiple of it, so that products of few shapes occur

# Prefill and step take turns, and share memory.
IN_PREFILL: tuple[Interval, ...] = ((0, 0),)
IN_STEP: tuple[Interval, ...] = ((1, 1),)

Rows = dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Interval, ...]]]


@dataclass
class PrefillTensors:
    """What `prefill` computes for R tokens (N of them at a time) before their keys and values are kept."""

    tokens: Tensor  # (R) int64
    x: Tensor  # (R, C) the residual stream
    residual_mid: Tensor  # (R, C) the same after the attention half
    ln: Tensor  # (R, C)
    mean: Tensor  # (R)
    rstd: Tensor  # (R)
    qkv: Tensor  # (R, 3C)
    atty: Tensor  # (R, C)
    lse: Tensor  # (R H)
    fc: Tensor  # (R, F)
    gelu: Tensor  # (R, F)


@dataclass
class DecodeTensors:
    """The state of B sequences, the buffers of a step that advances all of them, and those of the prefill."""

    tokens: Tensor  # (B) int64: the last token of each, not yet taken in
    chosen: Tensor  # (B) int64: what the step chose, or -1
    positions: Tensor  # (B) int64: the place of `tokens` in the context, 0-based
    places: Tensor  # (B) int64: the place of the token to be chosen in the whole text
    active: Tensor  # (B) int64: 1 where a sequence is, 0 where a slot is free
    seeds: Tensor  # (B) int64
    seen: Tensor  # (B, V) bool: the tokens each sequence has
    keys: Tensor  # (L, B, H, maxT, D)
    values: Tensor  # (L, B, H, maxT, D)
    scratch: Tensor  # (bytes) uint8: what an operation needs for itself
    x: Tensor  # (B, C) the residual stream
    residual_mid: Tensor  # (B, C) the same after the attention half
    ln: Tensor  # (B, C)
    mean: Tensor  # (B)
    rstd: Tensor  # (B)
    qkv: Tensor  # (B, 3C)
    atty: Tensor  # (B, C)
    fc: Tensor  # (B, F)
    gelu: Tensor  # (B, F)
    logits: Tensor  # (B, Vp)
    prefill: PrefillTensors


def decode_buffers(
    shape: ModelShape, batch: int, dtype: torch.dtype, ops: ModuleType, *, prefill_tokens: int = PREFILL_TOKENS
) -> list[Buffer]:
    """The rows of `DecodeTensors` for the arena: `batch` sequences; prompts are taken in by at most `prefill_tokens` at a
    time, but at least by one whole context."""
    C, F, H, longest = shape.channels, shape.feed_forward, shape.num_heads, shape.sequence_length
    B, R = batch, max(longest, min(prefill_tokens, batch * longest))
    scratch_bytes = ops.scratch_bytes(tokens=max(B, R), channels=C, widest=F)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    cache = (shape.num_layers, B, H, longest, C // H)
    step: Rows = {
        "tokens": ((B,), torch.int64, ALWAYS),
        "chosen": ((B,), torch.int64, ALWAYS),
        "positions": ((B,), torch.int64, ALWAYS),
        "places": ((B,), torch.int64, ALWAYS),
        "active": ((B,), torch.int64, ALWAYS),
        "seeds": ((B,), torch.int64, ALWAYS),
        "seen": ((B, shape.vocab_size), torch.bool, ALWAYS),
        "keys": (cache, dtype, ALWAYS),
        "values": (cache, dtype, ALWAYS),
        "scratch": ((scratch_bytes,), torch.uint8, ALWAYS),
        "x": ((B, C), dtype, IN_STEP),
        "residual_mid": ((B, C), dtype, IN_STEP),
        "ln": ((B, C), dtype, IN_STEP),
        "mean": ((B,), stats, IN_STEP),
        "rstd": ((B,), stats, IN_STEP),
        "qkv": ((B, 3 * C), dtype, IN_STEP),
        "atty": ((B, C), dtype, IN_STEP),
        "fc": ((B, F), dtype, IN_STEP),
        "gelu": ((B, F), dtype, IN_STEP),
        "logits": ((B, shape.padded_vocab_size), dtype, IN_STEP),
    }
    prefill: Rows = {
        "tokens": ((R,), torch.int64, IN_PREFILL),
        "x": ((R, C), dtype, IN_PREFILL),
        "residual_mid": ((R, C), dtype, IN_PREFILL),
        "ln": ((R, C), dtype, IN_PREFILL),
        "mean": ((R,), stats, IN_PREFILL),
        "rstd": ((R,), stats, IN_PREFILL),
        "qkv": ((R, 3 * C), dtype, IN_PREFILL),
        "atty": ((R, C), dtype, IN_PREFILL),
        "lse": ((R * H,), stats, IN_PREFILL),
        "fc": ((R, F), dtype, IN_PREFILL),
        "gelu": ((R, F), dtype, IN_PREFILL),
    }
    assert [*step, "prefill"] == [f.name for f in fields(DecodeTensors)]
    assert list(prefill) == [f.name for f in fields(PrefillTensors)]
    rows = {**step, **{f"prefill.{name}": row for name, row in prefill.items()}}
    return [Buffer(f"{KIND}.{name}", dims, dtype, KIND, when) for name, (dims, dtype, when) in rows.items()]


def decode_tensors(views: dict[str, Tensor]) -> DecodeTensors:
    prefill = PrefillTensors(**{f.name: views[f"{KIND}.prefill.{f.name}"] for f in fields(PrefillTensors)})
    step: dict[str, Any] = {f.name: views[f"{KIND}.{f.name}"] for f in fields(DecodeTensors) if f.name != "prefill"}
    return DecodeTensors(**step, prefill=prefill)


def decode_step(ops: ModuleType, w: ModelTensors, buf: DecodeTensors) -> None:
    """Takes in buf.tokens at buf.positions (all earlier ones of a sequence were taken in before) -> buf.logits (B, Vp) for
    the tokens that follow."""
    s = buf.scratch
    norm = buf.ln, buf.mean, buf.rstd
    ops.embedding_decode(buf.x, buf.tokens, buf.positions, w.wte, w.wpe)
    for layer, b in enumerate(w.blocks):
        ln1, ln2 = (b.ln1_weight, b.ln1_bias), (b.ln2_weight, b.ln2_bias)
        ops.layernorm_linear_forward(buf.qkv, *norm, buf.x, *ln1, b.qkv_weight, b.qkv_bias, scratch=s)
        ops.attention_decode(buf.atty, buf.keys[layer], buf.values[layer], buf.qkv, buf.positions, scratch=s)
        ops.linear_residual_forward(buf.residual_mid, buf.x, buf.atty, b.proj_weight, b.proj_bias, scratch=s)
        ops.layernorm_linear_gelu_forward(
            buf.gelu, buf.fc, *norm, buf.residual_mid, *ln2, b.fc_weight, b.fc_bias, scratch=s
        )
        ops.linear_residual_forward(buf.x, buf.residual_mid, buf.gelu, b.fcproj_weight, b.fcproj_bias, scratch=s)
    ops.layernorm_linear_forward(buf.logits, *norm, buf.x, w.lnf_weight, w.lnf_bias, w.wte, None, scratch=s)


def prefill(
    ops: ModuleType, w: ModelTensors, buf: DecodeTensors, sequences: Sequence[Sequence[int]], slots: Sequence[int]
) -> None:
    """The keys and values of whole sequences (each of at most maxT tokens, or none) into their slots, from position 0 on.

    Logits come from the `decode_step` that takes in the token after them. Longest first, so that those of about one length
    are padded together.
    """
    waiting = sorted((pair for pair in zip(sequences, slots, strict=True) if pair[0]), key=lambda pair: -len(pair[0]))
    rows, longest = buf.prefill.tokens.shape[0], buf.keys.shape[3]
    while waiting:
        length = min(-(-len(waiting[0][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)
        group, waiting = waiting[: rows // length], waiting[rows // length :]
        take_in(ops, w, buf, [sequence for sequence, _ in group], [slot for _, slot in group], length)


def take_in(
    ops: ModuleType, w: ModelTensors, buf: DecodeTensors, sequences: list[Sequence[int]], slots: list[int], length: int
) -> None:
    """One pass over as many sequences as fit, padded on the right to `length` tokens.

    What is computed for the padding does no harm: attention is causal, so that no token sees what stands to its right, and
    a padded position of the caches is written again before it is read, by the step that gets there.
    """
    batch, s, p = len(sequences), buf.scratch, buf.prefill
    padded = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence in sequences])
    where = torch.tensor(slots, device=p.tokens.device)
    N = batch * length
    tokens = p.tokens[:N].view(batch, length)
    tokens.copy_(padded)
    x, mid, ln, mean, rstd, qkv, atty, fc, gelu = (
        t[:N] for t in (p.x, p.residual_mid, p.ln, p.mean, p.rstd, p.qkv, p.atty, p.fc, p.gelu)
    )
    lse = p.lse[: N * buf.keys.shape[2]].view(batch, -1, length)
    ops.embedding_forward(x, tokens, w.wte, w.wpe)
    for layer, b in enumerate(w.blocks):
        ops.layernorm_forward(ln, mean, rstd, x, b.ln1_weight, b.ln1_bias)
        ops.linear_forward(qkv, ln, b.qkv_weight, b.qkv_bias, scratch=s)
        ops.store_keys_values(buf.keys[layer], buf.values[layer], qkv, where)
        if layer + 1 == len(w.blocks):
            break  # nobody reads what the last block makes of these tokens
        ops.attention_forward(atty, lse, qkv, scratch=s)
        ops.linear_residual_forward(mid, x, atty, b.proj_weight, b.proj_bias, scratch=s)
        ops.layernorm_forward(ln, mean, rstd, mid, b.ln2_weight, b.ln2_bias)
        ops.linear_gelu_forward(gelu, fc, ln, b.fc_weight, b.fc_bias, scratch=s)
        ops.linear_residual_forward(x, mid, gelu, b.fcproj_weight, b.fcproj_bias, scratch=s)
