"""The whole GPT-2: embedding, blocks, loss head; forward, and forward with backward.

The head shares the token embedding and works in chunks of tokens: a chunk's logits become its losses and, in place, its
gradient, so the full (N, Vp) logits never exist.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from torch import Tensor

from handgrad.model import gpt2_block
from handgrad.model.activations import Activations
from handgrad.model.parameters import ModelTensors
from handgrad.ops.fp8 import Form, plain


def forward_blocks(ops: ModuleType, w: ModelTensors, act: Activations) -> Tensor:
    """act.tokens (B, T) -> act.lnf (N, C), the normalised stream after the last block; returns the stream before it."""
    ops.embedding_forward(act.embedded, act.tokens, w.wte, w.wpe)
    x = act.embedded
    for weights, block in zip(w.blocks, act.blocks, strict=True):
        gpt2_block.forward(ops, weights, block, act, x)
        x = block.residual_out
    ops.layernorm_forward(act.lnf, act.lnf_mean, act.lnf_rstd, x, w.lnf_weight, w.lnf_bias)
    return x


def loss(ops: ModuleType, w: ModelTensors, act: Activations, *, vocab_size: int) -> None:
    """act.tokens, act.targets (B, T) -> act.losses (N): the cross-entropy of each token in nats."""
    forward_blocks(ops, w, act)
    for rows, logits in _chunks(act):
        ops.linear_forward(logits, part(act.lnf, rows), w.head, None, scratch=act.scratch)
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], vocab_size=vocab_size)


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
    s = act.scratch
    last = forward_blocks(ops, w, act)
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
    ops.layernorm_backward(top, g.lnf_weight, g.lnf_bias, act.dlnf, last, *statistics, w.lnf_weight, dbias_below, scratch=s)
    for layer in reversed(range(len(w.blocks))):
        block = w.blocks[layer], g.blocks[layer], act.blocks[layer], act.gradients[layer], act
        x, dx, dbias_below = act.embedded, act.dresidual, None
        if layer:
            x, dx = act.blocks[layer - 1].residual_out, act.gradients[layer - 1].dresidual_out
            dbias_below = g.blocks[layer - 1].fcproj_bias
        gpt2_block.backward(ops, *block, x, dx, dbias_below, recompute=recompute)
    ops.embedding_backward(g.wte, g.wpe, act.dresidual, act.tokens, act.sorted_positions, scratch=s)


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
