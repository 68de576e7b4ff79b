"""The modern network (docs/modern.md): its tensors as rows, forward, backward, generation.

The residual stream starts as x = RMS(wte[token]). A block is two halves, each `x + f(RMS(x))`, without biases or gains:

    a = x + Attention(q, k, v) Wproj^T,    [q k v] = RMS(x) Wqkv^T,  q and k of each head normalised, then rotated
    y = a + max(RMS(a) Wfc^T, 0)^2 Wfcproj^T

Scalars mix x <- r x + s x0 before each block; x0 is the input of the first block. Value embeddings add to each head, before
attention, v <- v + 2 sigmoid(RMS(x)[:G] Wgate^T) ve[token], in every second block up to and including the last. The logits
are z = c tanh(RMS(y) Whead^T / c). A model has some of `config.TECHNIQUES`: it has no tensors and runs no operations of the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, PassTensors, activation, rows_of_pass
from handgrad.memory.arena import WHOLE_BLOCKS, Clock, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.memory.rows import ONES, ZEROS, Init, ParameterRow, parameter, parameter_rows, repeated, shared
from handgrad.models.decoding import Sequences, decode_rows, prefill_block, prompt_attention, step_attention, store_prompts
from handgrad.models.passes import Attention, Launch, Stage, head_backward, no_launch
from handgrad.networks import ModelShape

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block."""
    x, s = act.first, act.scratch
    # x = RMS(wte[token])
    stages = [Stage("embedding", partial(embedding_forward, ops, w, act))]
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        if weights.value_embedding is not None:
            stages.append(Stage(f"values.{layer}", no_launch))
        before = before_attention_of(ops, weights, block, act, shape)
        stages.append(Stage(f"blocks.{layer}", partial(block_forward, ops, weights, block, x, act.first, before, s)))
        x = block.residual_out
    last_norm = partial(ops.rmsnorm_forward, act.lnf, act.lnf_rstd, x)
    return [*stages, Stage("head" if shape.has("untied_head") else "", last_norm)]


def embedding_forward(ops: ModuleType, w: Weights, act: Activations) -> None:
    ops.token_embedding_forward(act.embedded, act.tokens, w.wte)
    if act.normed_embedding is not None:
        ops.rmsnorm_forward(act.normed_embedding, act.embedding_rstd, act.embedded)


def before_attention_of(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, whole: Activations, shape: ModelShape
) -> Launch:
    """`block_forward`'s `before_attention` in training."""
    return with_values(ops, norm_and_rotate(ops, act, shape, length=act.lse.shape[2]), w, act, whole.tokens)


def block_forward(
    ops: ModuleType,
    w: BlockWeights,
    act: BlockActivations,
    x: Tensor,
    first: Tensor | None,
    before_attention: Launch,
    s: Tensor,
    *,
    attend: Attention | None = None,
    rerun: bool = False,
) -> None:
    """x (N, C) -> act.residual_out (N, C). `first`: the first block's x. `before_attention` changes act.qkv. `attend`:
    generation's attention, which also reads the cache; by default the tokens of a row attend to each other. `rerun`:
    recompute for the backward, which does not read the last GEMM's output."""
    x = queries_keys_values(ops, w, act, x, first, s)  # x = r x + s x0, [q k v] = RMS(x) W^T
    before_attention()  # q, k = R(RMS(q)), R(RMS(k)), v = v + g ve[token]
    if attend is None:
        ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)  # y = softmax(q k^T / sqrt(D)) v
        ops.linear_residual_forward(act.residual_mid, x, act.atty, w.proj_weight, None, scratch=s)  # a = x + y W^T
    else:
        attend(act.residual_mid, x, w.proj_weight, None)
    norm = act.norm2, act.norm2_rstd, act.residual_mid, None
    ops.rmsnorm_linear_relu2_forward(act.hidden, *norm, w.fc_weight, scratch=s)  # h = max(RMS(a) W^T, 0)^2
    if not rerun:
        fcproj = act.residual_mid, act.hidden, w.fcproj_weight, None
        ops.linear_residual_forward(act.residual_out, *fcproj, scratch=s)  # a + h W^T


# Norm and rotation of queries and keys, forward and backward: both, one of the two, or neither.


