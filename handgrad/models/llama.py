"""The Llama family (docs/llama.md): its tensors as rows, forward, backward, generation.

The residual stream starts as x = wte[token]. A block is two halves, each `x + f(RMS(x))`; the norms have gains:

    a = x + Attention(q, k, v) Wproj^T,    [q k v] = RMS(x) Wqkv^T + b,  q and k of each head rotated
    y = a + (silu(g) u) Wdown^T,           [g u] = RMS(a) Wgate_up^T

and the logits are z = RMS(y) Whead^T. Keys and values may have fewer heads than queries. Qwen2 has the bias b; Qwen3
normalises each head of q and k before the rotation; some layers of SmolLM3 do not rotate. The head may share the embedding.
A model allocates only its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, activation, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ONES, ZEROS, Init, ParameterRow, parameter, parameter_rows, repeated, shared
from handgrad.models.decoding import Sequences, decode_rows, prefill_block, prompt_attention, step_attention, store_prompts
from handgrad.models.passes import Attention, Launch, Stage, head_backward
from handgrad.models.windows import WindowedPass
from handgrad.networks import ModelShape
from handgrad.networks.network import NEVER

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, s, epsilon = act.embedded, act.scratch, shape.family.norm_epsilon
    begin = Stage("embedding", partial(act.begin_windows, shape.window))
    stages = [begin, Stage("embedding", partial(ops.token_embedding_forward, x, act.tokens, w.wte))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        masks = act.masks(shape.windows[layer])
        rotated = norm_and_rotate(ops, weights, block, shape, layer, length=block.lse.shape[2])
        stages.append(Stage(f"blocks.{layer}", partial(block_forward, ops, weights, block, x, rotated, s, epsilon, masks)))
        x = block.residual_out
    last_norm = partial(ops.rmsnorm_forward, act.lnf, act.lnf_rstd, x, w.lnf_gain, epsilon=epsilon)
    return [*stages, Stage("head", last_norm)]


def block_forward(
    ops: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    x: Tensor,
    before_attention: Launch,
    s: Tensor,
    epsilon: float,
    masks: dict[str, Any],
    *,
    attend: Attention | None = None,
    rerun: bool = False,
) -> None:
    """x (N, C) -> act.residual_out (N, C). `before_attention` changes act.qkv. `attend`: generation's attention, which also
    reads the cache; by default the tokens of a row attend to each other. `rerun`: recompute for the backward, which does
    not read the last GEMM's output."""
    queries_keys_values(ops, w, act, x, s, epsilon)
    before_attention()  # q, k = R(q), R(k)
    if attend is None:
        ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s, **masks)  # y = softmax(q k^T / sqrt(D)) v
        ops.linear_residual_forward(act.residual_mid, x, act.atty, w.proj_weight, None, scratch=s)  # a = x + y W^T
    else:
        attend(act.residual_mid, x, w.proj_weight, None)
    outs, norm = (act.swiglu, act.hidden), (act.norm2, act.norm2_rstd, act.residual_mid, w.norm2_gain)
    # [g u] = RMS(a) W^T, h = silu(g) u
    ops.rmsnorm_linear_swiglu_forward(*outs, *norm, w.gate_up_weight, epsilon=epsilon, scratch=s)
    if not rerun:
        down = act.residual_mid, act.swiglu, w.down_weight, None
        ops.linear_residual_forward(act.residual_out, *down, scratch=s)  # a + h W^T


def queries_keys_values(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, x: Tensor, s: Tensor, epsilon: float
) -> None:
    """[q k v] = RMS(x) W^T + b, written to the buffer that `norm_and_rotate` reads."""
    out = act.qkv if act.heads is None else act.heads
    norm = act.norm1, act.norm1_rstd, x, w.norm1_gain
    ops.rmsnorm_linear_forward(out, *norm, w.qkv_weight, w.qkv_bias, epsilon=epsilon, scratch=s)


def rotation(shape: ModelShape, layer: int) -> dict[str, Any]:
    """The arguments of a layer's rotation that do not depend on the position."""
    frequencies, scale = shape.family.rotation_of(layer)
    return {"frequencies": frequencies, "scale": scale}


def norm_and_rotate(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, shape: ModelShape, layer: int, **where: Any
) -> Launch:
    """Norms, if the model does, and rotates queries and keys. `where`: as in `models.gemma3`."""
    options = rotation(shape, layer) | where
    if act.heads is None:
        return partial(ops.rotary_forward, act.qkv, num_heads=shape.num_heads, **options)
    norm = act.qkv, act.heads_rstd, act.heads, w.q_gain, w.k_gain
    return partial(ops.gained_qk_norm_rotary_forward, *norm, epsilon=shape.family.norm_epsilon, **options)


# Backward: the forward mirrored, last line first. A stage is the section that completes one bucket's gradients.


