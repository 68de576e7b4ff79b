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

from handgrad.fp8.formats import Form, plain
from handgrad.models import gpt2_block
from handgrad.models.activations import Activations
from handgrad.models.parameters import ModelTensors


@dataclass(frozen=True)
class Pause:
    """Where a pass stands: about to read `bucket` for the first time, or done with its gradients."""

    bucket: str
    gradients_are_done: bool = False


def forward_stages(ops: ModuleType, w: ModelTensors, act: Activations) -> Iterator[Pause]:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block, with a pause before each bucket."""
    yield Pause("embedding")
    ops.embedding_forward(act.embedded, act.tokens, w.wte, w.wpe)
    for layer, (weights, block) in enumerate(zip(w.blocks, act.blocks, strict=True)):
        yield Pause(f"blocks.{layer}")
        gpt2_block.forward(ops, weights, block, act, stream_into(act, layer))
    yield Pause("lnf")
    last = stream_into(act, len(act.blocks))
    ops.layernorm_forward(act.lnf, act.lnf_mean, act.lnf_rstd, last, w.lnf_weight, w.lnf_bias)


def stream_into(act: Activations, layer: int) -> Tensor:
    """The residual stream (N, C) that enters a block; with the number of blocks, the one after the last."""
    return act.blocks[layer - 1].residual_out if layer else act.embedded


def forward_blocks(ops: ModuleType, w: ModelTensors, act: Activations) -> Tensor:
    """`forward_stages` in one go; returns the stream before the last layer norm."""
    for _ in forward_stages(ops, w, act):
        pass
    return stream_into(act, len(act.blocks))


def loss(ops: ModuleType, w: ModelTensors, act: Activations, *, vocab_size: int) -> None:
    """act.tokens, act.targets (B, T) -> act.losses (N): the cross-entropy of each token in nats."""
    forward_blocks(ops, w, act)
    for rows, logits in head_logits(ops, w, act):
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], vocab_size=vocab_size)


def head_logits(ops: ModuleType, w: ModelTensors, act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """act.lnf (N, C) -> chunk by chunk (which of the N, their logits (rows, Vp)); the next chunk takes the same memory."""
    for rows, logits in _chunks(act):
        ops.linear_forward(logits, part(act.lnf, rows), w.head, None, scratch=act.scratch)
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
    """act.losses (N), and `g` += scale * the gradient of their sum.

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
    s = act.scratch
    yield from forward_stages(ops, w, act)
    for rows, logits in _chunks(act):
        targets, lnf = act.targets.view(-1)[rows], part(act.lnf, rows)
        ops.linear_forward(logits, lnf, w.head, None, scratch=s)
        quantized = None if act.dlogits is None else part(replace(act.dlogits, plain=logits), slice(0, len(logits)))
        options = {"vocab_size": vocab_size, "quantized": quantized}
        ops.classifier_forward_backward(act.losses[rows], logits, targets, scale, **options)
        dlogits = logits if quantized is None else quantized
        ops.linear_backward(act.dlnf[rows], g.wte, None, dlogits, lnf, w.head, scratch=s)
    act.dresidual.zero_()
    statistics = act.lnf_mean, act.lnf_rstd
    top, dbias_below = act.gradients[-1].dresidual_out, g.blocks[-1].fcproj_bias
    last = stream_into(act, len(act.blocks))
    ops.layernorm_backward(top, g.lnf_weight, g.lnf_bias, act.dlnf, last, *statistics, w.lnf_weight, dbias_below, scratch=s)
    yield Pause("lnf", gradients_are_done=True)
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], act.gradients[layer], act
        dx, dbias_below = act.dresidual, None
        if layer:
            dx = act.gradients[layer - 1].dresidual_out
            dbias_below = g.blocks[layer - 1].fcproj_bias
        stream = stream_into(act, layer), dx, dbias_below
        gpt2_block.backward(ops, *block, *stream, recompute=recompute)
        yield Pause(f"blocks.{layer}", gradients_are_done=True)
    ops.embedding_backward(g.wte, g.wpe, act.dresidual, act.tokens, act.sorted_positions, scratch=s)
    yield Pause("embedding", gradients_are_done=True)


def part(form: Form, rows: slice) -> Form:
    """Some rows of a tensor (N, C), in all the forms it has for the head's products."""
    if isinstance(form, Tensor):
        return form[rows]
    assert form.rows is not None and form.columns is None
    return replace(form, rows=form.rows[rows], plain=plain(form)[rows])


def _chunks(act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """The head's chunks: (rows, the logits buffer for them); the last may be shorter."""
    N, chunk = act.losses.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        yield rows, act.logits[: rows.stop - rows.start]