def norm_and_rotate(ops: ModuleType, act: BlockActivations, shape: ModelShape, **where: Any) -> Launch:
    """`where`: the `length` of the samples, or the `positions` of one token per sequence."""
    if not shape.has("rotary"):
        return no_launch if act.qk_rstd is None else partial(ops.qk_norm_forward, act.qkv, act.qk_rstd)
    if act.qk_rstd is None:
        return partial(ops.rotary_forward, act.qkv, num_heads=shape.num_heads, **where)
    return partial(ops.qk_norm_rotary_forward, act.qkv, act.qk_rstd, **where)


def norm_and_rotate_backward(ops: ModuleType, act: BlockActivations, dqkv: Tensor, shape: ModelShape) -> None:
    """The backward of `norm_and_rotate`, in place in `dqkv`."""
    length = act.lse.shape[2]
    if not shape.has("rotary"):
        if act.qk_rstd is not None:
            ops.qk_norm_backward(dqkv, act.qkv, act.qk_rstd)
    elif act.qk_rstd is None:
        ops.rotary_backward(dqkv, num_heads=shape.num_heads, length=length)
    else:
        ops.qk_norm_rotary_backward(dqkv, act.qkv, act.qk_rstd, length=length)


# Value embeddings, also before attention.


def with_values(ops: ModuleType, before: Launch, w: BlockWeights, act: BlockActivations, tokens: Tensor) -> Launch:
    """Runs `before`, then adds the value embeddings of `tokens` if the block has them."""
    if w.value_embedding is None:
        return before

    def both() -> None:
        before()
        ops.value_embedding_forward(act.qkv, act.gate, act.norm1, w.value_gate, tokens, w.value_embedding)

    return both


# The scalars, before and after a block.


def queries_keys_values(
    ops: ModuleType, w: BlockWeights, act: BlockActivations, x: Tensor, first: Tensor | None, s: Tensor
) -> Tensor:
    """[q k v] = RMS(x) W^T, after the scalars have mixed x. Returns the mixed stream."""
    if act.mixed is None:
        ops.rmsnorm_linear_forward(act.qkv, act.norm1, act.norm1_rstd, x, None, w.qkv_weight, None, scratch=s)
        return x
    mixture = x, first, w.residual_scalar, w.input_scalar
    ops.mix_rmsnorm_linear_forward(act.qkv, act.mixed, act.norm1, act.norm1_rstd, *mixture, w.qkv_weight, scratch=s)
    return act.mixed


def norm1_again(ops: ModuleType, w: BlockWeights, act: BlockActivations, x: Tensor, first: Tensor | None) -> None:
    """Recomputes the block's first norm from the block's input."""
    if act.mixed is None:
        ops.rmsnorm_forward(act.norm1, act.norm1_rstd, x)
    else:
        ops.mix_rmsnorm_forward(None, act.norm1, act.norm1_rstd, x, first, w.residual_scalar, w.input_scalar)


def norm1_backward(
    ops: ModuleType,
    w: BlockWeights,
    g: BlockWeights,
    act: BlockActivations,
    shared: Gradients,
    x: Tensor,
    dx: Tensor,
    first: Tensor | None,
    s: Tensor,
) -> None:
    """The backward of the block's first norm and scalars. dx enters as the mixed stream's gradient, leaves as x's."""
    if act.mixed is None:
        ops.rmsnorm_backward(dx, None, shared.dnorm, x, act.norm1_rstd, None, scratch=s)
        return
    sums = g.residual_scalar, g.input_scalar
    mixture = x, first, act.norm1_rstd, w.residual_scalar, w.input_scalar
    ops.mix_rmsnorm_backward(dx, shared.dfirst, *sums, shared.dnorm, *mixture, scratch=s)


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
    stream = [act.first, *(block.residual_out for block in act.blocks)]  # into each block, and out of the last
    below = [d.dresidual, *(block.dresidual_out for block in d.blocks)]  # the gradient of `stream`
    last_norm = partial(last_norm_backward, ops, act, d, stream[-1], below[-1])
    head = partial(head_backward, ops, w, g, act, d, scale, shape, last_norm)
    stages = [Stage("head", head, done=True) if shape.has("untied_head") else Stage("", head)]
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], d.blocks[layer]
        run = partial(block_backward, ops, *block, d, stream[layer], below[layer], act, shape, recompute)
        stages.append(Stage(f"blocks.{layer}", run, done=True))
        if (dtable := g.blocks[layer].value_embedding) is not None:
            tokens = d.blocks[layer].dvalues, act.tokens, act.sorted_positions
            add = partial(ops.token_embedding_backward, dtable, *tokens, scratch=act.scratch)
            stages.append(Stage(f"values.{layer}", add, done=True))
    return [*stages, Stage("embedding", partial(embedding_backward, ops, g, act, d), done=True)]


