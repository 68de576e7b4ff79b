"""GPT-2 (Radford et al. 2019): its tensors as rows, forward, backward, generation.

A block is two halves, each `x + f(LN(x))`:

    a = x + Attention(LN1(x) Wqkv^T + bqkv) Wproj^T + bproj
    y = a + GELU(LN2(a) Wfc^T + bfc) Wfcproj^T + bfcproj

The loss head shares the token embedding and works on chunks of tokens. It turns a chunk's logits into losses and, in
place, into their gradient, so the full (N, Vp) logits never exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from handgrad.memory.activations import PassTensors, activation, optional_input, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ONES, ZEROS, Init, ParameterRow, parameter, parameter_rows, repeated, shared
from handgrad.models.decoding import Sequences, decode_rows, prefill_block, prompt_attention, step_attention, store_prompts
from handgrad.models.passes import Attention, Stage, head_backward
from handgrad.networks import ModelShape

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, s = act.embedded, act.scratch
    # x = wte[token] + wpe[position]
    stages = [Stage("embedding", partial(ops.embedding_forward, x, act.tokens, w.wte, w.wpe))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        stages.append(Stage(f"blocks.{layer}", partial(block_forward, ops, weights, block, x, s)))
        x = block.residual_out
    last_norm = partial(ops.layernorm_forward, act.lnf, act.lnf_mean, act.lnf_rstd, x, w.lnf_weight, w.lnf_bias)
    return [*stages, Stage("lnf", last_norm)]


def block_forward(
    ops: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    x: Tensor,
    s: Tensor,
    *,
    attend: Attention | None = None,
    rerun: bool = False,
) -> None:
    """x (N, C) -> act.residual_out (N, C). `attend`: generation's attention, which also reads the cache; by default the
    tokens of a row attend to each other. `rerun`: recompute for the backward, which never reads the last GEMM's output."""
    ln1, ln2 = (act.ln1, act.ln1_mean, act.ln1_rstd), (act.ln2, act.ln2_mean, act.ln2_rstd)
    qkv, proj = (w.qkv_weight, w.qkv_bias), (w.proj_weight, w.proj_bias)
    fc, fcproj = (w.fc_weight, w.fc_bias), (w.fcproj_weight, w.fcproj_bias)
    ops.layernorm_linear_forward(act.qkv, *ln1, x, w.ln1_weight, w.ln1_bias, *qkv, scratch=s)  # [q k v] = LN(x) W^T + b
    if attend is None:
        ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)  # y = softmax(q k^T / sqrt(D)) v
        ops.linear_residual_forward(act.residual_mid, x, act.atty, *proj, scratch=s)  # a = x + y W^T + b
    else:
        attend(act.residual_mid, x, *proj)
    ops.layernorm_linear_gelu_forward(  # h = GELU(LN(a) W^T + b)
        act.gelu, act.fc, *ln2, act.residual_mid, w.ln2_weight, w.ln2_bias, *fc, scratch=s
    )
    if not rerun:
        ops.linear_residual_forward(act.residual_out, act.residual_mid, act.gelu, *fcproj, scratch=s)  # a + h W^T + b


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
    layers = len(w.blocks)
    stream = [act.embedded, *(block.residual_out for block in act.blocks)]  # into each block, and out of the last
    # The gradient of `stream`, and the bias gradient of the GEMM that wrote it. The embedding has no bias.
    above = [
        (d.dresidual, None),
        *((d.blocks[layer].dresidual_out, g.blocks[layer].fcproj_bias) for layer in range(layers)),
    ]
    x, (dx, dbias_below), lnf = stream[-1], above[-1], (act.lnf_mean, act.lnf_rstd, w.lnf_weight)
    norm = dx, g.lnf_weight, g.lnf_bias, d.dlnf, x, *lnf, dbias_below
    last_norm = partial(ops.layernorm_backward, *norm, scratch=act.scratch)
    head = partial(head_backward, ops, w, g, act, d, scale, shape, last_norm)
    stages = [Stage("lnf", head, done=True)]
    for layer in reversed(range(layers)):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d.blocks[layer]
        run = partial(block_backward, ops, *block, d, stream[layer], *above[layer], act, recompute)
        stages.append(Stage(f"blocks.{layer}", run, done=True))
    words = d.dresidual, act.tokens, act.sorted_positions
    embedding = partial(ops.embedding_backward, g.wte, g.wpe, *words, scratch=act.scratch)
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
    dbias_below: Tensor | None,
    whole: Activations,
    recompute: int,
) -> None:
    """d.dresidual_out -> dx in place, in one buffer; adds the weights' gradients to `g`.

    The bias gradient of a GEMM that writes the residual stream is the column sum of the stream's gradient. The layer norm
    backward above it reads that gradient anyway and adds the sums: the call for the block above added this block's
    `fcproj_bias`, and this call adds `dbias_below` (None in the lowest block) for the block below."""
    s, ln1, ln2 = whole.scratch, (act.ln1_mean, act.ln1_rstd), (act.ln2_mean, act.ln2_rstd)
    if recompute == WHOLE_BLOCKS:
        block_forward(ops, w, act, x, s, rerun=True)
    elif recompute:
        if recompute == 2:
            ops.layernorm_forward(act.ln2, *ln2, act.residual_mid, w.ln2_weight, w.ln2_bias)
        ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    fcproj = d.dresidual_out, act.gelu, act.fc, w.fcproj_weight
    ops.gelu_linear_backward(d.dhidden, g.fcproj_weight, *fcproj, scratch=s)
    ops.linear_backward(shared.dln, g.fc_weight, g.fc_bias, d.dhidden, act.ln2, w.fc_weight, scratch=s)
    norm = shared.dln, act.residual_mid, *ln2, w.ln2_weight
    ops.layernorm_backward(d.dresidual_mid, g.ln2_weight, g.ln2_bias, *norm, g.proj_bias, scratch=s)
    if recompute == 2:
        ops.layernorm_forward(act.ln1, *ln1, x, w.ln1_weight, w.ln1_bias)
    ops.linear_backward(shared.datty, g.proj_weight, None, d.dresidual_mid, act.atty, w.proj_weight, scratch=s)
    ops.attention_backward(d.dqkv, shared.datty, act.atty, act.lse, act.qkv, scratch=shared.attention_scratch)
    ops.linear_backward(shared.dln, g.qkv_weight, g.qkv_bias, d.dqkv, act.ln1, w.qkv_weight, scratch=s)
    norm = shared.dln, x, *ln1, w.ln1_weight
    ops.layernorm_backward(dx, g.ln1_weight, g.ln1_bias, *norm, dbias_below, scratch=s)


