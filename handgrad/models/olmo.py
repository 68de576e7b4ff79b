"""OLMo 2 and OLMo 3 (docs/olmo.md): their tensors as rows, forward, backward, generation.

The residual stream starts as x = wte[token]. No norm stands before a half, one behind each. With N(x) = w RMS(x), each norm
with its own w, a block is

    a = x + N(Attention(q, k, v) Wproj^T),    [q k v] = x Wqkv^T,  q = R(N(q)) and k = R(N(k))
    y = a + N((silu(g) u) Wdown^T),           [g u] = a Wgate_up^T

and the logits are z = N(y) Whead^T. The norms of q and k are over all of their heads together; R rotates each head. In
OLMo 3 most layers see a window of tokens, and the others stretch their angles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, activation, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ONES, Init, ParameterRow, parameter, parameter_rows, repeated
from handgrad.models.decoding import Sequences, decode_rows, prefill_block, prompts_attend, step_attends, store_prompts
from handgrad.models.llama import ATTENTION, FEED_FORWARD, NEXT_BLOCK
from handgrad.models.passes import Launch, Stage, head_backward
from handgrad.models.windows import WindowedPass
from handgrad.networks import ModelShape
from handgrad.networks.olmo import family_of, rotation

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, epsilon = act.embedded, family_of(shape).norm_epsilon
    begin = Stage("embedding", partial(act.begin_windows, shape.window))
    stages = [begin, Stage("embedding", partial(ops.token_embedding_forward, x, act.tokens, w.wte))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        inside = attention(ops, weights, block, act, shape, layer)
        run = partial(block_forward, ops, weights, block, block.residual_out, x, inside, act.scratch, epsilon)
        stages.append(Stage(f"blocks.{layer}", run))
        x = block.residual_out
    last_norm = partial(ops.rmsnorm_forward, act.lnf, act.lnf_rstd, x, w.lnf_gain, epsilon=epsilon)
    return [*stages, Stage("head", last_norm)]


def block_forward(
    ops: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    out: Tensor,
    x: Tensor,
    inside: tuple[Launch, Launch],
    s: Tensor,
    epsilon: float,
) -> None:
    """x (N, C) -> out (N, C), which may be x. `inside`: act.heads -> act.qkv, act.qkv -> act.atty."""
    ops.linear_forward(act.heads, x, w.qkv_weight, None, scratch=s)
    for launch in inside:  # q, k = R(N(q)), R(N(k)); y = softmax(q k^T / sqrt(D)) v
        launch()
    ops.linear_forward(act.proj, act.atty, w.proj_weight, None, scratch=s)
    ops.rmsnorm_forward(act.residual_mid, act.proj_rstd, act.proj, w.after1_gain, epsilon=epsilon)
    ops.residual_forward(act.residual_mid, x, act.residual_mid)  # a = x + N(y W^T)
    ops.linear_swiglu_forward(act.swiglu, act.hidden, act.residual_mid, w.gate_up_weight, scratch=s)
    ops.linear_forward(act.down, act.swiglu, w.down_weight, None, scratch=s)
    ops.rmsnorm_forward(out, act.down_rstd, act.down, w.after2_gain, epsilon=epsilon)
    ops.residual_forward(out, act.residual_mid, out)  # a + N(h W^T)


def attention(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, whole: Activations, shape: ModelShape, layer: int
) -> tuple[Launch, Launch]:
    """The tokens of a row attend to each other."""
    options: dict[str, Any] = {"scratch": whole.scratch} | whole.masks(shape.windows[layer])
    rotated = partial(norm_and_rotate, ops, ops, w, act, shape, layer, length=act.lse.shape[2])
    return rotated, partial(ops.attention_forward, act.atty, act.lse, act.qkv, **options)


def norm_and_rotate(
    ops: ModuleType,
    rotating: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    shape: ModelShape,
    layer: int,
    **where: Any,
) -> None:
    """Normalises queries and keys and rotates them. `where`: the `length` of the samples, or the `positions` of one token
    per sequence, which `rotating` takes."""
    (q, k, v), (q_out, k_out, v_out) = split(act.heads, shape), split(act.qkv, shape)
    family = family_of(shape)
    ops.rmsnorm_forward(q_out, act.q_rstd, q, w.q_gain, epsilon=family.norm_epsilon)
    ops.rmsnorm_forward(k_out, act.k_rstd, k, w.k_gain, epsilon=family.norm_epsilon)
    v_out.copy_(v)
    options = rotation(family, shape.head_width, layer) | where
    rotating.rotary_forward(act.qkv, num_heads=shape.num_heads, **options)


def split(packed: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Queries (N, H D), keys and values (N, K D), each with the rows' stride."""
    keys = shape.kv_heads * shape.head_width
    return packed.split((packed.shape[1] - 2 * keys, keys, keys), 1)


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
    norm = d.dresidual, g.lnf_gain, d.dlnf, stream[-1], act.lnf_rstd, w.lnf_gain
    last_norm = partial(ops.rmsnorm_backward, *norm, scratch=act.scratch)
    stages = [Stage("head", partial(head_backward, ops, w, g, act, d, scale, shape, last_norm), done=True)]
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d, stream[layer], act, shape, layer, recompute
        stages.append(Stage(f"blocks.{layer}", partial(block_backward, ops, *block), done=True))
    words = g.wte, d.dresidual, act.tokens, act.sorted_positions
    return [*stages, Stage("embedding", partial(ops.token_embedding_backward, *words, scratch=act.scratch), done=True)]