def last_norm_backward(ops: ModuleType, act: Activations, d: Gradients, x: Tensor, dx: Tensor) -> None:
    """Adds the gradient of the last norm's input x to dx (N, C). Zeroes d.dfirst."""
    if d.dfirst is not None:
        d.dfirst.zero_()
    ops.rmsnorm_backward(dx, None, d.dlnf, x, act.lnf_rstd, None, scratch=act.scratch)


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
    recompute: int,
) -> None:
    """d.dresidual_out -> dx in place, in one buffer; adds the weights' gradients to `g`."""
    s = whole.scratch
    if recompute == WHOLE_BLOCKS:
        before = before_attention_of(ops, w, act, whole, shape)
        block_forward(ops, w, act, x, whole.first, before, s, rerun=True)
    elif recompute:
        if recompute == 2:
            ops.rmsnorm_forward(act.norm2, act.norm2_rstd, act.residual_mid)
        ops.linear_relu2_forward(act.hidden, act.norm2, w.fc_weight, scratch=s)
    ops.relu2_linear_backward(d.dhidden, g.fcproj_weight, d.dresidual_out, act.hidden, w.fcproj_weight, scratch=s)
    ops.linear_backward(shared.dnorm, g.fc_weight, None, d.dhidden, act.norm2, w.fc_weight, scratch=s)
    ops.rmsnorm_backward(d.dresidual_mid, None, shared.dnorm, act.residual_mid, act.norm2_rstd, None, scratch=s)
    if recompute == 2:
        norm1_again(ops, w, act, x, whole.first)
    ops.linear_backward(shared.datty, g.proj_weight, None, d.dresidual_mid, act.atty, w.proj_weight, scratch=s)
    ops.attention_backward(d.dqkv, shared.datty, act.atty, act.lse, act.qkv, scratch=shared.attention_scratch)
    norm_and_rotate_backward(ops, act, d.dqkv, shape)
    ops.linear_backward(shared.dnorm, g.qkv_weight, None, d.dqkv, act.norm1, w.qkv_weight, scratch=s)
    if w.value_embedding is not None:
        looked_up = act.gate, act.norm1, w.value_gate, whole.tokens, w.value_embedding
        ops.value_embedding_backward(d.dvalues, shared.dnorm, g.value_gate, d.dqkv, *looked_up, scratch=s)
    norm1_backward(ops, w, g, act, shared, x, dx, whole.first, s)


def embedding_backward(ops: ModuleType, g: Weights, act: Activations, d: Gradients) -> None:
    """Backpropagates d.dresidual, the gradient of the first block's input, into g.wte."""
    dembedded = d.dresidual
    if d.dfirst is not None:
        ops.residual_forward(d.dresidual, d.dresidual, d.dfirst)
    if d.dembedded is not None:
        dembedded = d.dembedded.zero_()
        norm = d.dresidual, act.embedded, act.embedding_rstd, None
        ops.rmsnorm_backward(dembedded, None, *norm, scratch=act.scratch)
    ops.token_embedding_backward(g.wte, dembedded, act.tokens, act.sorted_positions, scratch=act.scratch)


# Tables.

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)  # the stages of a block, and the next block's first

# A norm follows the embedding, so its scale only affects its learning rate. 0.5 is half an orthogonal matrix's scale.
EMBEDDING, MATRIX = Init("normal", 0.02), Init("normal", 0.5, by_inputs=True)
RESIDUAL = Init("normal", 0.5, by_inputs=True, residual=True)  # without `zero_init`
INPUT_SHARE = Init("constant", value=0.1)  # s: weight of the first block's input in each block's

# Multiples of the step's learning rate, which the head uses. docs/modern.md has their sources.
INPUT_SCALAR_RATE, VALUE_TABLE_RATE = 100.0, 75.0

# Tensors that exist only with one of these techniques.
OF_TECHNIQUE: dict[str, tuple[str, ...]] = {"head": ("untied_head",), "qk_rstd": ("qk_norm",)}
OF_TECHNIQUE |= dict.fromkeys(("normed_embedding", "embedding_rstd", "dembedded"), ("embedding_norm",))
OF_TECHNIQUE |= {"residual_scalar": ("residual_scalars",), "mixed": ("residual_scalars", "input_scalars")}
OF_TECHNIQUE |= dict.fromkeys(("input_scalar", "first", "dfirst"), ("input_scalars",))
VALUE_TENSORS = ("value_embedding", "value_gate", "gate")  # in every second layer
OF_TECHNIQUE |= dict.fromkeys(VALUE_TENSORS, ("value_embeddings",))