def backward(
    ops: ModuleType,
    w: Weights,
    g: Weights,
    act: Activations,
    d: Gradients,
    scale: Tensor,
    shape: ModelShape,
    *,
    recompute: int,
) -> list[Stage]:
    """Runs after `forward`. Computes act.losses (N), and adds scale (1) * the gradient of their sum to `g`."""
    stream = [act.embedded, *(block.residual_out for block in act.blocks)]  # into each block, and out of the last
    below = [d.dresidual, *(block.dresidual_out for block in d.blocks)]  # the gradient of `stream`
    norm = below[-1], g.lnf_gain, d.dlnf, stream[-1], act.lnf_rstd, w.lnf_gain
    last_norm = partial(ops.rmsnorm_backward, *norm, scratch=act.scratch)
    head = partial(head_backward, ops, w, g, act, d, scale, shape, last_norm)
    stages = [Stage("head", head, done=True)]
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d.blocks[layer]
        run = partial(block_backward, ops, *block, d, stream[layer], below[layer], act, shape, layer, recompute)
        stages.append(Stage(f"blocks.{layer}", run, done=True))
    embedding = partial(
        ops.token_embedding_backward, g.wte, d.dresidual, act.tokens, act.sorted_positions, scratch=act.scratch
    )
    return [*stages, Stage("embedding", embedding, done=True)]


def block_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    d: BlockGradients,
    shared: Gradients,
    x: Tensor,
    dx: Tensor,
    whole: Activations,
    shape: ModelShape,
    layer: int,
    recompute: int,
) -> None:
    """d.dresidual_out -> dx in place, in one buffer; adds the weights' gradients to `g`."""
    s, epsilon, length, masks = (
        whole.scratch,
        shape.family.norm_epsilon,
        act.lse.shape[2],
        whole.masks(shape.windows[layer]),
    )
    if recompute == WHOLE_BLOCKS:
        rotated = norm_and_rotate(ops, w, act, shape, layer, length=length)
        block_forward(ops, w, act, x, rotated, s, epsilon, masks, rerun=True)
    elif recompute:
        if recompute == 2:
            ops.rmsnorm_forward(act.norm2, act.norm2_rstd, act.residual_mid, w.norm2_gain, epsilon=epsilon)
        ops.linear_swiglu_forward(act.swiglu, act.hidden, act.norm2, w.gate_up_weight, scratch=s)
    down = d.dswiglu, g.down_weight, d.dresidual_out, act.swiglu, act.hidden, w.down_weight
    ops.swiglu_linear_backward(d.dhidden, *down, scratch=s)
    ops.linear_backward(shared.dnorm, g.gate_up_weight, None, d.dhidden, act.norm2, w.gate_up_weight, scratch=s)
    norm2 = g.norm2_gain, shared.dnorm, act.residual_mid, act.norm2_rstd, w.norm2_gain
    ops.rmsnorm_backward(d.dresidual_mid, *norm2, scratch=s)
    if recompute == 2:
        ops.rmsnorm_forward(act.norm1, act.norm1_rstd, x, w.norm1_gain, epsilon=epsilon)
        if act.heads is not None:
            norm_and_rotate(ops, w, act, shape, layer, length=length)()
    ops.linear_backward(shared.datty, g.proj_weight, None, d.dresidual_mid, act.atty, w.proj_weight, scratch=s)
    attention = d.dqkv, shared.datty, act.atty, act.lse, act.qkv
    ops.attention_backward(*attention, scratch=shared.attention_scratch, **masks)
    norm_and_rotate_backward(ops, w, g, act, d.dqkv, s, shape, layer)
    ops.linear_backward(shared.dnorm, g.qkv_weight, g.qkv_bias, d.dqkv, act.norm1, w.qkv_weight, scratch=s)
    ops.rmsnorm_backward(dx, g.norm1_gain, shared.dnorm, x, act.norm1_rstd, w.norm1_gain, scratch=s)


def norm_and_rotate_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    dqkv: Tensor,
    s: Tensor,
    shape: ModelShape,
    layer: int,
) -> None:
    """The backward of `norm_and_rotate`, in place in `dqkv`."""
    options = rotation(shape, layer) | {"length": act.lse.shape[2]}
    if act.heads is None:
        ops.rotary_backward(dqkv, num_heads=shape.num_heads, **options)
    else:
        norm = g.q_gain, g.k_gain, act.heads, act.heads_rstd, w.q_gain, w.k_gain
        ops.gained_qk_norm_rotary_backward(dqkv, *norm, scratch=s, **options)


# Tables.

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)  # the stages of a block, and the next block's first

NORMAL = Init("normal", 0.02)
RESIDUAL = Init("normal", 0.02, residual=True)


def has(shape: ModelShape, name: str) -> bool:
    """True if the model has the tensor of this name."""
    family, last = shape.family, name.rpartition(".")[2]
    if last == "window_starts":
        return shape.window > 0
    if last in ("q_gain", "k_gain", "heads", "heads_rstd"):
        return family.qk_norm
    if last == "qkv_bias":
        return family.qkv_bias
    return last != "head" or not family.tied