def block_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    d: Gradients,
    x: Tensor,
    whole: Activations,
    shape: ModelShape,
    layer: int,
    recompute: int,
) -> None:
    """d.dresidual, of the block's output -> of x, in place; adds the weights' gradients to `g`."""
    dx, s, inside = d.dresidual, whole.scratch, attention(ops, w, act, whole, shape, layer)
    if recompute == WHOLE_BLOCKS:  # nothing reads its output
        block_forward(ops, w, act, d.dbranch, x, inside, s, family_of(shape).norm_epsilon)
    elif recompute:
        ops.linear_swiglu_forward(act.swiglu, act.hidden, act.residual_mid, w.gate_up_weight, scratch=s)
    d.dbranch.zero_()
    ops.rmsnorm_backward(d.dbranch, g.after2_gain, dx, act.down, act.down_rstd, w.after2_gain, scratch=s)
    down = d.dswiglu, g.down_weight, d.dbranch, act.swiglu, act.hidden, w.down_weight
    ops.swiglu_linear_backward(d.dhidden, *down, scratch=s)
    ops.linear_backward(d.dinput, g.gate_up_weight, None, d.dhidden, act.residual_mid, w.gate_up_weight, scratch=s)
    ops.residual_forward(dx, dx, d.dinput)
    d.dbranch.zero_()
    ops.rmsnorm_backward(d.dbranch, g.after1_gain, dx, act.proj, act.proj_rstd, w.after1_gain, scratch=s)
    if recompute == 2:
        inside[0]()
    ops.linear_backward(d.datty, g.proj_weight, None, d.dbranch, act.atty, w.proj_weight, scratch=s)
    options: dict[str, Any] = {"scratch": d.attention_scratch} | whole.masks(shape.windows[layer])
    ops.attention_backward(d.dqkv, d.datty, act.atty, act.lse, act.qkv, **options)
    norm_and_rotate_backward(ops, w, g, act, d, s, shape, layer)
    ops.linear_backward(d.dinput, g.qkv_weight, None, d.dheads, x, w.qkv_weight, scratch=s)
    ops.residual_forward(dx, dx, d.dinput)


def norm_and_rotate_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    d: Gradients,
    s: Tensor,
    shape: ModelShape,
    layer: int,
) -> None:
    """d.dqkv -> d.dheads, of the queries, keys and values before `norm_and_rotate`. Changes d.dqkv."""
    options = rotation(family_of(shape), shape.head_width, layer) | {"length": act.lse.shape[2]}
    ops.rotary_backward(d.dqkv, num_heads=shape.num_heads, **options)
    (q, k, _), (dq_out, dk_out, dv_out) = split(act.heads, shape), split(d.dqkv, shape)
    d.dheads.zero_()
    dq, dk, dv = split(d.dheads, shape)
    ops.rmsnorm_backward(dq, g.q_gain, dq_out, q, act.q_rstd, w.q_gain, scratch=s)
    ops.rmsnorm_backward(dk, g.k_gain, dk_out, k, act.k_rstd, w.k_gain, scratch=s)
    dv.copy_(dv_out)


# Tables. Matrices come before vectors, so that the optimizer decays one contiguous range.

