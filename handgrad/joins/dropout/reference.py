"""Dropout in plain torch: alone, with the residual sum, and in attention; a site's masks and their seeds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.hashing import BITS32, WEYL, mixed
from handgrad.ops.reference.attention import CAUSAL, Mask, attention_scratch_bytes, masked_scores, split_heads  # noqa: F401

# 16 random bits decide each number, so probabilities are rounded to multiples of 2^-16.
BITS = 16

# The layout of a mask's random numbers (docs/operations/dropout.md). 16 rows share a key; under it, a row's numbers begin
# 2^20 places after the previous row's (no row is longer). A 32-bit hash serves two columns 8 apart, because on tensor cores
# one lane holds both, in a tile of M or of M^T.
ROWS, ROW_STRIDE, PAIR = 16, 1 << 20, 8


@dataclass(frozen=True)
class Dropout:
    """A dropout site of the model. Its fields determine its masks: the same ones forward and backward, on any device."""

    samples: Tensor  # (B) int64: sample numbers of the micro-batch in the run
    probability: float  # of dropping a number
    seed: int
    site: int  # its number, unique in the model

    @property
    def stream(self) -> int:
        """A 32-bit hash of seed and site."""
        return mixed(self.site ^ mixed(self.seed))

    @property
    def threshold(self) -> int:
        """A number is kept if its random bits are at least this."""
        return round(self.probability * (1 << BITS))

    @property
    def scale(self) -> float:
        """The factor for kept numbers, 1 / (kept fraction), which preserves the mean."""
        return (1 << BITS) / ((1 << BITS) - self.threshold)


# Dropout (Srivastava et al. 2014), inverted: y = M x / (1 - p), M = 1 with probability 1 - p, else 0.
# Backward: dx = M dy / (1 - p). M is not stored: both passes compute it from (seed, site, sample, row, column).


def sample_keys(dropout: Dropout) -> Tensor:
    """(B) int64: a 32-bit key per sample, from both halves of its number."""
    low, high = dropout.samples & BITS32, (dropout.samples >> 32) & BITS32
    return mixed(low ^ mixed(high ^ dropout.stream))


def head_keys(keys: Tensor, num_heads: int) -> Tensor:
    """(..., H) head keys from sample keys (...): attention has a mask per head."""
    return mixed((torch.arange(num_heads, device=keys.device) * WEYL + keys.unsqueeze(-1)) & BITS32)


def kept(key: Tensor, rows: int, columns: int, threshold: int) -> Tensor:
    """(rows, columns) bool: the numbers kept under `key`, a one-element tensor."""
    row = torch.arange(rows, device=key.device)
    first = torch.arange(0, columns, 2 * PAIR, device=key.device)
    column = (first.unsqueeze(1) + torch.arange(PAIR, device=key.device)).view(-1)  # the first of each pair
    shared = mixed((row // ROWS * WEYL + key) & BITS32)
    index = (row % ROWS * ROW_STRIDE).unsqueeze(1) + column
    number = mixed((index * WEYL + shared.unsqueeze(1)) & BITS32).view(rows, -1, 1, PAIR)
    return torch.cat([number & 0xFFFF, number >> 16], 2).view(rows, -1)[:, :columns] >= threshold


def masks(dropout: Dropout, tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of `tensor` (N, C), their mask) sample by sample, because a mask's temporaries are large."""
    N, C = tensor.shape
    T = N // dropout.samples.shape[0]
    for sample, key in enumerate(sample_keys(dropout)):
        yield slice(sample * T, sample * T + T), kept(key, T, C, dropout.threshold)


def dropout_forward(out: Tensor, inp: Tensor, dropout: Dropout) -> None:
    """out (N, C) = inp (N, C) / (1 - p) where kept, else 0. `out` may be `inp`."""
    for rows, mask in masks(dropout, inp):
        torch.mul(inp[rows], dropout.scale, out=out[rows]).masked_fill_(~mask, 0)


def dropout_backward(dinp: Tensor, dout: Tensor, dropout: Dropout) -> None:
    """dinp (N, C) from dout (N, C), with the mask and factor of the forward. `dinp` may be `dout`."""
    dropout_forward(dinp, dout, dropout)


# Dropout and residual in one: out = residual + M x / (1 - p). Backward: dresidual = dout, dx = `dropout_backward` of it.


def dropout_residual_forward(branch_to_out_inout: Tensor, residual: Tensor, dropout: Dropout) -> None:
    """Replaces a branch (N, C) by residual (N, C) + dropout(branch), in place. Sums in float32 and rounds once."""
    exact = accumulation_dtype(residual.dtype)
    for rows, mask in masks(dropout, residual):
        branch = (branch_to_out_inout[rows].to(exact) * dropout.scale).masked_fill_(~mask, 0)
        branch_to_out_inout[rows] = branch.add_(residual[rows])


# In attention, M a mask of zeros and 1 / (1 - p):  y = (M P) v,  dv = (M P)^T dy,  dP = M (dy v^T).


def attention_mask(weights: Tensor, dropout: Dropout, sample: int) -> Tensor:
    """M for the probabilities (H, T, T) of one sample. Rows are queries."""
    H, T, _ = weights.shape
    keys = head_keys(sample_keys(dropout)[sample], H)
    mask = torch.stack([kept(key, T, T, dropout.threshold) for key in keys])  # one by one: the temporaries are large
    return mask.to(weights.dtype).mul_(dropout.scale)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, dropout: Dropout, *, mask: Mask = CAUSAL) -> None:
    """The plain operation with the probabilities masked, each head's by a mask of its own."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)
    y = out.view(B, T, H, -1).transpose(1, 2)
    for b in range(B):
        scores = masked_scores(q[b], k[b], mask.hidden(b, T, qkv.device))
        lse[b] = scores.logsumexp(-1)
        weights = torch.exp_(scores.sub_(lse[b].unsqueeze(-1)))
        y[b] = torch.matmul(weights.mul_(attention_mask(weights, dropout, b)), v[b])


def attention_backward(
    dqkv: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    dropout: Dropout,
    *,
    scratch: Tensor | None = None,
    mask: Mask = CAUSAL,
) -> None:
    """The plain operation with the masks of the forward."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    dq, dk, dv = split_heads(dqkv, B, H)
    scale = 1.0 / math.sqrt(q.shape[-1])
    for b in range(B):
        scores = masked_scores(q[b], k[b], mask.hidden(b, T, qkv.device))
        weights = torch.exp_(scores.sub_(lse[b].unsqueeze(-1)))
        keep = attention_mask(weights, dropout, b)
        dweights = torch.matmul(dy[b], v[b].transpose(-1, -2)).mul_(keep)
        dscores = dweights.sub_((dy[b] * y[b]).sum(-1, keepdim=True)).mul_(weights)
        dv[b] = torch.matmul((weights * keep).transpose(-1, -2), dy[b])
        dq[b] = torch.matmul(dscores, k[b]).mul_(scale)
        dk[b] = torch.matmul(dscores.transpose(-1, -2), q[b]).mul_(scale)