# Parameters. Matrices come before vectors, so that the optimizer decays one contiguous range.


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("QKV C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C HD", RESIDUAL, "matrix")
    # Rows of the gates g, then of u.
    gate_up_weight: Tensor = parameter("2F C", NORMAL, "matrix")
    down_weight: Tensor = parameter("C F", RESIDUAL, "matrix")
    qkv_bias: Tensor = parameter("QKV", ZEROS, "vector", optional=True)
    norm1_gain: Tensor = parameter("C", ONES, "vector")
    norm2_gain: Tensor = parameter("C", ONES, "vector")
    q_gain: Tensor = parameter("D", ONES, "vector", optional=True)
    k_gain: Tensor = parameter("D", ONES, "vector", optional=True)


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="head", stored_rows="V", fallback="wte")
    lnf_gain: Tensor = parameter("C", ONES, "vector", bucket="head")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    for row in parameter_rows(Weights, shape):
        if has(shape, row.name):
            yield row


# Activations. The backward reads kept inputs or, from a recompute level on, reruns the same operation for the same bits.


@dataclass
class BlockActivations:
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    heads: Tensor = activation("N QKV", lives=kept(ATTENTION), optional=True)  # before the norm of queries and keys
    heads_rstd: Tensor = activation("N H+K", "statistics", lives=kept(ATTENTION), optional=True)
    qkv: Tensor = activation(
        "N QKV", lives=kept(ATTENTION), recomputed_from=2
    )  # queries and keys rotated; see `activations`
    atty: Tensor = activation("N HD", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N 2F", lives=kept(FEED_FORWARD), recomputed_from=1)  # gates g, then u
    swiglu: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(WindowedPass):
    embedded: Tensor = activation("N C", lives=from_embedding(ATTENTION))
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)


@dataclass
class BlockGradients:
    """The gradients that each block writes in turn to the same memory."""

    dqkv: Tensor = shared()
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()
    dswiglu: Tensor = shared()
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. The backward updates the residual stream's gradient in place: the identity path passes it
    through, and each norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a norm's output
    datty: Tensor = activation("N HD", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N 2F", lives=backward_of(FEED_FORWARD))
    dswiglu: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    # The stream's gradient is complete one tick before the GEMM that reads it.
    dresidual_mid: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, last=1), of="dresidual")
    dresidual_out: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, first=1), of="dresidual")
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass, as in `rows_of_pass`. Without a norm, the rotation works in place, so qkv is kept."""
    for row in rows_of_pass((Activations, Gradients), shape, batch, length, dtype, ops, chunk=chunk, training=training):
        if has(shape, row.name):
            is_kept = row.name.endswith(".qkv") and not shape.family.qk_norm
            yield replace(row, recomputed_from=NEVER) if is_kept else row


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[BlockActivations] = repeated(BlockActivations)  # of the prefill, of the step


def decoding(
    shape: ModelShape, batch: int, prompt_tokens: int, dtype: torch.dtype, ops: ModuleType
) -> Iterator[ActivationRow]:
    """The rows of `Decoding` for `batch` sequences and at most `prompt_tokens` tokens per prefill."""
    rows = decode_rows(BlockActivations, shape, batch, prompt_tokens, dtype, ops)
    return (row for row in rows if has(shape, row.name))


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """As `models.gpt2.decode_step`."""
    s, act, x = b.scratch, b.blocks[1], b.blocks[1].residual_out
    epsilon = shape.family.norm_epsilon
    ops.token_embedding_decode(x, b.tokens, w.wte)
    for layer, weights in enumerate(w.blocks):
        rotated = norm_and_rotate(ops, weights, act, shape, layer, positions=b.positions)
        attention = step_attention(ops, act, b, layer, shape.windows[layer])
        block_forward(ops, weights, act, x, rotated, s, epsilon, {}, attend=attention)
    norm = act.norm1, act.norm1_rstd, x, w.lnf_gain
    ops.rmsnorm_linear_forward(b.logits, *norm, w.head, None, epsilon=epsilon, scratch=s)


def prefill(
    ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int, *, append: bool = False
) -> None:
    """As `models.gpt2.prefill`."""
    N, s, epsilon = batch * length, b.scratch, shape.family.norm_epsilon
    act = prefill_block(b.blocks[0], batch, length)
    x, tokens = act.residual_out, b.prompt_tokens[:N].view(batch, length)
    at_places = ops.decode if append else ops
    where: dict[str, Any] = {"positions": b.prompt_positions[:N]} if append else {"length": length}
    ops.token_embedding_forward(x, tokens, w.wte)
    for layer, weights in enumerate(w.blocks[:-1]):
        rotated = norm_and_rotate(at_places, weights, act, shape, layer, **where)
        attention = prompt_attention(ops, act, b, layer, batch, append=append, window=shape.windows[layer])
        block_forward(ops, weights, act, x, rotated, s, epsilon, {}, attend=attention)
    last = w.blocks[-1]  # prefill needs only its keys and values
    queries_keys_values(ops, last, act, x, s, epsilon)
    norm_and_rotate(at_places, last, act, shape, len(w.blocks) - 1, **where)()
    store_prompts(ops, act, b, len(w.blocks) - 1, batch, append=append)
