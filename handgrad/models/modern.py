"""The modern network (docs/modern.md): its tensors as rows, forward, backward, generation.

The stream begins with x = RMS(wte[token]). A block is two halves, each `x + f(RMS(x))`, without biases or gains:

    a = x + Attention(q, k, v) Wproj^T,    [q k v] = RMS(x) Wqkv^T,  q and k of each head normalised, then rotated
    y = a + max(RMS(a) Wfc^T, 0)^2 Wfcproj^T

and the logits are z = c tanh(RMS(y) Whead^T / c). A model may be without some of `config.TECHNIQUES`: their tensors and
operations then do not exist.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.models.decoding import Sequences, decoding_rows, prefill_block
from handgrad.models.passes import Stage, head_logits
from handgrad.models.rows import (
    ZEROS,
    ActivationRow,
    Clock,
    Init,
    ParameterRow,
    activation,
    activation_rows,
    at_head,
    backward_of,
    count_parameters,
    dtypes_of,
    kept,
    parameter,
    parameter_rows,
    repeated,
    shared,
)

Launch = Callable[[], None]

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)  # the stages of a block, and the one that follows
FP8_PARTS: tuple[str, ...] = ()  # GEMMs that go to fp8: none

# The norm that follows makes the embedding's scale a matter of its learning rate alone; 0.5 is that of an orthogonal
# matrix's numbers, halved.
EMBEDDING, MATRIX = Init("normal", 0.02), Init("normal", 0.5, by_inputs=True)
RESIDUAL = Init("normal", 0.5, by_inputs=True, residual=True)  # in the place of zeros

# The tensors that a model has with a technique alone.
OF_TECHNIQUE = {"head": "untied_head", "qk_rstd": "qk_norm"}
OF_TECHNIQUE |= dict.fromkeys(("normed_embedding", "embedding_rstd", "dembedded"), "embedding_norm")


def dims(shape: ModelShape) -> dict[str, int]:
    """The sizes of the letters in the parameters' shapes."""
    C, F, H = shape.channels, shape.feed_forward, shape.num_heads
    sizes = {"C": C, "3C": 3 * C, "F": F, "H": H, "2H": 2 * H, "D": C // H, "maxT": shape.sequence_length}
    return sizes | {"V": shape.vocab_size, "Vp": shape.padded_vocab_size, "L": shape.num_layers}


def has(shape: ModelShape, name: str) -> bool:
    """True if the model has the tensor of this name."""
    return shape.has(OF_TECHNIQUE.get(name.rpartition(".")[2], ""))


# Parameters.


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("3C C", MATRIX, "matrix")
    proj_weight: Tensor = parameter("C C", ZEROS, "matrix")
    fc_weight: Tensor = parameter("F C", MATRIX, "matrix")
    fcproj_weight: Tensor = parameter("C F", ZEROS, "matrix")


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", EMBEDDING, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", ZEROS, "embedding", bucket="head", stored_rows="V", otherwise="wte")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    for row in parameter_rows(Weights, dims(shape), shape.num_layers):
        if has(shape, row.name):
            if row.init == ZEROS and not shape.has("zero_init"):
                init = EMBEDDING if row.name == "head" else RESIDUAL
                row = replace(row, init=init, std=init.std_of(row.shape, shape.num_layers))
            yield row


def flops_per_token(shape: ModelShape) -> float:
    """Forward and backward: 6 per parameter of a GEMM, and 6 L C T for attention's two causal products."""
    in_gemms = (row for row in parameters(shape) if row.name != "wte" or not shape.has("untied_head"))
    return 6.0 * count_parameters(in_gemms) + 6.0 * shape.num_layers * shape.channels * shape.sequence_length


# Activations. The backward's inputs are kept or, from a recompute level on, made again by the same operation: same bits.


