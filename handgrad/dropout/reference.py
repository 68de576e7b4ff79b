"""Dropout: alone, and together with the residual sum."""

from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.dropout.masks import PAIR, ROW_STRIDE, ROWS, Dropout
from handgrad.ops.hashing import BITS32, WEYL, mixed

# Dropout (Srivastava et al. 2014), inverted: y = M x / (1 - p), M = 1 with probability 1 - p, else 0.
# Backward: dx = M dy / (1 - p). M is not stored: both make it from (seed, site, sample, row, column).


def sample_keys(dropout: Dropout) -> Tensor:
    """(B) int64: 32 bits for each sample, from its number's two halves."""
    low, high = dropout.samples & BITS32, (dropout.samples >> 32) & BITS32
    return mixed(low ^ mixed(high ^ dropout.stream))


def head_keys(keys: Tensor, num_heads: int) -> Tensor:
    """(..., H) from the keys (...) of samples: attention has a mask for every head."""
    return mixed((torch.arange(num_heads, device=keys.device) * WEYL + keys.unsqueeze(-1)) & BITS32)


def kept(key: Tensor, rows: int, columns: int, threshold: int) -> Tensor:
    """(rows, columns) bool: which numbers are kept under a key, a tensor of one number."""
    row = torch.arange(rows, device=key.device)
    first = torch.arange(0, columns, 2 * PAIR, device=key.device)
    column = (first.unsqueeze(1) + torch.arange(PAIR, device=key.device)).view(-1)  # the first of each pair
    shared = mixed((row // ROWS * WEYL + key) & BITS32)
    place = (row % ROWS * ROW_STRIDE).unsqueeze(1) + column
    number = mixed((place * WEYL + shared.unsqueeze(1)) & BITS32).view(rows, -1, 1, PAIR)
    return torch.cat([number & 0xFFFF, number >> 16], 2).view(rows, -1)[:, :columns] >= threshold


def masks(dropout: Dropout, tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows of a tensor (N, C), which of their numbers are kept), sample by sample: a mask's temporaries are large."""
    N, C = tensor.shape
    T = N // dropout.samples.shape[0]
    for sample, key in enumerate(sample_keys(dropout)):
        yield slice(sample * T, sample * T + T), kept(key, T, C, dropout.threshold)


def dropout_forward(out: Tensor, inp: Tensor, dropout: Dropout) -> None:
    """out (N, C) = inp (N, C) where it is kept, times 1 / (1 - p), else 0. `out` may be `inp`."""
    for rows, mask in masks(dropout, inp):
        torch.mul(inp[rows], dropout.scale, out=out[rows]).masked_fill_(~mask, 0)


def dropout_backward(dinp: Tensor, dout: Tensor, dropout: Dropout) -> None:
    """dinp (N, C) from dout (N, C), which it may be: the same mask and factor as forward."""
    dropout_forward(dinp, dout, dropout)


# Dropout and residual in one: out = residual + M x / (1 - p). Backward: the residual's gradient is that of out, and x has
# that of `dropout_backward`.


def dropout_residual_forward(branch_to_out_inout: Tensor, residual: Tensor, dropout: Dropout) -> None:
    """Turns a branch (N, C) into residual (N, C) + dropout(branch), in place, summed in float32 and rounded once."""
    exact = torch.float64 if residual.dtype == torch.float64 else torch.float32
    for rows, mask in masks(dropout, residual):
        branch = (branch_to_out_inout[rows].to(exact) * dropout.scale).masked_fill_(~mask, 0)
        branch_to_out_inout[rows] = branch.add_(residual[rows])
