"""Queries and keys before attention: RMS norm of each head, and the rotation that tells positions apart.

All of it works on the queries and keys of every head in the packed (N, 3C); the values stay as they are. With grouped heads
a row is H heads of queries and K each of keys and values, (N, (H + 2K) D), and D is twice as many as there are frequencies.
"""

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON

ROTARY_BASE = 10000.0

# Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): a head's channels i and i + D/2 are turned by the
# angle t base^(-2i/D) at position t.  y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin.  q k^T then depends on the distance of
# two positions alone. Backward: the turn back.
#
# Other frequencies, in radians per position, come as a tuple. YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
# also multiplies queries and keys by a scale; so does the backward.

Frequencies = tuple[float, ...] | None


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """qkv_inout (N, 3C): row n stands at position n mod length."""
    rotate(qkv_inout, positions_of(qkv_inout, length), num_heads, 1, frequencies, scale)


def rotary_backward(
    dqkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """Turns the gradient after the rotation (N, 3C) into the gradient before it."""
    rotate(dqkv_inout, positions_of(dqkv_inout, length), num_heads, -1, frequencies, scale)


def rotate(
    qkv_inout: Tensor,
    positions: Tensor,
    num_heads: int,
    direction: int,
    frequencies: Frequencies = None,
    scale: float = 1.0,
) -> None:
    """Rotates queries and keys at positions (N), forwards (1) or backwards (-1)."""
    rotate_heads(queries_and_keys(qkv_inout, num_heads, frequencies), positions, direction, frequencies, scale)


def rotate_heads(heads_inout: Tensor, positions: Tensor, direction: int, frequencies: Frequencies, scale: float) -> None:
    """Rotates heads (N, heads, D) at positions (N), forwards (1) or backwards (-1)."""
    wide = accumulation_dtype(heads_inout.dtype)
    first, second = heads_inout.chunk(2, dim=-1)  # (N, heads, D/2) each
    angles = (positions.to(torch.float64).unsqueeze(1) * frequencies_of(heads_inout, frequencies)).unsqueeze(1)
    cos, sin = (scale * angles.cos()).to(wide), direction * (scale * angles.sin()).to(wide)
    x1, x2 = first.to(wide), second.to(wide)
    turned1, turned2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    first.copy_(turned1)
    second.copy_(turned2)


def frequencies_of(heads: Tensor, frequencies: Frequencies) -> Tensor:
    """The frequencies (D/2) in float64, by default from `ROTARY_BASE`."""
    if frequencies is not None:
        return torch.tensor(frequencies, dtype=torch.float64, device=heads.device)
    half = heads.shape[-1] // 2
    return ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=heads.device) / half)


def queries_and_keys(qkv: Tensor, num_heads: int, frequencies: Frequencies = None) -> Tensor:
    """A view (N, H + K, D) of the packed (N, (H + 2K) D): the heads of the queries, then of the keys."""
    N, columns = qkv.shape
    heads = columns // (2 * len(frequencies)) if frequencies else 3 * num_heads
    return qkv.view(N, heads, columns // heads)[:, : (heads + num_heads) // 2]


def positions_of(qkv: Tensor, length: int) -> Tensor:
    return torch.arange(qkv.shape[0], device=qkv.device) % length


# QK-norm (Henry et al. 2020, https://arxiv.org/abs/2010.04245; with RMS norm: Dehghani et al. 2023,
# https://arxiv.org/abs/2302.05442): every head's query and key to a root mean square of 1, so that no score of attention is
# larger than sqrt(D).  y = x rstd.  Backward: dx = rstd (dy - y mean(dy y)), of the output y alone; x is not kept.


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


# QK-norm with a gain for the queries' heads and one for the keys' (Qwen3, https://arxiv.org/abs/2505.09388), then the
# rotation: y = R(g n), n = x rstd. A gain may be zero, so the backward needs the input: with u = R^T dy,
# dg = sum over rows and heads of u n,  dx = rstd (g u - n mean(g u n)).


def gained_qk_norm_rotary_forward(
    out: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    length: int,
    frequencies: tuple[float, ...],
    scale: float,
    epsilon: float,
) -> None:
    """out, qkv (N, (H + 2K) D), rstd (N, H + K), gains (D): norm, gain, rotation; the values are copied."""
    num_heads = gained_norm(out, rstd, qkv, q_gain, k_gain, epsilon)
    rotary_forward(out, num_heads=num_heads, length=length, frequencies=frequencies, scale=scale)


def gained_norm(out: Tensor, rstd: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, epsilon: float) -> int:
    """The norm, with its gains, before the rotation. Returns H."""
    num_heads = query_heads(qkv, rstd, q_gain)
    out.copy_(qkv)
    heads = qkv.view(len(qkv), -1, len(q_gain))[:, : rstd.shape[1]]
    x, gains = heads.to(rstd.dtype), gains_of(rstd, num_heads, q_gain, k_gain)
    rstd.copy_((x * x).mean(-1).add_(epsilon).rsqrt_())
    out.view(len(out), -1, len(q_gain))[:, : rstd.shape[1]] = (x * rstd.unsqueeze(-1) * gains).to(out.dtype)
    return num_heads


def query_heads(qkv: Tensor, rstd: Tensor, q_gain: Tensor) -> int:
    """H of (H + 2K) D columns with H + K statistics."""
    return 2 * rstd.shape[1] - qkv.shape[1] // len(q_gain)


def gains_of(rstd: Tensor, num_heads: int, q_gain: Tensor, k_gain: Tensor) -> Tensor:
    """(H + K, D): the gain of every head, of rstd's dtype."""
    counts = torch.tensor([num_heads, rstd.shape[1] - num_heads], device=rstd.device)
    return torch.stack([q_gain, k_gain]).to(rstd.dtype).repeat_interleave(counts, 0)


def gained_qk_norm_rotary_backward(
    dqkv_inout: Tensor,
    dq_gain_acc: Tensor,
    dk_gain_acc: Tensor,
    qkv: Tensor,
    rstd: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    length: int,
    frequencies: tuple[float, ...],
    scale: float,
    scratch: Tensor | None = None,
) -> None:
    """Turns the gradient after all three (N, (H + 2K) D) into the gradient before them. qkv: as it was before them."""
    num_heads, turned = query_heads(qkv, rstd, q_gain), rstd.shape[1]
    dheads, heads = (t.view(len(t), -1, len(q_gain))[:, :turned] for t in (dqkv_inout, qkv))
    du = dheads.to(rstd.dtype)
    rotate_heads(du, positions_of(qkv, length), -1, frequencies, scale)
    normalized = heads.to(rstd.dtype) * rstd.unsqueeze(-1)
    products = (du * normalized).sum(0)
    dq_gain_acc.add_(products[:num_heads].sum(0))
    dk_gain_acc.add_(products[num_heads:].sum(0))
    du = du * gains_of(rstd, num_heads, q_gain, k_gain)
    along = (du * normalized).mean(-1, keepdim=True)
    dheads.copy_((du - normalized * along) * rstd.unsqueeze(-1))
