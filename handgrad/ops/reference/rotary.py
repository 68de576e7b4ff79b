"""Queries and keys before attention: RMS norm of each head, and the rotation that encodes positions.

These operations change the queries and keys of every head in the packed (N, 3C) and leave the values alone. With grouped
heads a row holds H query heads and K heads each of keys and values, (N, (H + 2K) D); there are D / 2 frequencies.
"""

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON, gain_of

ROTARY_BASE = 10000.0

# Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): rotate a head's channels i and i + D/2 by the angle
# t base^(-2i/D) at position t.  y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin.  q k^T then depends only on the distance of
# the two positions. Backward: the inverse rotation.
#
# A tuple sets other frequencies, in radians per position. YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
# also multiplies queries and keys by a scale, and the backward multiplies their gradients by it.

Frequencies = tuple[float, ...] | None


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """qkv_inout (N, 3C), rotated in place; row n has position n mod length."""
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
    """A view (N, H + K, D) of the packed (N, (H + 2K) D): the query heads, then the key heads."""
    N, columns = qkv.shape
    heads = columns // (2 * len(frequencies)) if frequencies else 3 * num_heads
    return qkv.view(N, heads, columns // heads)[:, : (heads + num_heads) // 2]


def positions_of(qkv: Tensor, length: int) -> Tensor:
    return torch.arange(qkv.shape[0], device=qkv.device) % length


# QK-norm (Henry et al. 2020, https://arxiv.org/abs/2010.04245; with RMS norm: Dehghani et al. 2023,
# https://arxiv.org/abs/2302.05442): gives every head's query and key a root mean square of 1, so no attention score
# exceeds sqrt(D).  y = x rstd.  Backward: dx = rstd (dy - y mean(dy y)), which needs only the output y; x is not kept.


def qk_norm_forward(qkv_inout: Tensor, rstd: Tensor) -> None:
    """qkv_inout (N, 3C), normalized in place; rstd (N, 2H): query heads, then key heads."""
    heads = queries_and_keys(qkv_inout, rstd.shape[1] // 2)
    x = heads.to(rstd.dtype)
    rstd.copy_((x * x).mean(-1).add_(RMSNORM_EPSILON).rsqrt_())
    heads.copy_(x * rstd.unsqueeze(-1))


def qk_norm_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor) -> None:
    """Turns the gradient after the norm (N, 3C) into the gradient before it. qkv: the norm's output."""
    dheads, heads = (queries_and_keys(t, rstd.shape[1] // 2) for t in (dqkv_inout, qkv))
    dy, y = dheads.to(rstd.dtype), heads.to(rstd.dtype)
    along = (dy * y).mean(-1, keepdim=True)
    dheads.copy_((dy - y * along) * rstd.unsqueeze(-1))


# Norm, then rotation: y = R(x rstd). A rotation keeps lengths and angles, so mean(dy y) is the same before and after it:
# dx = R^T(rstd (dy - y mean(dy y))), which needs only outputs.


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, length: int) -> None:
    """qkv_inout (N, 3C), rstd (N, 2H): norm, then rotation; row n has position n mod length."""
    qk_norm_forward(qkv_inout, rstd)
    rotary_forward(qkv_inout, num_heads=rstd.shape[1] // 2, length=length)


def qk_norm_rotary_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    """Turns the gradient after both (N, 3C) into the gradient before them. qkv: the output of both."""
    qk_norm_backward(dqkv_inout, qkv, rstd)
    rotary_backward(dqkv_inout, num_heads=rstd.shape[1] // 2, length=length)


# QK-norm with one gain for the query heads and one for the key heads (Qwen3, https://arxiv.org/abs/2505.09388), then the
# rotation: y = R(g n), n = x rstd. A gain may be zero, so the backward needs the input: with u = R^T dy,
# dg = sum over rows and heads of u n,  dx = rstd (g u - n mean(g u n)). `plus` as in `rmsnorm_forward`.


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
    plus: float = 0,
) -> None:
    """out, qkv (N, (H + 2K) D), rstd (N, H + K), gains (D): norm, gain, rotation; copies the values."""
    num_heads = gained_norm(out, rstd, qkv, q_gain, k_gain, epsilon, plus)
    rotary_forward(out, num_heads=num_heads, length=length, frequencies=frequencies, scale=scale)


def gained_norm(out: Tensor, rstd: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, epsilon: float, plus: float) -> int:
    """The norm and its gains, without the rotation. Returns H."""
    num_heads = query_heads(qkv, rstd, q_gain)
    out.copy_(qkv)
    heads = qkv.view(len(qkv), -1, len(q_gain))[:, : rstd.shape[1]]
    x, gains = heads.to(rstd.dtype), gains_of(rstd, num_heads, q_gain, k_gain, plus)
    rstd.copy_((x * x).mean(-1).add_(epsilon).rsqrt_())
    out.view(len(out), -1, len(q_gain))[:, : rstd.shape[1]] = (x * rstd.unsqueeze(-1) * gains).to(out.dtype)
    return num_heads


def query_heads(qkv: Tensor, rstd: Tensor, q_gain: Tensor) -> int:
    """H, from (H + 2K) D columns and H + K statistics."""
    return 2 * rstd.shape[1] - qkv.shape[1] // len(q_gain)


def gains_of(rstd: Tensor, num_heads: int, q_gain: Tensor, k_gain: Tensor, plus: float) -> Tensor:
    """(H + K, D): the gain of every head, in rstd's dtype."""
    counts = torch.tensor([num_heads, rstd.shape[1] - num_heads], device=rstd.device)
    return gain_of(torch.stack([q_gain, k_gain]), plus, rstd.dtype).repeat_interleave(counts, 0)


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
    plus: float = 0,
    scratch: Tensor | None = None,
) -> None:
    """Turns the gradient after all three (N, (H + 2K) D) into the gradient before them. qkv: their input."""
    num_heads, turned = query_heads(qkv, rstd, q_gain), rstd.shape[1]
    dheads, heads = (t.view(len(t), -1, len(q_gain))[:, :turned] for t in (dqkv_inout, qkv))
    du = dheads.to(rstd.dtype)
    rotate_heads(du, positions_of(qkv, length), -1, frequencies, scale)
    normalized = heads.to(rstd.dtype) * rstd.unsqueeze(-1)
    products = (du * normalized).sum(0)
    dq_gain_acc.add_(products[:num_heads].sum(0))
    dk_gain_acc.add_(products[num_heads:].sum(0))
    du = du * gains_of(rstd, num_heads, q_gain, k_gain, plus)
    along = (du * normalized).mean(-1, keepdim=True)
    dheads.copy_((du - normalized * along) * rstd.unsqueeze(-1))