def has(shape: ModelShape, name: str) -> bool:
    """True if the model has a tensor of this name."""
    techniques = OF_TECHNIQUE.get(name.rpartition(".")[2], ())
    return not techniques or any(map(shape.has, techniques))


def in_its_layer(shape: ModelShape, name: str) -> bool:
    """True if the tensor's layer has it: every second layer, including the last, has value embeddings."""
    _, _, rest = name.partition("blocks.")
    layer, _, tensor = rest.partition(".")
    return tensor not in VALUE_TENSORS or (shape.num_layers - int(layer)) % 2 == 1


# Parameters.


@dataclass
class BlockWeights:
    value_embedding: Tensor = parameter("Vp C", MATRIX, "embedding", stored_rows="V", optional=True, rate=VALUE_TABLE_RATE)
    value_gate: Tensor = parameter("H G", ZEROS, "vector", optional=True)
    qkv_weight: Tensor = parameter("3C C", MATRIX, "matrix")
    proj_weight: Tensor = parameter("C C", ZEROS, "matrix")
    fc_weight: Tensor = parameter("F C", MATRIX, "matrix")
    fcproj_weight: Tensor = parameter("C F", ZEROS, "matrix")
    residual_scalar: Tensor = parameter("1", ONES, "vector", optional=True)
    input_scalar: Tensor = parameter("1", INPUT_SHARE, "vector", optional=True, rate=INPUT_SCALAR_RATE)


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", EMBEDDING, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", ZEROS, "embedding", bucket="head", stored_rows="V", fallback="wte")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    for row in parameter_rows(Weights, shape):
        if has(shape, row.name) and in_its_layer(shape, row.name):
            if row.name.endswith(VALUE_TENSORS):
                # A bucket of its own: all blocks' buckets keep one size, and a table arrives just before its layer runs.
                row = replace(row, bucket=f"values.{row.name.split('.')[1]}")
            elif row.init == ZEROS and not shape.has("zero_init"):
                init = EMBEDDING if row.name == "head" else RESIDUAL
                row = replace(row, init=init, std=init.std_of(row.shape, shape.num_layers))
            yield row


# Activations. The backward reads kept inputs or, from a recompute level on, reruns the same operation for the same bits.


@dataclass
class BlockActivations:
    # The stream after the scalars. Attention's output projection adds to it; the backward recomputes it.
    mixed: Tensor = activation("N C", lives=lambda clock: ((clock.tick(ATTENTION), clock.tick(ATTENTION)),), optional=True)
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N 3C", lives=kept(ATTENTION))  # queries and keys normalised and rotated
    qk_rstd: Tensor = activation("N 2H", "statistics", lives=kept(ATTENTION), optional=True)
    gate: Tensor = activation("N H", "statistics", lives=kept(ATTENTION), optional=True)  # of the value embeddings
    atty: Tensor = activation("N C", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)  # after the squared ReLU
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(PassTensors):
    # The first block's input, unless a norm follows.
    embedded: Tensor = activation("N C", lives=lambda clock: ((0, max(clock.tick(ATTENTION), clock.mirrored(0))),))
    normed_embedding: Tensor = activation("N C", lives=from_embedding(ATTENTION), optional=True)
    embedding_rstd: Tensor = activation("N", "statistics", lives=lambda clock: ((0, clock.mirrored(0)),), optional=True)
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)

    @property
    def first(self) -> Tensor:
        """The first block's input."""
        return self.embedded if self.normed_embedding is None else self.normed_embedding


