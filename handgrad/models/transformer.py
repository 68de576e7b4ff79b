"""The whole GPT-2: embedding, blocks, loss head; forward, and forward with backward.

The head shares the token embedding and works in chunks of tokens: a chunk's logits become its losses and, in place, its
gradient, so the full (N, Vp) logits never exist.

A pass can be walked stage by stage: it pauses before it first reads a bucket's weights and after it has finished a
bucket's gradients (`model.buckets`), where several ranks have something to wait for or to send.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from torch import Tensor

from handgrad.dropout.model import BlockDropout, ModelDropout
from handgrad.models import gpt2_block
from handgrad.models.activations import Activations
from handgrad.models.parameters import ModelTensors


@dataclass(frozen=True)
class Pause:
    """Where a pass stands: about to read `bucket` for the first time, or done with its gradients."""

    bucket: str
    gradients_are_done: bool = False


def forward_stages(ops: ModuleType, w: ModelTensors, act: Activations, dropout: ModelDropout | None) -> Iterator[Pause]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block, with a pause before each bucket."""
    yield Pause("embedding")
    ops.embedding_forward(act.embedded, act.tokens, w.wte, w.wpe)
    if dropout is not None:
        ops.dropout_forward(act.embedded, act.embedded, dropout.embedding)
    blocks = zip(w.blocks, act.blocks, block_dropouts(act, dropout), strict=True)
    for layer, (weights, block, block_dropout) in enumerate(blocks):
        yield Pause(f"blocks.{layer}")
        gpt2_block.forward(ops, weights, block, act, stream_into(act, layer), block_dropout)
    yield Pause("lnf")
    last = stream_into(act, len(act.blocks))
    ops.layernorm_forward(act.lnf, act.lnf_mean, act.lnf_rstd, last, w.lnf_weight, w.lnf_bias)


def block_dropouts(act: Activations, dropout: ModelDropout | None) -> tuple[BlockDropout, ...]:
    """What each block leaves out."""
    return (BlockDropout(),) * len(act.blocks) if dropout is None else dropout.blocks


def stream_into(act: Activations, layer: int) -> Tensor:
    """The residual stream (N, C) that enters a block; with the number of blocks, the one after the last."""
    return act.blocks[layer - 1].residual_out if layer else act.embedded


def forward_blocks(ops: ModuleType, w: ModelTensors, act: Activations) -> Tensor:
    """`forward_stages` in one go, with nothing left out; returns the stream before the last layer norm."""
    for _ in forward_stages(ops, w, act, None):
        pass
    return stream_into(act, len(act.blocks))


def loss(ops: ModuleType, w: ModelTensors, act: Activations, *, vocab_size: int) -> None:
    """act.tokens, act.targets (B, T) -> act.losses (N): the cross-entropy of each token in nats, without dropout."""
    forward_blocks(ops, w, act)
    for rows, logits in head_logits(ops, w, act):
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], vocab_size=vocab_size)


def head_logits(ops: ModuleType, w: ModelTensors, act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """act.lnf (N, C) -> chunk by chunk (which of the N, their logits (rows, Vp)); the next chunk takes the same memory."""
    for rows, logits in _chunks(act):
        ops.linear_forward(logits, act.lnf[rows], w.head, None, scratch=act.scratch)
        yield rows, logits


def loss_and_gradients(
    ops: ModuleType,
    w: ModelTensors,
    g: ModelTensors,
    act: Activations,
    scale: Tensor,
    *,
    vocab_size: int,
    recompute: int,
) -> None:
    """act.losses (N), and `g` += scale * the gradient of their sum, with the activations' dropout.

    For the mean over an optimizer step's tokens, `scale` (1) is 1 / tokens_per_step in every micro-step.
    """
    for _ in gradient_stages(ops, w, g, act, scale, vocab_size=vocab_size, recompute=recompute):
        pass


def gradient_stages(
    ops: ModuleType,
    w: ModelTensors,
    g: ModelTensors,
    act: Activations,
    scale: Tensor,
    *,
    vocab_size: int,
    recompute: int,
) -> Iterator[Pause]:
    """`loss_and_gradients`, with a pause before each bucket's weights and one after each bucket's gradients."""
    s, dropout = act.scratch, act.dropout
    yield from forward_stages(ops, w, act, dropout)
    for rows, logits in _chunks(act):
        targets, lnf = act.targets.view(-1)[rows], act.lnf[rows]
        form = logits if act.dlogits is None else replace(act.dlogits, plain=act.logits)[: len(logits)]
        ops.linear_forward(form, lnf, w.head, None, scratch=s)
        ops.classifier_forward_backward(act.losses[rows], form, targets, scale, vocab_size=vocab_size)
        ops.linear_backward(act.dlnf[rows], g.wte, None, form, lnf, w.head, scratch=s)
    act.dresidual.zero_()
    statistics = act.lnf_mean, act.lnf_rstd
    top, dbias_below = act.gradients[-1].dresidual_out, g.blocks[-1].fcproj_bias if dropout is None else None
    last = stream_into(act, len(act.blocks))
    ops.layernorm_backward(top, g.lnf_weight, g.lnf_bias, act.dlnf, last, *statistics, w.lnf_weight, dbias_below, scratch=s)
    yield Pause("lnf", gradients_are_done=True)
    block_dropout = block_dropouts(act, dropout)
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], act.gradients[layer], act
        dx, dbias_below = act.dresidual, None
        if layer:
            dx = act.gradients[layer - 1].dresidual_out
            dbias_below = g.blocks[layer - 1].fcproj_bias if dropout is None else None
        stream = stream_into(act, layer), dx, dbias_below
        gpt2_block.backward(ops, *block, *stream, block_dropout[layer], recompute=recompute)
        yield Pause(f"blocks.{layer}", gradients_are_done=True)
    if dropout is not None:
        ops.dropout_backward(act.dresidual, act.dresidual, dropout.embedding)
    ops.embedding_backward(g.wte, g.wpe, act.dresidual, act.tokens, act.sorted_positions, scratch=s)
    yield Pause("embedding", gradients_are_done=True)


def _chunks(act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """The head's chunks: (rows, the logits buffer for them); the last may be shorter."""
    N, chunk = act.losses.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        yield rows, act.logits[: rows.stop - rows.start]
