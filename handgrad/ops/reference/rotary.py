"""Queries and keys before attention: RMS norm of each head, and the rotation that tells positions apart.

All of it works in place in the packed (N, 3C), on the queries and keys of every head; the values stay as they are.
"""

import torch
from torch import Tensor

from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON

ROTARY_BASE = 10000.0

# Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): a head's channels i and i + D/2 are turned by the
# angle t base^(-2i/D) at position t.  y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin.  q k^T then depends on the distance of
# two positions alone. Backward: the turn back.


def rotary_forward(qkv_inout: Tensor, *, num_heads: int, length: int) -> None:
    """qkv_inout (N, 3C): row n stands at position n mod length."""
    rotate(qkv_inout, positions_of(qkv_inout, length), num_heads, 1)


def rotary_backward(dqkv_inout: Tensor, *, num_heads: int, length: int) -> None:
    """Turns the gradient after the rotation (N, 3C) into the gradient before it."""
    rotate(dqkv_inout, positions_of(dqkv_inout, length), num_heads, -1)


def rotate(qkv_inout: Tensor, positions: Tensor, num_heads: int, direction: int) -> None:
    """Rotates queries and keys at positions (N), forwards (1) or backwards (-1)."""
    wide = statistics_dtype(qkv_inout)
    first, second = queries_and_keys(qkv_inout, num_heads).chunk(2, dim=-1)  # (N, 2H, D/2) each
    half = first.shape[-1]
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=qkv_inout.device) / half)
    angles = (positions.to(torch.float64).unsqueeze(1) * frequencies).unsqueeze(1)
    cos, sin = angles.cos().to(wide), direction * angles.sin().to(wide)
    x1, x2 = first.to(wide), second.to(wide)
    turned1, turned2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    first.copy_(turned1)
    second.copy_(turned2)


def queries_and_keys(qkv: Tensor, num_heads: int) -> Tensor:
    """A view (N, 2H, D) of the packed (N, 3C): the heads of the queries, then those of the keys."""
    N, C3 = qkv.shape
    return qkv.view(N, 3 * num_heads, C3 // (3 * num_heads))[:, : 2 * num_heads]


def positions_of(qkv: Tensor, length: int) -> Tensor:
    return torch.arange(qkv.shape[0], device=qkv.device) % length


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


# QK-norm (Henry et al. 2020, https://arxiv.org/abs/2010.04245; with RMS norm: Dehghani et al. 2023,
# https://arxiv.org/abs/2302.05442): every head's query and key to a root mean square of 1, so that no score of attention is
# larger than sqrt(D).  y = x rstd.  Backward: dx = rstd (dy - y mean(dy y)), of the output y, which is all that is kept.


def qk_norm_forward(qkv_inout: Tensor, rstd: Tensor) -> None:
    """qkv_inout (N, 3C); rstd (N, 2H): of the queries' heads, then of the keys'."""
    heads = queries_and_keys(qkv_inout, rstd.shape[1] // 2)
    x = heads.to(rstd.dtype)
    rstd.copy_((x * x).mean(-1).add_(RMSNORM_EPSILON).rsqrt_())
    heads.copy_(x * rstd.unsqueeze(-1))


def qk_norm_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor) -> None:
    """Turns the gradient after the norm (N, 3C) into the gradient before it. qkv: as the norm left it."""
    dheads, heads = (queries_and_keys(t, rstd.shape[1] // 2) for t in (dqkv_inout, qkv))
    dy, y = dheads.to(rstd.dtype), heads.to(rstd.dtype)
    along = (dy * y).mean(-1, keepdim=True)
    dheads.copy_((dy - y * along) * rstd.unsqueeze(-1))


# Both in a row: y = R(x rstd). A rotation keeps lengths and angles, so mean(dy y) is the same before it and after it:
# dx = R^T(rstd (dy - y mean(dy y))), in which only outputs occur.


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, length: int) -> None:
    """qkv_inout (N, 3C), rstd (N, 2H): norm, then rotation; row n stands at position n mod length."""
    qk_norm_forward(qkv_inout, rstd)
    rotary_forward(qkv_inout, num_heads=rstd.shape[1] // 2, length=length)


def qk_norm_rotary_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    """Turns the gradient after both (N, 3C) into the gradient before them. qkv: as both left it."""
    qk_norm_backward(dqkv_inout, qkv, rstd)
    rotary_backward(dqkv_inout, num_heads=rstd.shape[1] // 2, length=length)
