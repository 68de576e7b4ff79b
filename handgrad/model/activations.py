"""The activation table: one row per tensor with its shape, its dtype and the stages it lives through.

The clock of a micro-step, in ticks: embedding 0; block l's attention half 1 + 2l and feed-forward half 2 + 2l; the loss
head 2L + 1; then the same halves backwards, and the embedding's backward last. The arena places tensors by these
lifetimes: a recomputed activation lives at its forward tick and again at its backward tick.
"""

from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import ALWAYS, Buffer, Interval
from handgrad.config import ModelShape, RunConfig

KIND = "activations"
NEVER = 3  # above every recompute level
HEAD_CHUNK_BYTES = 512 << 20  # the default chunk's logits take at most this much


@dataclass
class BlockActivations:
    """What one block computes; the same tensors serve its forward and its backward."""

    ln1: Tensor  # (N, C) normalised input of the attention half
    ln1_mean: Tensor  # (N)
    ln1_rstd: Tensor  # (N)
    qkv: Tensor  # (N, 3C)
    atty: Tensor  # (N, C) attention's output, heads side by side
    lse: Tensor  # (B, H, T) log of the softmax's denominators
    residual_mid: Tensor  # (N, C) the stream after the attention half
    ln2: Tensor  # (N, C) normalised input of the feed-forward half
    ln2_mean: Tensor  # (N)
    ln2_rstd: Tensor  # (N)
    fc: Tensor  # (N, F) before GELU
    gelu: Tensor  # (N, F)
    residual_out: Tensor  # (N, C) the stream after the block


@dataclass
class Activations:
    """What a micro-step computes. Gradients (`d...`) are shared by all blocks, one at a time."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    sorted_positions: Tensor  # (N) int32: 0..N-1 ordered by token, for the embedding's backward
    scratch: Tensor  # (bytes) uint8: what an operation needs for itself
    attention_scratch: Tensor  # (bytes) uint8: the same for attention's backward
    embedded: Tensor  # (N, C) the stream before the first block
    blocks: list[BlockActivations]
    lnf: Tensor  # (N, C)
    lnf_mean: Tensor  # (N)
    lnf_rstd: Tensor  # (N)
    logits: Tensor  # (chunk, Vp)
    losses: Tensor  # (N)
    dlnf: Tensor  # (N, C)
    dresidual: Tensor  # (N, C) gradient of the residual stream, from the head down to the embedding
    dln: Tensor  # (N, C) gradient of a layer norm's output
    datty: Tensor  # (N, C)
    dqkv: Tensor  # (N, 3C)
    dhidden: Tensor  # (N, F) gradient of the hidden layer, after and then before GELU


def head_chunk_tokens(requested: int, tokens: int, padded_vocab_size: int, itemsize: int) -> int:
    """Tokens per chunk of the loss head: as requested, or the largest power of two that fits `HEAD_CHUNK_BYTES`, at least
    128. With GPT-2's vocabulary in bf16 it is 4096, where all three products run at their best rate."""
    if requested:
        return min(requested, tokens)
    fitting = HEAD_CHUNK_BYTES // (padded_vocab_size * itemsize)
    return min(tokens, max(128, 1 << (fitting.bit_length() - 1)))