# Tables.

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)  # the stages of a block, and the next block's first

NORMAL, RESIDUAL = Init("normal", 0.02), Init("normal", 0.02, residual=True)


# Parameters. Matrices come before vectors, so that the optimizer decays one contiguous range.


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("3C C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C C", RESIDUAL, "matrix")
    fc_weight: Tensor = parameter("F C", NORMAL, "matrix")
    fcproj_weight: Tensor = parameter("C F", RESIDUAL, "matrix")
    ln1_weight: Tensor = parameter("C", ONES, "vector")
    ln1_bias: Tensor = parameter("C", ZEROS, "vector")
    qkv_bias: Tensor = parameter("3C", ZEROS, "vector")
    proj_bias: Tensor = parameter("C", ZEROS, "vector")
    ln2_weight: Tensor = parameter("C", ONES, "vector")
    ln2_bias: Tensor = parameter("C", ZEROS, "vector")
    fc_bias: Tensor = parameter("F", ZEROS, "vector")
    fcproj_bias: Tensor = parameter("C", ZEROS, "vector")


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    head: Tensor = shared(of="wte")  # the loss head reads the same tensor
    wpe: Tensor = parameter("maxT C", NORMAL, "embedding", bucket="embedding")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    lnf_weight: Tensor = parameter("C", ONES, "vector", bucket="lnf")
    lnf_bias: Tensor = parameter("C", ZEROS, "vector", bucket="lnf")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    return parameter_rows(Weights, shape)


