"""The softly capped classifier in few temporaries. Without a cap it is the reference's."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops import reference
from handgrad.ops.cpu.activations import by_whole_vectors
from handgrad.ops.reference.classifier import check_trained, clear_untrained

CLASSIFIER_BLOCK_ELEMENTS = 1 << 17  # rows of logits worked on at a time: three temporaries of 512 KiB stay in cache


def classifier_forward(
    losses: Tensor, logits_inout: Tensor, targets: Tensor, *, vocab_size: int, softcap: float = 0.0, untrained: bool = False
) -> None:
    if not softcap:
        reference.classifier_forward(losses, logits_inout, targets, vocab_size=vocab_size, untrained=untrained)
        return
    check_trained(targets, untrained)
    for rows, target, log_p, _ in log_softmax_blocks(losses.dtype, logits_inout, targets, vocab_size, softcap):
        losses[rows] = log_p.gather(1, target).squeeze(1).neg_()
    if untrained:
        clear_untrained(targets, losses)


def classifier_forward_backward(
    losses: Tensor,
    logits_to_dlogits_inout: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    untrained: bool = False,
) -> None:
    if not softcap:
        plain = losses, logits_to_dlogits_inout, targets, scale
        reference.classifier_forward_backward(*plain, vocab_size=vocab_size, untrained=untrained)
        return
    check_trained(targets, untrained)
    blocks = log_softmax_blocks(losses.dtype, logits_to_dlogits_inout, targets, vocab_size, softcap)
    for rows, target, log_p, tanh in blocks:
        losses[rows] = log_p.gather(1, target).squeeze(1).neg_()
        p = log_p.exp_()  # exactly 0 in the padded columns
        p.scatter_add_(1, target, torch.full_like(target, -1, dtype=p.dtype))
        minus_slope = tanh.square_().sub_(1)
        torch.mul(p.mul_(minus_slope), -scale, out=logits_to_dlogits_inout[rows])
    if untrained:
        clear_untrained(targets, losses, logits_to_dlogits_inout)


def log_softmax_blocks(
    dtype: torch.dtype, logits_inout: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, targets (R, 1) with word 0 for those below 0, log softmax (R, Vp), tanh (R, Vp)) by blocks of rows. Masks the
    padded columns of the logits, in which tanh is -1, the slope 0."""
    N, Vp = logits_inout.shape
    logits_inout[:, vocab_size:] = -math.inf
    rows_per_block = max(1, CLASSIFIER_BLOCK_ELEMENTS // Vp)
    for row in range(0, N, rows_per_block):
        rows = slice(row, min(row + rows_per_block, N))
        tanh = capped_tanh(logits_inout[rows].to(dtype), softcap)
        z = tanh * softcap
        z[:, vocab_size:] = -math.inf
        yield rows, targets[rows].clamp(min=0).unsqueeze(1), torch.log_softmax(z, 1), tanh


def capped_tanh(logits: Tensor, softcap: float) -> Tensor:
    """tanh(x) of x = logits / c. In float32 it is 2 sigmoid(2 x) - 1, to 2^-22: torch's sigmoid is faster than its tanh."""
    if logits.dtype == torch.float64:
        return (logits / softcap).tanh_()
    tanh = logits * (2 / softcap)
    by_whole_vectors(torch.sigmoid_, tanh)
    return tanh.mul_(2).sub_(1)