@dataclass
class BlockActivations:
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), remade_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N 3C", lives=kept(ATTENTION))  # queries and keys normalised and rotated
    qk_rstd: Tensor = activation("N 2H", "statistics", lives=kept(ATTENTION), optional=True)
    atty: Tensor = activation("N C", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), remade_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N F", lives=kept(FEED_FORWARD), remade_from=1)  # after the squared ReLU
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations:
    tokens: Tensor = activation("B T", torch.int64)
    targets: Tensor = activation("B T", torch.int64)
    sorted_positions: Tensor = activation("N", torch.int32)  # 0..N-1 ordered by token, for the embedding's backward
    losses: Tensor = activation("N", "statistics")
    scratch: Tensor = activation("scratch", torch.uint8)
    # The first block's input if there is no norm after it.
    embedded: Tensor = activation("N C", lives=lambda clock: ((0, max(clock.tick(ATTENTION), clock.mirrored(0))),))
    normed_embedding: Tensor = activation(
        "N C", lives=lambda clock: ((0, clock.mirrored(clock.tick(ATTENTION))),), optional=True
    )
    embedding_rstd: Tensor = activation("N", "statistics", lives=lambda clock: ((0, clock.mirrored(0)),), optional=True)
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)

    @property
    def first(self) -> Tensor:
        """The stream that enters the first block."""
        return self.embedded if self.normed_embedding is None else self.normed_embedding