# Activations. The backward reads kept inputs or, from a recompute level on, reruns the same operation for the same bits.


@dataclass
class BlockActivations:
    ln1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    ln1_mean: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    ln1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N 3C", lives=kept(ATTENTION))
    atty: Tensor = activation("N C", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    ln2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    ln2_mean: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    ln2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    fc: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)  # before GELU
    gelu: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(PassTensors):
    positions: Tensor | None = optional_input()  # of each token in its document, if a row packs several
    sorted_by_position: Tensor | None = optional_input()
    embedded: Tensor = activation("N C", lives=from_embedding(ATTENTION))
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_mean: Tensor = activation("N", "statistics", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)


@dataclass
class BlockGradients:
    """The gradients that each block writes in turn to the same memory."""

    dqkv: Tensor = shared()
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()  # of the hidden layer, before GELU
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. The backward updates the residual stream's gradient in place: the identity path passes it
    through, and each layer norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dln: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a layer norm's output
    datty: Tensor = activation("N C", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N 3C", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    # The stream's gradient is complete one tick before the GEMM that reads it.
    dresidual_mid: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, last=1), of="dresidual")
    dresidual_out: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, first=1), of="dresidual")
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


activations = partial(rows_of_pass, (Activations, Gradients))


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[BlockActivations] = repeated(BlockActivations)  # of the prefill, of the step


decoding = partial(decode_rows, BlockActivations)  # the rows of `Decoding`


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """b.tokens (B) at b.positions -> b.logits (B, Vp) for the next tokens. Attends to the cached keys and values of the
    earlier tokens. `ops`: generation's operations, one row per sequence."""
    s, act, x = b.scratch, b.blocks[1], b.blocks[1].residual_out
    ops.embedding_decode(x, b.tokens, b.positions, w.wte, w.wpe)
    for layer, weights in enumerate(w.blocks):
        block_forward(ops, weights, act, x, s, attend=step_attention(ops, act, b, layer))
    norm = act.ln1, act.ln1_mean, act.ln1_rstd
    ops.layernorm_linear_forward(b.logits, *norm, x, w.lnf_weight, w.lnf_bias, w.wte, None, scratch=s)


def prefill(
    ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int, *, append: bool = False
) -> None:
    """b.prompt_tokens (`batch`, `length`) -> their keys and values in the caches of b.prompt_slots, from position 0 on or,
    with `append`, at b.prompt_positions (N), after the prompts' earlier tokens. Right padding is harmless: attention is
    causal, and a decode step writes a padded cache position before it reads it."""
    N, s = batch * length, b.scratch
    act = prefill_block(b.blocks[0], batch, length)
    x, tokens = act.residual_out, b.prompt_tokens[:N]
    if append:
        ops.decode.embedding_decode(x, tokens, b.prompt_positions[:N], w.wte, w.wpe)
    else:
        ops.embedding_forward(x, tokens.view(batch, length), w.wte, w.wpe)
    for layer, weights in enumerate(w.blocks[:-1]):
        block_forward(ops, weights, act, x, s, attend=prompt_attention(ops, act, b, layer, batch, append=append))
    last = w.blocks[-1]  # prefill needs only its keys and values
    norm = act.ln1, act.ln1_mean, act.ln1_rstd, x, last.ln1_weight, last.ln1_bias
    ops.layernorm_linear_forward(act.qkv, *norm, last.qkv_weight, last.qkv_bias, scratch=s)
    store_prompts(ops, act, b, len(w.blocks) - 1, batch, append=append)
