"""The whole GPT-2: embedding, blocks, loss head; forward, and forward with backward.

The head shares the token embedding and works in chunks of tokens: a chunk's logits become its losses and, in place, its
gradient, so the full (N, Vp) logits never exist.
"""

from collections.abc import Iterator
from types import ModuleType

from torch import Tensor

from handgrad.model import gpt2_block
from handgrad.model.activations import Activations
from handgrad.model.parameters import ModelTensors


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
        ops.linear_forward(logits, act.lnf[rows], w.wte, None, scratch=act.scratch)
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
        ops.linear_forward(logits, act.lnf[rows], w.wte, None, scratch=s)
        ops.classifier_forward_backward(act.losses[rows], logits, act.targets.view(-1)[rows], scale, vocab_size=vocab_size)
        dlogits = logits
        ops.linear_backward(act.dlnf[rows], g.wte, None, dlogits, act.lnf[rows], w.wte, scratch=s)
    act.dresidual.zero_()
    statistics = act.lnf_mean, act.lnf_rstd
    dbias_below = g.blocks[-1].fcproj_bias
    ops.layernorm_backward(
        act.dresidual, g.lnf_weight, g.lnf_bias, act.dlnf, last, *statistics, w.lnf_weight, dbias_below, scratch=s
    )
    for layer in reversed(range(len(w.blocks))):
        x = act.blocks[layer - 1].residual_out if layer else act.embedded
        dbias_below = g.blocks[layer - 1].fcproj_bias if layer else None
        gradients = g.blocks[layer]
        gpt2_block.backward(ops, w.blocks[layer], gradients, act.blocks[layer], act, x, dbias_below, recompute=recompute)
    ops.embedding_backward(g.wte, g.wpe, act.dresidual, act.tokens, act.sorted_positions, scratch=s)


def _chunks(act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """The head's chunks: (rows, the logits buffer for them); the last may be shorter."""
    N, chunk = act.lnf.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        yield rows, act.logits[: rows.stop - rows.start]