@dataclass
class BlockGradients:
    """The gradients that the blocks make one after another in the same memory."""

    dqkv: Tensor = shared()
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()  # before the squared ReLU
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. That of the residual stream runs through in place: the stream's identity path leaves it as
    it is, and each norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=lambda clock: ((clock.head, 2 * clock.head),))
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a norm's output
    datty: Tensor = activation("N C", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N 3C", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    dembedded: Tensor = activation("N C", lives=lambda clock: ((2 * clock.head, 2 * clock.head),), optional=True)
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of `Activations` for `batch` samples of `length` tokens, and with `training` those of `Gradients`; `chunk`
    tokens at a time go through the loss head."""
    N, C = batch * length, shape.channels
    sizes = dims(shape) | {"B": batch, "T": length, "N": N, "chunk": chunk}
    sizes["scratch"] = ops.scratch_bytes(tokens=N, channels=C, widest=shape.feed_forward)
    clock = Clock(shape.num_layers, stages=2, training=training)
    tables: list[type] = [Activations]
    if training:
        head = {"num_heads": shape.num_heads, "head_width": C // shape.num_heads}
        sizes["attention_scratch"] = ops.attention_scratch_bytes(batch=batch, length=length, dtype=dtype, **head)
        tables.append(Gradients)
    rows = (row for table in tables for row in activation_rows(table, sizes, dtypes_of(dtype), clock))
    return (row for row in rows if has(shape, row.name))


# Queries and keys before attention, and back: normalised and rotated, one of the two, or as they are.


def turn(ops: ModuleType, act: BlockActivations, shape: ModelShape, **place: Any) -> Launch:
    """`place`: the `length` of the samples at hand, or the `positions` of one token per sequence."""
    if not shape.has("rotary"):
        return nothing if act.qk_rstd is None else partial(ops.qk_norm_forward, act.qkv, act.qk_rstd)
    if act.qk_rstd is None:
        return partial(ops.rotary_forward, act.qkv, num_heads=shape.num_heads, **place)
    return partial(ops.qk_norm_rotary_forward, act.qkv, act.qk_rstd, **place)


def turn_back(ops: ModuleType, dqkv: Tensor, act: BlockActivations, shape: ModelShape) -> Launch:
    """Turns the gradient after `turn` into the gradient before it."""
    length = act.lse.shape[2]
    if not shape.has("rotary"):
        return nothing if act.qk_rstd is None else partial(ops.qk_norm_backward, dqkv, act.qkv, act.qk_rstd)
    if act.qk_rstd is None:
        return partial(ops.rotary_backward, dqkv, num_heads=shape.num_heads, length=length)
    return partial(ops.qk_norm_rotary_backward, dqkv, act.qkv, act.qk_rstd, length=length)


def nothing() -> None:
    """The techniques are left out."""


# Forward. A stage is a stretch of the pass that reads one bucket's weights for the first time.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, s = act.first, act.scratch
    stages = [Stage("embedding", partial(embedding_forward, ops, w, act))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        turned = turn(ops, block, shape, length=block.lse.shape[2])
        attend = partial(ops.attention_forward, block.atty, block.lse, block.qkv, scratch=s)
        stages.append(Stage(f"blocks.{layer}", partial(block_forward, ops, weights, block, x, turned, attend, s)))
        x = block.residual_out
    last_norm = partial(ops.rmsnorm_forward, act.lnf, act.lnf_rstd, x)
    return [*stages, Stage("" if w.head is w.wte else "head", last_norm)]


def embedding_forward(ops: ModuleType, w: Weights, act: Activations) -> None:
    ops.token_embedding_forward(act.embedded, act.tokens, w.wte)
    if act.normed_embedding is not None:
        ops.rmsnorm_forward(act.normed_embedding, act.embedding_rstd, act.embedded)


def block_forward(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, x: Tensor, turned: Launch, attend: Launch, s: Tensor
) -> None:
    """x (N, C) -> act.residual_out (N, C). `turned` and `attend` make act.atty of act.qkv: in training of the sequences at
    hand, in generation with the keys and values of earlier tokens."""
    ops.rmsnorm_linear_forward(act.qkv, act.norm1, act.norm1_rstd, x, w.qkv_weight, scratch=s)  # [q k v] = RMS(x) W^T
    turned()  # q, k = R(q / |q|), R(k / |k|)
    attend()  # y = softmax(q k^T / sqrt(D)) v
    ops.linear_residual_forward(act.residual_mid, x, act.atty, w.proj_weight, None, scratch=s)  # a = x + y W^T
    norm = act.norm2, act.norm2_rstd, act.residual_mid
    ops.rmsnorm_linear_relu2_forward(act.hidden, *norm, w.fc_weight, scratch=s)  # h = max(RMS(a) W^T, 0)^2
    ops.linear_residual_forward(
        act.residual_out, act.residual_mid, act.hidden, w.fcproj_weight, None, scratch=s
    )  # a + h W^T


def loss(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> None:
    """act.tokens, act.targets (B, T) -> act.losses (N): the cross-entropy of each token in nats."""
    for stage in forward(ops, w, act, shape):
        stage.run()
    sizes = {"vocab_size": shape.vocab_size, "softcap": shape.softcap}
    for rows, logits in head_logits(ops, w, act):
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], **sizes)


# Backward: the mirror image, bottom line first. A stage is a stretch that finishes one bucket's gradients.


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
    """After `forward`: act.losses (N), and `g` += scale (1) * the gradient of their sum."""
    stream = [act.first, *(block.residual_out for block in act.blocks)]  # into each block, and out of the last
    head = partial(head_backward, ops, w, g, act, d, stream[-1], scale, shape)
    stages = [Stage("", head) if w.head is w.wte else Stage("head", head, done=True)]
    below = [d.dresidual, *(block.dresidual_out for block in d.blocks)]  # the gradient of `stream`
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d.blocks[layer]
        back = turn_back(ops, d.blocks[layer].dqkv, act.blocks[layer], shape)
        run = partial(block_backward, ops, *block, d, stream[layer], below[layer], back, act.scratch, recompute)
        stages.append(Stage(f"blocks.{layer}", run, done=True))
    return [*stages, Stage("embedding", partial(embedding_backward, ops, g, act, d), done=True)]


def head_backward(
    ops: ModuleType, w: Weights, g: Weights, act: Activations, d: Gradients, x: Tensor, scale: Tensor, shape: ModelShape
) -> None:
    """Losses, and d.dresidual (N, C) = scale * dL/dx of the stream x that enters the last norm."""
    s, sizes = act.scratch, {"vocab_size": shape.vocab_size, "softcap": shape.softcap}
    for rows, logits in head_logits(ops, w, act):
        targets = act.targets.view(-1)[rows]
        ops.classifier_forward_backward(act.losses[rows], logits, targets, scale, **sizes)
        ops.linear_backward(d.dlnf[rows], g.head, None, logits, act.lnf[rows], w.head, scratch=s)
    d.dresidual.zero_()
    ops.rmsnorm_backward(d.dresidual, d.dlnf, x, act.lnf_rstd)


def block_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    d: BlockGradients,
    shared: Gradients,
    x: Tensor,
    dx: Tensor,
    turn_back: Launch,
    s: Tensor,
    recompute: int,
) -> None:
    """d.dresidual_out -> dx, one buffer changed in place; adds the weights' gradients to `g`."""
    if recompute >= 2:
        ops.rmsnorm_forward(act.norm2, act.norm2_rstd, act.residual_mid)
    if recompute >= 1:
        ops.linear_relu2_forward(act.hidden, act.norm2, w.fc_weight, scratch=s)
    ops.relu2_linear_backward(d.dhidden, g.fcproj_weight, d.dresidual_out, act.hidden, w.fcproj_weight, scratch=s)
    ops.linear_backward(shared.dnorm, g.fc_weight, None, d.dhidden, act.norm2, w.fc_weight, scratch=s)
    ops.rmsnorm_backward(d.dresidual_mid, shared.dnorm, act.residual_mid, act.norm2_rstd)
    if recompute >= 2:
        ops.rmsnorm_forward(act.norm1, act.norm1_rstd, x)
    ops.linear_backward(shared.datty, g.proj_weight, None, d.dresidual_mid, act.atty, w.proj_weight, scratch=s)
    ops.attention_backward(d.dqkv, shared.datty, act.atty, act.lse, act.qkv, scratch=shared.attention_scratch)
    turn_back()
    ops.linear_backward(shared.dnorm, g.qkv_weight, None, d.dqkv, act.norm1, w.qkv_weight, scratch=s)
    ops.rmsnorm_backward(dx, shared.dnorm, x, act.norm1_rstd)


def embedding_backward(ops: ModuleType, g: Weights, act: Activations, d: Gradients) -> None:
    """d.dresidual, the gradient of the first block's input, -> g.wte."""
    dembedded = d.dresidual
    if d.dembedded is not None:
        dembedded = d.dembedded.zero_()
        ops.rmsnorm_backward(dembedded, d.dresidual, act.embedded, act.embedding_rstd)
    ops.token_embedding_backward(g.wte, dembedded, act.tokens, act.sorted_positions, scratch=act.scratch)


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[BlockActivations] = repeated(BlockActivations)  # of the prefill, of the step


def decoding(
    shape: ModelShape, batch: int, prompt_tokens: int, dtype: torch.dtype, ops: ModuleType
) -> Iterator[ActivationRow]:
    """The rows of `Decoding` for `batch` sequences, and for prompts that are taken in by `prompt_tokens` at a time."""
    rows = decoding_rows(BlockActivations, dims(shape), shape, batch, prompt_tokens, dtype, ops)
    return (row for row in rows if has(shape, row.name))


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """Takes in b.tokens at b.positions (the earlier tokens of a sequence were taken in before) -> b.logits (B, Vp) for the
    tokens that follow. `ops`: those of generation, one row per sequence."""
    s, act, x = b.scratch, b.blocks[1], b.blocks[1].residual_out
    turned = turn(ops, act, shape, positions=b.positions)
    ops.token_embedding_decode(x, b.tokens, w.wte)
    if shape.has("embedding_norm"):
        ops.rmsnorm_forward(x, act.norm1_rstd, x)
    for layer, weights in enumerate(w.blocks):
        cache = b.keys[layer], b.values[layer]
        attend = partial(ops.attention_decode, act.atty, *cache, act.qkv, b.positions, scratch=s)
        block_forward(ops, weights, act, x, turned, attend, s)
    ops.rmsnorm_linear_forward(b.logits, act.norm1, act.norm1_rstd, x, w.head, scratch=s)
    if shape.softcap:
        ops.softcap_forward(b.logits, softcap=shape.softcap)


def prefill(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int) -> None:
    """b.prompt_tokens, (`batch`, `length`), -> their keys and values in the caches of b.prompt_slots, from position 0 on.

    Padding on the right is harmless: attention is causal, and the step that gets to a padded position of a cache writes it
    before it reads it."""
    N, s, slots = batch * length, b.scratch, b.prompt_slots[:batch]
    act = prefill_block(b.blocks[0], batch, length, shape.num_heads)
    x, tokens = act.residual_out, b.prompt_tokens[:N].view(batch, length)
    caches = [partial(ops.store_keys_values, *cache, act.qkv, slots) for cache in zip(b.keys, b.values, strict=True)]
    turned = turn(ops, act, shape, length=length)

    def attend(store: Launch) -> None:
        store()
        ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)

    ops.token_embedding_forward(x, tokens, w.wte)
    if shape.has("embedding_norm"):
        ops.rmsnorm_forward(x, act.norm1_rstd, x)
    for weights, store in zip(w.blocks[:-1], caches, strict=False):
        block_forward(ops, weights, act, x, turned, partial(attend, store), s)
    last = w.blocks[-1]  # of which the keys and values alone are read
    ops.rmsnorm_linear_forward(act.qkv, act.norm1, act.norm1_rstd, x, last.qkv_weight, scratch=s)
    turned()
    caches[-1]()
