"""The activation table: one row per tensor with its shape, its dtype and the stages it lives through.

The clock of a micro-step, in ticks: embedding 0; block l's attention half 1 + 2l and feed-forward half 2 + 2l; the loss
head 2L + 1; then the same halves backwards, and the embedding's backward last. The arena places tensors by these
lifetimes: a recomputed activation lives at its forward tick and again at its backward tick.

What products read in fp8 has up to three rows: itself in 16 bits where something else reads it, `.rows` as it is, and
`.columns` transposed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import ALWAYS, Buffer, Interval
from handgrad.config import ModelShape, RunConfig
from handgrad.dropout.model import SAMPLES, ModelDropout
from handgrad.fp8.formats import E4M3, E5M2, FORMATS, Form, Quantized
from handgrad.fp8.tables import Forms, Fp8Products, fp8_products

KIND = "activations"
NEVER = 3  # above every recompute level
HEAD_CHUNK_BYTES = 512 << 20  # the default chunk's logits take at most this much


@dataclass
class BlockActivations:
    """What one block computes; the same tensors serve its forward and its backward."""

    ln1: Form  # (N, C) normalised input of the attention half
    ln1_mean: Tensor  # (N)
    ln1_rstd: Tensor  # (N)
    qkv: Tensor  # (N, 3C)
    atty: Form  # (N, C) attention's output, heads side by side
    lse: Tensor  # (B, H, T) log of the softmax's denominators
    residual_mid: Tensor  # (N, C) the stream after the attention half
    ln2: Form  # (N, C) normalised input of the feed-forward half
    ln2_mean: Tensor  # (N)
    ln2_rstd: Tensor  # (N)
    fc: Tensor  # (N, F) before GELU
    gelu: Form  # (N, F)
    residual_out: Tensor  # (N, C) the stream after the block


@dataclass
class BlockGradients:
    """Gradients of a block's activations. All blocks share their memory, one at a time; in fp8 each has its own scale."""

    dqkv: Form  # (N, 3C)
    dresidual_mid: Form  # (N, C) of the stream after the attention half
    dhidden: Form  # (N, F) of the hidden layer, before GELU
    dresidual_out: Form  # (N, C) of the stream after the block


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
    gradients: list[BlockGradients]  # of the blocks' activations
    lnf: Form  # (N, C)
    lnf_mean: Tensor  # (N)
    lnf_rstd: Tensor  # (N)
    logits: Tensor  # (chunk, Vp)
    dlogits: Quantized | None  # (chunk, Vp) the logits' gradient in fp8, where the head's products read it so
    losses: Tensor  # (N)
    dlnf: Tensor  # (N, C)
    dresidual: Tensor  # (N, C) gradient of the residual stream, from the head down to the embedding
    dln: Tensor  # (N, C) gradient of a layer norm's output
    datty: Tensor  # (N, C)
    dbranch: Tensor  # (N, C) with dropout: gradient of a projection's output; lies where dln, which comes after it, will
    dropout: ModelDropout | None  # what is left out in training, if anything


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
    products: Fp8Products | None = None,
    gradient_format: torch.dtype = E5M2,
    dropout: bool = False,
) -> list[Buffer]:
    """The rows as buffers for the arena: `batch` samples of `length` tokens, weights and activations of `dtype`.

    What the operations need for themselves, `scratch_bytes` and `attention_scratch_bytes`, is the backend's to say.
    Without `training` nothing outlives its forward use, and the gradients have no rows. `products` run in fp8. With
    `dropout` there is a row for the samples' numbers; masks are made where they are needed.
    """
    products = products or Fp8Products()
    assert training or not products, "fp8 is for training"
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
    if dropout and training:
        row(SAMPLES, (batch,), torch.int64)
    row("losses", (N,), stats)
    row("scratch", (scratch_bytes,), torch.uint8)
    row("embedded", (N, C), dtype, (0, mirrored(attention(0))))
    for layer in range(L):
        a, f = attention(layer), feed_forward(layer)
        stream_end = mirrored(attention(layer + 1)) if layer + 1 < L else head
        until_a, until_f = (a, mirrored(a)), (f, mirrored(f))
        qkv, proj, mlp = ((layer, part) in products.blocks for part in ("qkv", "proj", "mlp"))
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
        # In fp8 `rows` serve the forward alone (the product with fc is redone from them), `columns` the weight gradient.
        # GELU's columns are made in the backward, out of `fc`.
        if qkv:
            del rows["ln1"]
            rows |= {"ln1.rows": ((N, C), E4M3, (a, a), 2), "ln1.columns": ((C, N), E4M3, until_a, 2)}
        if proj:
            rows |= {"atty.rows": ((N, C), E4M3, (a, a), NEVER), "atty.columns": ((C, N), E4M3, until_a, NEVER)}
        if mlp:
            del rows["ln2"], rows["gelu"]
            rows |= {
                "ln2.rows": ((N, C), E4M3, until_f if recompute == 1 else (f, f), 2),
                "ln2.columns": ((C, N), E4M3, until_f, 2),
                "gelu.rows": ((N, F), E4M3, (f, f), 1),
                "gelu.columns": ((F, N), E4M3, (mirrored(f), mirrored(f)), NEVER),
            }
        for name, (dims, kind, kept, recomputed_from) in rows.items():
            again = recompute >= recomputed_from
            forward_tick = f if name.startswith(("residual_mid", "ln2", "fc", "gelu", "residual_out")) else a
            lifetimes = (at(forward_tick), at(mirrored(forward_tick))) if again else (kept,)
            row(f"blocks.{layer}.{name}", dims, kind, *lifetimes)

    M = N if training else 0
    row("lnf", (N, C), dtype, at(head))
    row("lnf_mean", (N,), stats, at(head))
    row("lnf_rstd", (N,), stats, at(head))
    row("logits", (chunk, shape.padded_vocab_size), dtype, at(head))
    if products.head:
        row("lnf.rows", (N, C), E4M3, at(head))
    if "dgrad" in products.head:
        row("dlogits.rows", (chunk, shape.padded_vocab_size), E5M2, at(head))

    attention_backwards = [at(mirrored(attention(layer))) for layer in range(L)]
    feed_forward_backwards = [at(mirrored(feed_forward(layer))) for layer in range(L)]
    row("dlnf", (M, C), dtype, at(head))
    row("dresidual", (M, C), dtype, (head, end))
    row("dln", (M, C), dtype, *attention_backwards, *feed_forward_backwards)
    row("datty", (M, C), dtype, *attention_backwards)

    def gradient(name: str, width: int, part: str, lifetime: Callable[[int], Interval], also_plain: bool = False) -> None:
        """Shared by the blocks: in 16 bits while a layer reads it so, and in fp8 while a layer does that."""
        lives = {layer: lifetime(layer) for layer in range(L)}
        in_fp8 = [lives.pop(layer) for layer in range(L) if (layer, part) in products.blocks]
        if lives and not also_plain:
            row(name, (M, width), dtype, *lives.values())
        if in_fp8:
            row(f"{name}.rows", (M, width), gradient_format, *in_fp8)
            row(f"{name}.columns", (width, M), gradient_format, *in_fp8)

    gradient("dqkv", 3 * C, "qkv", lambda layer: attention_backwards[layer])
    gradient("dhidden", F, "mlp", lambda layer: feed_forward_backwards[layer])
    # Written with the stream's gradient, a tick before the product that reads them.
    tick = [mirrored(feed_forward(layer)) for layer in range(L)]
    gradient("dresidual_mid", C, "proj", lambda layer: (tick[layer], tick[layer] + 1), also_plain=True)
    gradient("dresidual_out", C, "mlp", lambda layer: (tick[layer] - 1, tick[layer]), also_plain=True)
    if dgelu := [feed_forward_backwards[layer] for layer, part in sorted(products.blocks) if part == "mlp"]:
        row("dgelu", (M, F), dtype, *dgelu)
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
        scratch_bytes=ops.scratch_bytes(tokens=batch * length, channels=shape.channels, widest=shape.feed_forward),
        attention_scratch_bytes=ops.attention_scratch_bytes(
            num_heads=shape.num_heads, dtype=dtype, dropout=bool(config.dropout), **sizes
        ),
        training=training,
        products=fp8_products(config) if training else None,
        gradient_format=FORMATS[config.fp8_gradients],
        dropout=bool(config.dropout),
    )


