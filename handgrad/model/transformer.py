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
        ops.linear_forward(logits, act.lnf[rows], w.wte, None)
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], vocab_size=vocab_size)


def loss_and_gradients(
    ops: ModuleType,
    w: ModelTensors,
    g: ModelTensors,
    act: Activations,
    *,
    vocab_size: int,
    scale: float,
    recompute: int,
) -> None:
    """act.losses (N), and `g` += scale * the gradient of their sum.

    For the mean over an optimizer step's tokens, `scale` is 1 / tokens_per_step in every micro-step.
    """
    last = forward_blocks(ops, w, act)
    for rows, logits in _chunks(act):
        ops.linear_forward(logits, act.lnf[rows], w.wte, None)
        ops.classifier_forward_backward(
            act.losses[rows], logits, act.targets.view(-1)[rows], vocab_size=vocab_size, scale=scale
        )
        dlogits = logits
        ops.linear_backward(act.dlnf[rows], g.wte, None, dlogits, act.lnf[rows], w.wte)
    act.dresidual.zero_()
    ops.layernorm_backward(
        act.dresidual, g.lnf_weight, g.lnf_bias, act.dlnf, last, act.lnf_mean, act.lnf_rstd, w.lnf_weight
    )
    for layer in reversed(range(len(w.blocks))):
        x = act.blocks[layer - 1].residual_out if layer else act.embedded
        gpt2_block.backward(ops, w.blocks[layer], g.blocks[layer], act.blocks[layer], act, x, recompute=recompute)
    ops.embedding_backward(g.wte, g.wpe, act.dresidual, act.tokens)


def _chunks(act: Activations) -> Iterator[tuple[slice, Tensor]]:
    """The head's chunks: (rows, the logits buffer for them); the last may be shorter."""
    N, chunk = act.lnf.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        yield rows, act.logits[: rows.stop - rows.start]