@dataclass
class BlockGradients:
    """The gradients that each block writes in turn to the same memory."""

    dqkv: Tensor = shared()
    dvalues: Tensor = shared(of="datty")  # of the looked-up value embeddings, after attention's backward has read `datty`
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()  # before the squared ReLU
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. The backward updates the residual stream's gradient in place: the identity path passes it
    through, and each norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a norm's output
    datty: Tensor = activation("N C", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N 3C", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    # The stream's gradient is complete one tick before the GEMM that reads it.
    dresidual_mid: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, last=1), of="dresidual")
    dresidual_out: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, first=1), of="dresidual")
    dfirst: Tensor = activation("N C", lives=in_backward, optional=True)  # of `first`
    dembedded: Tensor = activation("N C", lives=lambda clock: ((2 * clock.head, 2 * clock.head),), optional=True)
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass, as in `rows_of_pass`."""
    clock = Clock(shape.num_layers, stages=2, training=training)
    rows = rows_of_pass((Activations, Gradients), shape, batch, length, dtype, ops, chunk=chunk, training=training)
    return (as_read(shape, clock, row) for row in rows if has(shape, row.name) and in_its_layer(shape, row.name))


def as_read(shape: ModelShape, clock: Clock, row: ActivationRow) -> ActivationRow:
    """Adapts the row to the model's techniques: the first block's input lives until the last block that reads it."""
    if shape.has("input_scalars") and row.name == ("normed_embedding" if shape.has("embedding_norm") else "embedded"):
        return replace(row, ticks=((0, max(clock.head, clock.mirrored(0))),))
    return row


@dataclass
class DecodingBlock(BlockActivations):
    """A block's buffers in generation, shared by all layers in turn."""

    first: Tensor = activation("N C", lives=lambda clock: ((clock.tick(0), clock.tick(1)),), optional=True)


# Generation.


@dataclass
class Decoding(Sequences):
    blocks: list[DecodingBlock] = repeated(DecodingBlock)  # of the prefill, of the step


def decoding(
    shape: ModelShape, batch: int, prompt_tokens: int, dtype: torch.dtype, ops: ModuleType
) -> Iterator[ActivationRow]:
    """The rows of `Decoding` for `batch` sequences and at most `prompt_tokens` tokens per prefill."""
    rows = decode_rows(DecodingBlock, shape, batch, prompt_tokens, dtype, ops)
    return (row for row in rows if has(shape, row.name))


def decode_step(ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape) -> None:
    """As `models.gpt2.decode_step`."""
    s, act = b.scratch, b.blocks[1]
    x = act.residual_out if act.first is None else act.first
    rotated = norm_and_rotate(ops, act, shape, positions=b.positions)
    ops.token_embedding_decode(x, b.tokens, w.wte)
    if shape.has("embedding_norm"):
        ops.rmsnorm_forward(x, act.norm1_rstd, x)
    for layer, weights in enumerate(w.blocks):
        before = values_of_step(ops, rotated, weights, act, x, b.tokens)
        block_forward(ops, weights, act, x, act.first, before, s, attend=step_attention(ops, act, b, layer))
        x = act.residual_out
    ops.rmsnorm_linear_forward(b.logits, act.norm1, act.norm1_rstd, x, None, w.head, None, scratch=s)
    if shape.softcap:
        ops.softcap_forward(b.logits, softcap=shape.softcap)


def values_of_step(
    ops: ModuleType, before: Launch, w: BlockWeights, act: DecodingBlock, x: Tensor, tokens: Tensor
) -> Launch:
    """`with_values` for one token per sequence. Reads the stream x: generation's GEMMs do not store the norms."""
    if w.value_embedding is None:
        return before
    stream = x if act.mixed is None else act.mixed

    def both() -> None:
        before()
        ops.value_embedding_decode(act.qkv, stream, w.value_gate, tokens, w.value_embedding)

    return both


def prefill(
    ops: ModuleType, w: Weights, b: Decoding, shape: ModelShape, batch: int, length: int, *, append: bool = False
) -> None:
    """As `models.gpt2.prefill`."""
    N, s = batch * length, b.scratch
    act = prefill_block(b.blocks[0], batch, length)
    x, tokens = act.residual_out if act.first is None else act.first, b.prompt_tokens[:N].view(batch, length)
    if append:
        rotated = norm_and_rotate(ops.decode, act, shape, positions=b.prompt_positions[:N])
    else:
        rotated = norm_and_rotate(ops, act, shape, length=length)
    ops.token_embedding_forward(x, tokens, w.wte)
    if shape.has("embedding_norm"):
        ops.rmsnorm_forward(x, act.norm1_rstd, x)
    for layer, weights in enumerate(w.blocks[:-1]):
        before = with_values(ops, rotated, weights, act, tokens)
        attention = prompt_attention(ops, act, b, layer, batch, append=append)
        block_forward(ops, weights, act, x, act.first, before, s, attend=attention)
        x = act.residual_out
    last = w.blocks[-1]  # prefill needs only its keys and values
    queries_keys_values(ops, last, act, x, act.first, s)
    with_values(ops, rotated, last, act, tokens)()
    store_prompts(ops, act, b, len(w.blocks) - 1, batch, append=append)
