"""A network that handgrad lacks, after Gemma 2 (https://arxiv.org/abs/2408.00118), as `handgrad.models` would have it:

    a = x + RMS(Attention(q, k, v) Wproj^T),    [q k v] = RMS(x) Wqkv^T,  q and k of each head rotated
    y = a + RMS((gelu(g) u) Wdown^T),           [g u] = RMS(a) Wgate_up^T

with a gain in every norm, and the embedding as the head. It does not generate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, PassTensors, activation, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ONES, Init, ParameterRow, parameter, parameter_rows, repeated, shared
from handgrad.models.passes import Stage, head_backward
from handgrad.settings.config import ModelShape
from tests import gemma_operations

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)
NORMAL, RESIDUAL = Init("normal", 0.02), Init("normal", 0.02, residual=True)
EPSILON, ROTARY_BASE = 1e-6, 10000.0


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("QKV C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C HD", RESIDUAL, "matrix")
    gate_up_weight: Tensor = parameter("2F C", NORMAL, "matrix")
    down_weight: Tensor = parameter("C F", RESIDUAL, "matrix")
    norm1_gain: Tensor = parameter("C", ONES, "vector")
    after1_gain: Tensor = parameter("C", ONES, "vector")
    norm2_gain: Tensor = parameter("C", ONES, "vector")
    after2_gain: Tensor = parameter("C", ONES, "vector")


@dataclass
class Weights:
    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    head: Tensor = shared(of="wte")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    lnf_gain: Tensor = parameter("C", ONES, "vector", bucket="lnf")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    return parameter_rows(Weights, shape)


@dataclass
class BlockActivations:
    norm1: Tensor = activation("N C", lives=kept(ATTENTION))
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N QKV", lives=kept(ATTENTION))
    atty: Tensor = activation("N HD", lives=kept(ATTENTION))
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))
    proj: Tensor = activation("N C", lives=kept(ATTENTION))
    proj_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD))
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N 2F", lives=kept(FEED_FORWARD))
    geglu: Tensor = activation("N F", lives=kept(FEED_FORWARD))
    down: Tensor = activation("N C", lives=kept(FEED_FORWARD))
    down_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(PassTensors):
    embedded: Tensor = activation("N C", lives=from_embedding(ATTENTION))
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)


@dataclass
class Gradients:
    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dbranch: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # before the norm behind a half
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))
    datty: Tensor = activation("N HD", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N 2F", lives=backward_of(FEED_FORWARD))
    dgeglu: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))


activations = partial(rows_of_pass, (Activations, Gradients))


def rotation(shape: ModelShape, length: int) -> dict[str, Any]:
    D = shape.head_width
    frequencies = tuple(ROTARY_BASE ** (-2 * pair / D) for pair in range(D // 2))
    return {"num_heads": shape.num_heads, "length": length, "frequencies": frequencies}


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    x = act.embedded
    stages = [Stage("embedding", partial(ops.token_embedding_forward, x, act.tokens, w.wte))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        stages.append(
            Stage(f"blocks.{layer}", partial(block_forward, ops, weights, block, x, block.residual_out, act.scratch, shape))
        )
        x = block.residual_out
    norm = act.lnf, act.lnf_rstd, x, w.lnf_gain
    return [*stages, Stage("lnf", partial(ops.rmsnorm_forward, *norm, epsilon=EPSILON))]


def block_forward(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, x: Tensor, out: Tensor, s: Tensor, shape: ModelShape
) -> None:
    """x (N, C) -> out (N, C), which a second run, in the backward, throws away."""
    norm, a = partial(ops.rmsnorm_forward, epsilon=EPSILON), act.residual_mid
    norm(act.norm1, act.norm1_rstd, x, w.norm1_gain)
    ops.linear_forward(act.qkv, act.norm1, w.qkv_weight, None, scratch=s)
    ops.rotary_forward(act.qkv, **rotation(shape, act.lse.shape[2]))
    ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)
    ops.linear_forward(act.proj, act.atty, w.proj_weight, None, scratch=s)
    norm(a, act.proj_rstd, act.proj, w.after1_gain)
    ops.residual_forward(a, x, a)
    norm(act.norm2, act.norm2_rstd, a, w.norm2_gain)
    ops.linear_forward(act.hidden, act.norm2, w.gate_up_weight, None, scratch=s)
    gemma_operations.geglu_forward(act.geglu, act.hidden)
    ops.linear_forward(act.down, act.geglu, w.down_weight, None, scratch=s)
    norm(out, act.down_rstd, act.down, w.after2_gain)
    ops.residual_forward(out, a, out)


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
    stream = [act.embedded, *(block.residual_out for block in act.blocks)]
    norm = d.dresidual, g.lnf_gain, d.dlnf, stream[-1], act.lnf_rstd, w.lnf_gain
    last_norm = partial(ops.rmsnorm_backward, *norm, scratch=act.scratch)
    stages = [Stage("lnf", partial(head_backward, ops, w, g, act, d, scale, shape, last_norm), done=True)]
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d, stream[layer], act.scratch, shape, recompute
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
    s: Tensor,
    shape: ModelShape,
    recompute: int,
) -> None:
    if recompute == WHOLE_BLOCKS:
        block_forward(ops, w, act, x, d.dbranch, s, shape)
    norm_backward = partial(ops.rmsnorm_backward, scratch=s)
    dx = d.dresidual
    d.dbranch.zero_()
    norm_backward(d.dbranch, g.after2_gain, dx, act.down, act.down_rstd, w.after2_gain)
    ops.linear_backward(d.dgeglu, g.down_weight, None, d.dbranch, act.geglu, w.down_weight, scratch=s)
    gemma_operations.geglu_backward(d.dhidden, d.dgeglu, act.hidden)
    ops.linear_backward(d.dnorm, g.gate_up_weight, None, d.dhidden, act.norm2, w.gate_up_weight, scratch=s)
    norm_backward(dx, g.norm2_gain, d.dnorm, act.residual_mid, act.norm2_rstd, w.norm2_gain)
    d.dbranch.zero_()
    norm_backward(d.dbranch, g.after1_gain, dx, act.proj, act.proj_rstd, w.after1_gain)
    ops.linear_backward(d.datty, g.proj_weight, None, d.dbranch, act.atty, w.proj_weight, scratch=s)
    ops.attention_backward(d.dqkv, d.datty, act.atty, act.lse, act.qkv, scratch=d.attention_scratch)
    ops.rotary_backward(d.dqkv, **rotation(shape, act.lse.shape[2]))
    ops.linear_backward(d.dnorm, g.qkv_weight, None, d.dqkv, act.norm1, w.qkv_weight, scratch=s)
    norm_backward(dx, g.norm1_gain, d.dnorm, x, act.norm1_rstd, w.norm1_gain)


@dataclass
class Decoding:
    """It does not generate."""


def decoding(shape: ModelShape, *sizes: Any) -> Iterator[ActivationRow]:
    return iter(())