def activation_buffers(
    shape: ModelShape,
    batch: int,
    length: int,
    dtype: torch.dtype,
    *,
    recompute: int = 0,
    chunk: int,
    scratch_bytes: int = 0,
    attention_scratch_bytes: int = 0,
    training: bool = True,
) -> list[Buffer]:
    """The rows as buffers for the arena: `batch` samples of `length` tokens, weights and activations of `dtype`.

    What the operations need for themselves, `scratch_bytes` and `attention_scratch_bytes`, is the backend's to say.
    Without `training` nothing outlives its forward use, and the gradients have no rows.
    """
    N, C, F, H, L = batch * length, shape.channels, shape.feed_forward, shape.num_heads, shape.num_layers
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    head = 2 * L + 1
    end = 4 * L + 2

    def attention(layer: int) -> int:
        return 1 + 2 * layer

    def feed_forward(layer: int) -> int:
        return 2 + 2 * layer

    def mirrored(tick: int) -> int:
        """The backward tick of a forward tick; without a backward, what was kept for it ends at the forward tick."""
        return 2 * head - tick if training else tick

    def at(tick: int) -> Interval:
        return (tick, tick)

    buffers: list[Buffer] = []

    def row(name: str, dims: tuple[int, ...], kind: torch.dtype, *lifetimes: Interval) -> None:
        buffers.append(Buffer(name, dims, kind, KIND, lifetimes or ALWAYS))

    row("tokens", (batch, length), torch.int64)
    row("targets", (batch, length), torch.int64)
    row("sorted_positions", (N,), torch.int32)
    row("losses", (N,), stats)
    row("scratch", (scratch_bytes,), torch.uint8)
    row("embedded", (N, C), dtype, (0, mirrored(attention(0))))
    for layer in range(L):
        a, f = attention(layer), feed_forward(layer)
        stream_end = mirrored(attention(layer + 1)) if layer + 1 < L else head
        until_a, until_f = (a, mirrored(a)), (f, mirrored(f))
        # name: (shape, dtype, lifetime when kept, recomputed from this level on)
        rows: dict[str, tuple[tuple[int, ...], torch.dtype, Interval, int]] = {
            "ln1": ((N, C), dtype, until_a, 2),
            "ln1_mean": ((N,), stats, until_a, NEVER),
            "ln1_rstd": ((N,), stats, until_a, NEVER),
            "qkv": ((N, 3 * C), dtype, until_a, NEVER),
            "atty": ((N, C), dtype, until_a, NEVER),
            "lse": ((batch, H, length), stats, until_a, NEVER),
            "residual_mid": ((N, C), dtype, (a, mirrored(f)), NEVER),
            "ln2": ((N, C), dtype, until_f, 2),
            "ln2_mean": ((N,), stats, until_f, NEVER),
            "ln2_rstd": ((N,), stats, until_f, NEVER),
            "fc": ((N, F), dtype, until_f, 1),
            "gelu": ((N, F), dtype, until_f, 1),
            "residual_out": ((N, C), dtype, (f, stream_end), NEVER),
        }
        assert list(rows) == [f.name for f in fields(BlockActivations)]
        for name, (dims, kind, kept, recomputed_from) in rows.items():
            lifetimes = (at(kept[0]), at(kept[1])) if recompute >= recomputed_from else (kept,)
            row(f"blocks.{layer}.{name}", dims, kind, *lifetimes)

    row("lnf", (N, C), dtype, at(head))
    row("lnf_mean", (N,), stats, at(head))
    row("lnf_rstd", (N,), stats, at(head))
    row("logits", (chunk, shape.padded_vocab_size), dtype, at(head))

    M = N if training else 0
    attention_backwards = [at(mirrored(attention(layer))) for layer in range(L)]
    feed_forward_backwards = [at(mirrored(feed_forward(layer))) for layer in range(L)]
    row("dlnf", (M, C), dtype, at(head))
    row("dresidual", (M, C), dtype, (head, end))
    row("dln", (M, C), dtype, *attention_backwards, *feed_forward_backwards)
    row("datty", (M, C), dtype, *attention_backwards)
    row("dqkv", (M, 3 * C), dtype, *attention_backwards)
    row("dhidden", (M, F), dtype, *feed_forward_backwards)
    row("attention_scratch", (attention_scratch_bytes if training else 0,), torch.uint8, *attention_backwards)
    return buffers


def model_buffers(
    config: RunConfig, shape: ModelShape, batch: int, dtype: torch.dtype, ops: ModuleType, *, training: bool = True
) -> list[Buffer]:
    """The activations of `batch` samples as `config` wants them, with what the operations of `ops` need for themselves."""
    length = shape.sequence_length
    sizes = {"batch": batch, "length": length, "channels": shape.channels}
    return activation_buffers(
        shape,
        batch,
        length,
        dtype,
        recompute=config.recompute,
        chunk=head_chunk_tokens(config.head_chunk_tokens, batch * length, shape.padded_vocab_size, dtype.itemsize),
        scratch_bytes=ops.scratch_bytes(**sizes),
        attention_scratch_bytes=ops.attention_scratch_bytes(num_heads=shape.num_heads, dtype=dtype, **sizes),
        training=training,
    )


def activations(views: dict[str, Tensor]) -> Activations:
    """The arena's views under the table's names."""
    layers = sum(name.endswith(".qkv") for name in views)
    names = [f.name for f in fields(BlockActivations)]
    blocks = [BlockActivations(**{n: views[f"blocks.{layer}.{n}"] for n in names}) for layer in range(layers)]
    return Activations(blocks=blocks, **{f.name: views[f.name] for f in fields(Activations) if f.name != "blocks"})