def activations(
    views: Mapping[str, Tensor], forms: Forms | None = None, dropout: ModelDropout | None = None
) -> Activations:
    """The arena's views under the table's names; `forms` knows what is quantised."""
    forms = forms or Forms((), views)
    layers = sum(name.endswith(".qkv") for name in views)
    names = [f.name for f in fields(BlockActivations)]
    blocks, gradients = [], []
    for layer in range(layers):
        block: dict[str, Any] = {n: forms(f"blocks.{layer}.{n}", plain=views.get(f"blocks.{layer}.{n}")) for n in names}
        stream = dict.fromkeys(("dresidual_mid", "dresidual_out"), views["dresidual"])
        shared = {n: views.get(n) for n in ("dqkv", "dhidden")} | stream
        blocks.append(BlockActivations(**block))
        each: dict[str, Any] = {}
        for n, tensor in shared.items():
            name = f"blocks.{layer}.{n}"
            # The 16-bit dqkv and dhidden are those of other layers: one that has them in fp8 has no others.
            each[n] = forms(name, stored_as=n, plain=None if n not in stream and name in forms.places else tensor)
            if n == "dhidden" and isinstance(each[n], Quantized):
                each[n] = replace(each[n], workspace=views["dgelu"])
        gradients.append(BlockGradients(**each))
    composed = {
        "blocks": blocks,
        "gradients": gradients,
        "lnf": forms("lnf", plain=views["lnf"]),
        "dlogits": forms.dlogits(),
        "dbranch": views["dln"],
        "dropout": dropout,
    }
    return Activations(**composed, **{f.name: views[f.name] for f in fields(Activations) if f.name not in composed})
