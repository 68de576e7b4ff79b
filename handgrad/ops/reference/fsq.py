"""Finite scalar quantisation: a code is a few small whole numbers, so no codebook is learned."""

import functools
import math

import torch
from torch import Tensor

# FSQ (Mentzer et al. 2023, https://arxiv.org/abs/2309.15505, their appendix A.1). Channel d has L levels, h = L // 2:
#
#   bound   y = (tanh(x + shift) r - offset) / h,   r = (L - 1) (1 + 1e-3) / 2,   offset = 1/2 for an even L, else 0,
#           shift = atanh(offset / r), so that y = 0 at x = 0
#   round   q = round(h y) / h, one of L numbers of [-1, 1].   code = sum over d of (h q + h) times the levels before d
#
# Backward of the bound: dx = dy (1 - tanh^2) r / h. Rounding has no useful gradient: the straight-through estimator (Bengio
# et al. 2013, https://arxiv.org/abs/1308.3432) takes dq for dy, so nothing runs.
SLACK = 1e-3  # lets the outermost levels win without an infinite x


def fsq_forward(out: Tensor, inp: Tensor, *, levels: tuple[int, ...]) -> None:
    """The bound, before rounding: out, inp (B, Y, X, Z), a channel for each of `levels`."""
    ranges, offsets, shifts, halves = (row(values, inp) for values in constants(levels))
    out.copy_((torch.tanh(inp + shifts) * ranges - offsets) / halves)


def fsq_backward(dhidden_inout: Tensor, inp: Tensor, *, levels: tuple[int, ...]) -> None:
    """Turns the gradient (B, Y, X, Z) after the bound, or after rounding, into the gradient before it, in place."""
    ranges, _, shifts, halves = (row(values, inp) for values in constants(levels))
    tanh = torch.tanh(inp + shifts)
    dhidden_inout.mul_((1 - tanh * tanh) * (ranges / halves))


def fsq_round(out: Tensor, codes: Tensor, bounded: Tensor, *, levels: tuple[int, ...]) -> None:
    """out (B, Y, X, Z): `bounded` at the nearest levels; codes (B, Y X) int64: their numbers."""
    halves = [n // 2 for n in levels]
    steps = torch.round(bounded * row(halves, bounded))
    out.copy_(steps / row(halves, bounded))
    digits = steps.to(torch.int64) + row(halves, codes)
    codes.copy_((digits * row(place_values(levels), codes)).sum(3).view(codes.shape))


def fsq_values(out: Tensor, codes: Tensor, *, levels: tuple[int, ...]) -> None:
    """out (B, Y, X, Z) from codes (B, Y X): what `fsq_round` wrote for them."""
    halves = [n // 2 for n in levels]
    digits = codes.view(*out.shape[:3], 1) // row(place_values(levels), codes) % row(levels, codes)
    out.copy_((digits - row(halves, codes)).to(out.dtype) / row(halves, out))


def constants(levels: tuple[int, ...]) -> tuple[list[float], list[float], list[float], list[float]]:
    """(r, offset, shift, h) of each channel."""
    ranges = [(n - 1) * (1 + SLACK) / 2 for n in levels]
    offsets = [0.0 if n % 2 else 0.5 for n in levels]
    shifts = [math.atanh(offset / r) for offset, r in zip(offsets, ranges, strict=True)]
    return ranges, offsets, shifts, [float(n // 2) for n in levels]


def place_values(levels: tuple[int, ...]) -> list[int]:
    """The factor of each channel's level in a code: 1, L1, L1 L2, ..."""
    return [math.prod(levels[:channel]) for channel in range(len(levels))]


def row(values: list[float] | list[int] | tuple[int, ...], like: Tensor) -> Tensor:
    """The values (Z), beside (B, Y, X, Z), in the dtype of `like`."""
    return made_once(tuple(values), like.dtype, like.device)


@functools.cache
def made_once(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Read-only. A CUDA graph cannot capture the copy of these values from the host."""
    return torch.tensor(values, dtype=dtype, device=device)
