"""Gemma 3 (docs/gemma.md): its tensors as rows, forward, backward, generation.

The residual stream starts as x = s wte[token] with s = sqrt(C), rounded to the weights' dtype. With N(x) = (1 + w) RMS(x),
each norm with its own w, a block is

    a = x + N(Attention(q, k, v) Wproj^T),    [q k v] = N(x) Wqkv^T,  q = R(N(q)) and k = R(N(k)) in each head
    y = a + N((gelu(g) u) Wdown^T),           [g u] = N(a) Wgate_up^T

and the logits are z = N(y) wte^T. Most layers see a window of tokens and rotate queries and keys faster than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import activation, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ZEROS, ParameterRow, parameter, parameter_rows, repeated, shared
from handgrad.models.decoding import Sequences, decode_rows, prefill_block, prompts_attend, step_attends, store_prompts
from handgrad.models.llama import ATTENTION, FEED_FORWARD, NEXT_BLOCK, NORMAL, RESIDUAL
from handgrad.models.passes import Launch, Stage, head_backward
from handgrad.models.windows import WindowedPass
from handgrad.networks import ModelShape
from handgrad.networks.gemma3 import family_of, rotation

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, s, norm = act.embedded, act.scratch, norm_options(shape)
    stages = [Stage("embedding", partial(embedding_forward, ops, w, act, shape))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        inside = attention(ops, weights, block, act, shape, layer)
        run = partial(block_forward, ops, weights, block, block.residual_out, x, inside, s, norm)
        stages.append(Stage(f"blocks.{layer}", run))
        x = block.residual_out
    return [*stages, Stage("lnf", partial(ops.rmsnorm_forward, act.lnf, act.lnf_rstd, x, w.lnf_gain, **norm))]


def block_forward(
    ops: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    out: Tensor,
    x: Tensor,
    inside: tuple[Launch, Launch],
    s: Tensor,
    norm: dict[str, float],
) -> None:
    """x (N, C) -> out (N, C), which may be x. `inside`: act.heads -> act.qkv, act.qkv -> act.atty."""
    ops.rmsnorm_linear_forward(act.heads, act.norm1, act.norm1_rstd, x, w.norm1_gain, w.qkv_weight, None, **norm, scratch=s)
    for launch in inside:  # q, k = R(N(q)), R(N(k)); y = softmax(q k^T / sqrt(D)) v
        launch()
    ops.linear_forward(act.proj, act.atty, w.proj_weight, None, scratch=s)
    ops.rmsnorm_forward(act.residual_mid, act.proj_rstd, act.proj, w.after1_gain, **norm)
    ops.residual_forward(act.residual_mid, x, act.residual_mid)  # a = x + N(y W^T)
    norm2 = act.norm2, act.norm2_rstd, act.residual_mid, w.norm2_gain
    ops.rmsnorm_linear_forward(act.hidden, *norm2, w.gate_up_weight, None, **norm, scratch=s)  # [g u] = N(a) W^T
    ops.geglu_forward(act.geglu, act.hidden)  # h = gelu(g) u
    ops.linear_forward(act.down, act.geglu, w.down_weight, None, scratch=s)
    ops.rmsnorm_forward(out, act.down_rstd, act.down, w.after2_gain, **norm)
    ops.residual_forward(out, act.residual_mid, out)  # a + N(h W^T)


def attention(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, whole: Activations, shape: ModelShape, layer: int
) -> tuple[Launch, Launch]:
    """The tokens of a row attend to each other."""
    options: dict[str, Any] = {"scratch": whole.scratch} | whole.masks(shape.windows[layer])
    rotated = norm_and_rotate(ops, w, act, shape, layer, length=act.lse.shape[2])
    return rotated, partial(ops.attention_forward, act.atty, act.lse, act.qkv, **options)


def norm_and_rotate(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, shape: ModelShape, layer: int, **where: Any
) -> Launch:
    """Norms and rotates queries and keys. `where`: `length` of the samples, or `positions` of one token per sequence."""
    tensors = act.qkv, act.heads_rstd, act.heads, w.q_gain, w.k_gain
    options = rotation(family_of(shape), layer) | norm_options(shape) | where
    return partial(ops.gained_qk_norm_rotary_forward, *tensors, **options)


def norm_options(shape: ModelShape) -> dict[str, float]:
    """The options of every norm's forward."""
    return {"epsilon": family_of(shape).norm_epsilon, "plus": 1}


