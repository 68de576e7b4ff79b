"""The soft-capped classifier with few temporaries. Without a cap the reference runs."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops.cpu.linear import by_whole_vectors
from handgrad.ops.reference.classifier import Block, classifiers

CLASSIFIER_BLOCK_ELEMENTS = 1 << 17  # logits per block of rows: three temporaries of 512 KiB stay in cache


def capped_blocks(
    dtype: torch.dtype, logits_inout: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Iterator[Block]:
    """`log_softmax_blocks` of the reference, for capped logits. Masked (padded) columns get tanh -1 and slope 0."""
    N, Vp = logits_inout.shape
    logits_inout[:, vocab_size:] = -math.inf
    rows_per_block = max(1, CLASSIFIER_BLOCK_ELEMENTS // Vp)
    for row in range(0, N, rows_per_block):
        rows = slice(row, min(row + rows_per_block, N))
        tanh = capped_tanh(logits_inout[rows].to(dtype), softcap)
        z = tanh * softcap
        z[:, vocab_size:] = -math.inf
        log_p = torch.log_softmax(z, 1)
        yield rows, targets[rows].clamp(min=0).unsqueeze(1), log_p, tanh.square_().sub_(1).neg_()


def capped_tanh(logits: Tensor, softcap: float) -> Tensor:
    """tanh(x), x = logits / c. In float32 2 sigmoid(2 x) - 1, exact to 2^-22: torch's sigmoid is faster than its tanh."""
    if logits.dtype == torch.float64:
        return (logits / softcap).tanh_()
    tanh = logits * (2 / softcap)
    by_whole_vectors(torch.sigmoid_, tanh)
    return tanh.mul_(2).sub_(1)


classifier_forward, classifier_forward_backward, distill_forward_backward = classifiers(capped_blocks)