NORMAL = Init("normal", 0.02)  # of all matrices: a norm behind a half undoes any scale of its last one


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("QKV C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C HD", NORMAL, "matrix")
    gate_up_weight: Tensor = parameter("2F C", NORMAL, "matrix")  # rows of the gates g, then of u
    down_weight: Tensor = parameter("C F", NORMAL, "matrix")
    after1_gain: Tensor = parameter("C", ONES, "vector")  # of attention's output
    after2_gain: Tensor = parameter("C", ONES, "vector")  # of the feed-forward half's output
    q_gain: Tensor = parameter("HD", ONES, "vector")
    k_gain: Tensor = parameter("KD", ONES, "vector")


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="head", stored_rows="V")
    lnf_gain: Tensor = parameter("C", ONES, "vector", bucket="head")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    return parameter_rows(Weights, shape)


# Activations. The backward reads kept inputs or, from a recompute level on, reruns the same operation for the same bits.


@dataclass
class BlockActivations:
    heads: Tensor = activation("N QKV", lives=kept(ATTENTION))  # before the norms of queries and keys
    q_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    k_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N QKV", lives=kept(ATTENTION), recomputed_from=2)  # queries and keys rotated
    atty: Tensor = activation("N HD", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    proj: Tensor = activation("N C", lives=kept(ATTENTION))  # before the norm behind attention
    proj_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    hidden: Tensor = activation("N 2F", lives=kept(FEED_FORWARD), recomputed_from=1)  # gates g, then u
    swiglu: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)
    down: Tensor = activation("N C", lives=kept(FEED_FORWARD))  # before the norm behind the feed-forward half
    down_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(WindowedPass):
    embedded: Tensor = activation("N C", lives=from_embedding(ATTENTION))
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)


@dataclass
class Gradients:
    """Gradients of activations. Each half adds its path to the residual stream's gradient, in place."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dbranch: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a half's output before its norm
    dinput: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a half's input
    datty: Tensor = activation("N HD", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dheads: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N 2F", lives=backward_of(FEED_FORWARD))
    dswiglu: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass, as in `rows_of_pass`."""
    rows = rows_of_pass((Activations, Gradients), shape, batch, length, dtype, ops, chunk=chunk, training=training)
    return (row for row in rows if shape.window or row.name != "window_starts")


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[BlockActivations] = repeated(BlockActivations)  # of the prefill, of the step


decoding = partial(decode_rows, BlockActivations)  # the rows of `Decoding`


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """As `models.gpt2.decode_step`."""
    s, act, x, epsilon = b.scratch, b.blocks[1], b.blocks[1].residual_out, family_of(shape).norm_epsilon
    ops.token_embedding_decode(x, b.tokens, w.wte)
    for layer, weights in enumerate(w.blocks):
        rotated = partial(norm_and_rotate, ops, ops, weights, act, shape, layer, positions=b.positions)
        inside = rotated, step_attends(ops, act, b, layer, shape.windows[layer])
        block_forward(ops, weights, act, x, x, inside, s, epsilon)
    last = act.down, act.down_rstd, x, w.lnf_gain
    ops.rmsnorm_linear_forward(b.logits, *last, w.head, None, epsilon=epsilon, scratch=s)


def prefill(
    ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int, *, append: bool = False
) -> None:
    """As `models.gpt2.prefill`."""
    N, s, epsilon = batch * length, b.scratch, family_of(shape).norm_epsilon
    act = prefill_block(b.blocks[0], batch, length)
    x, tokens = act.residual_out, b.prompt_tokens[:N].view(batch, length)
    at_places = ops.decode if append else ops
    where: dict[str, Any] = {"positions": b.prompt_positions[:N]} if append else {"length": length}
    ops.token_embedding_forward(x, tokens, w.wte)
    for layer, weights in enumerate(w.blocks):
        rotated = partial(norm_and_rotate, ops, at_places, weights, act, shape, layer, **where)
        if layer + 1 < len(w.blocks):
            attend = prompts_attend(ops, act, b, layer, batch, append=append, window=shape.windows[layer])
            block_forward(ops, weights, act, x, x, (rotated, attend), s, epsilon)
        else:  # of the last block, prefill needs only keys and values
            ops.linear_forward(act.heads, x, weights.qkv_weight, None, scratch=s)
            rotated()
            store_prompts(ops, act, b, layer, batch, append=append)