def embedding_forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> None:
    embed(ops.token_embedding_forward, act.embedded, act.tokens, w.wte)
    act.begin_windows(shape.window)


def embed(lookup: Callable[..., None], x: Tensor, tokens: Tensor, wte: Tensor) -> None:
    """x = s wte[token]"""
    lookup(x, tokens, wte)
    x.mul_(embedding_scale(x))


def embedding_scale(x: Tensor) -> float:
    """s = sqrt(C) of x (N, C), as transformers rounds it: to float32, then to the dtype."""
    return torch.tensor(x.shape[1] ** 0.5, dtype=torch.float32).to(x.dtype).item()


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
    last_norm = partial(ops.rmsnorm_backward, *norm, plus=1, scratch=act.scratch)
    stages = [Stage("lnf", partial(head_backward, ops, w, g, act, d, scale, shape, last_norm), done=True)]
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d, stream[layer], act, shape, layer, recompute
        stages.append(Stage(f"blocks.{layer}", partial(block_backward, ops, *block), done=True))
    return [*stages, Stage("embedding", partial(embedding_backward, ops, g, act, d), done=True)]


def embedding_backward(ops: ModuleType, g: Weights, act: Activations, d: Gradients) -> None:
    d.dresidual.mul_(embedding_scale(d.dresidual))
    ops.token_embedding_backward(g.wte, d.dresidual, act.tokens, act.sorted_positions, scratch=act.scratch)


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
    norm, dx, s = norm_options(shape), d.dresidual, whole.scratch
    inside, through_norm = attention(ops, w, act, whole, shape, layer), partial(ops.rmsnorm_backward, plus=1, scratch=s)
    if recompute == WHOLE_BLOCKS:
        block_forward(ops, w, act, d.dbranch, x, inside, s, norm)  # nothing reads its output
    elif recompute:
        if recompute == 2:
            ops.rmsnorm_forward(act.norm2, act.norm2_rstd, act.residual_mid, w.norm2_gain, **norm)
        ops.linear_forward(act.hidden, act.norm2, w.gate_up_weight, None, scratch=s)
        ops.geglu_forward(act.geglu, act.hidden)
    d.dbranch.zero_()
    through_norm(d.dbranch, g.after2_gain, dx, act.down, act.down_rstd, w.after2_gain)
    ops.linear_backward(d.dgeglu, g.down_weight, None, d.dbranch, act.geglu, w.down_weight, scratch=s)
    ops.geglu_backward(d.dhidden, d.dgeglu, act.hidden)
    ops.linear_backward(d.dnorm, g.gate_up_weight, None, d.dhidden, act.norm2, w.gate_up_weight, scratch=s)
    through_norm(dx, g.norm2_gain, d.dnorm, act.residual_mid, act.norm2_rstd, w.norm2_gain)
    d.dbranch.zero_()
    through_norm(d.dbranch, g.after1_gain, dx, act.proj, act.proj_rstd, w.after1_gain)
    if recompute == 2:
        ops.rmsnorm_forward(act.norm1, act.norm1_rstd, x, w.norm1_gain, **norm)
        inside[0]()
    ops.linear_backward(d.datty, g.proj_weight, None, d.dbranch, act.atty, w.proj_weight, scratch=s)
    options: dict[str, Any] = {"scratch": d.attention_scratch} | whole.masks(shape.windows[layer])
    ops.attention_backward(d.dqkv, d.datty, act.atty, act.lse, act.qkv, **options)
    heads, turn = (g.q_gain, g.k_gain, act.heads, act.heads_rstd, w.q_gain, w.k_gain), rotation(family_of(shape), layer)
    ops.gained_qk_norm_rotary_backward(d.dqkv, *heads, **turn, length=act.lse.shape[2], plus=1, scratch=s)
    ops.linear_backward(d.dnorm, g.qkv_weight, None, d.dqkv, act.norm1, w.qkv_weight, scratch=s)
    through_norm(dx, g.norm1_gain, d.dnorm, x, act.norm1_rstd, w.norm1_gain)


# Tables. Matrices come before vectors, so that the optimizer decays one contiguous range. A gain is stored as w.


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("QKV C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C HD", RESIDUAL, "matrix")
    gate_up_weight: Tensor = parameter("2F C", NORMAL, "matrix")  # rows of the gates g, then of u
    down_weight: Tensor = parameter("C F", RESIDUAL, "matrix")
    norm1_gain: Tensor = parameter("C", ZEROS, "vector")
    after1_gain: Tensor = parameter("C", ZEROS, "vector")  # of attention's output
    norm2_gain: Tensor = parameter("C", ZEROS, "vector")
    after2_gain: Tensor = parameter("C", ZEROS, "vector")  # of the feed-forward half's output
    q_gain: Tensor = parameter("D", ZEROS, "vector")
    k_gain: Tensor = parameter("D", ZEROS, "vector")


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    head: Tensor = shared(of="wte")  # the loss head reads the same tensor, unscaled
    blocks: list[BlockWeights] = repeated(BlockWeights)
    lnf_gain: Tensor = parameter("C", ZEROS, "vector", bucket="lnf")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    return parameter_rows(Weights, shape)


# Activations. The backward reads kept inputs or, from a recompute level on, reruns the same operation for the same bits.


@dataclass
class BlockActivations:
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    heads: Tensor = activation("N QKV", lives=kept(ATTENTION))  # before the norm of queries and keys
    heads_rstd: Tensor = activation("N H+K", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N QKV", lives=kept(ATTENTION), recomputed_from=2)  # queries and keys rotated
    atty: Tensor = activation("N HD", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    proj: Tensor = activation("N C", lives=kept(ATTENTION))  # before the norm behind attention
    proj_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N 2F", lives=kept(FEED_FORWARD), recomputed_from=1)  # gates g, then u
    geglu: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)
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
    """Gradients of activations. Each norm before a half adds its path to the residual stream's gradient, in place."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dbranch: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a half's output before its norm
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of the output of a norm before a half
    datty: Tensor = activation("N HD", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N 2F", lives=backward_of(FEED_FORWARD))
    dgeglu: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))


activations = partial(rows_of_pass, (Activations, Gradients))


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[BlockActivations] = repeated(BlockActivations)  # of the prefill, of the step


decoding = partial(decode_rows, BlockActivations)  # the rows of `Decoding`


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """As `models.gpt2.decode_step`."""
    s, act, x, norm = b.scratch, b.blocks[1], b.blocks[1].residual_out, norm_options(shape)
    embed(ops.token_embedding_decode, x, b.tokens, w.wte)
    for layer, weights in enumerate(w.blocks):
        rotated = norm_and_rotate(ops, weights, act, shape, layer, positions=b.positions)
        inside = rotated, step_attends(ops, act, b, layer, shape.windows[layer])
        block_forward(ops, weights, act, x, x, inside, s, norm)
    last = act.norm1, act.norm1_rstd, x, w.lnf_gain
    ops.rmsnorm_linear_forward(b.logits, *last, w.head, None, **norm, scratch=s)


def prefill(
    ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int, *, append: bool = False
) -> None:
    """As `models.gpt2.prefill`."""
    N, s, norm = batch * length, b.scratch, norm_options(shape)
    act = prefill_block(b.blocks[0], batch, length)
    x, tokens = act.residual_out, b.prompt_tokens[:N].view(batch, length)
    at_places = ops.decode if append else ops
    where: dict[str, Any] = {"positions": b.prompt_positions[:N]} if append else {"length": length}
    embed(ops.token_embedding_forward, x, tokens, w.wte)
    for layer, weights in enumerate(w.blocks):
        rotated = norm_and_rotate(at_places, weights, act, shape, layer, **where)
        if layer + 1 < len(w.blocks):
            attend = prompts_attend(ops, act, b, layer, batch, append=append, window=shape.windows[layer])
            block_forward(ops, weights, act, x, x, (rotated, attend), s, norm)
        else:  # of the last block, prefill needs only keys and values
            first = act.norm1, act.norm1_rstd, x, weights.norm1_gain
            ops.rmsnorm_linear_forward(act.heads, *first, weights.qkv_weight, None, **norm, scratch=s)
            rotated()
            store_prompts(ops, act, b, layer, batch, append=append)
