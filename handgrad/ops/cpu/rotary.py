"""Norm and rotation of queries and keys in few passes over memory, with cached cosines and sines.

y = x [cos cos] + swapped(x) [-sin sin], where `swapped` exchanges the halves of a head: operations on half heads would run
in loops too short for vector instructions. Between norm and rotation the numbers stay in float32.
"""

import functools

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.reference.rotary import Frequencies, frequencies_of, queries_and_keys

KEPT_TABLES = 8  # cached tables, one per length, head width and dtype


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    heads = queries_and_keys(qkv_inout, num_heads, frequencies)
    turn(heads, heads.to(accumulation_dtype(heads.dtype)), length, 1, frequencies, scale)


def rotary_backward(
    dqkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    heads = queries_and_keys(dqkv_inout, num_heads, frequencies)
    turn(heads, heads.to(accumulation_dtype(heads.dtype)), length, -1, frequencies, scale)


def turn(out: Tensor, x: Tensor, length: int, direction: int, frequencies: Frequencies = None, scale: float = 1.0) -> None:
    """out (N, 2H, D) = the rotation of x. x may be `out`; its contents are undefined afterwards."""
    cosines, sines = rotation(length, x.shape[-1], x.dtype, frequencies, scale)
    out, x = (t.unflatten(0, (-1, length)) for t in (out, x))
    swapped = x.roll(x.shape[-1] // 2, -1)
    torch.add(x.mul_(cosines), swapped.mul_(sines), alpha=direction, out=out)  # same bits as the reference's `rotate`


@functools.lru_cache(maxsize=KEPT_TABLES)
def rotation(length: int, width: int, dtype: torch.dtype, frequencies: Frequencies, scale: float) -> tuple[Tensor, Tensor]:
    """[cos cos] and [-sin sin] of positions 0 to length - 1, (length, 1, width)."""
    positions = torch.arange(length, dtype=torch.float64)[:, None, None]
    angles = positions * frequencies_of(torch.empty(0, width), frequencies)
    cos, sin = scale * angles.cos(), scale * angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def qk_norm_forward(qkv_inout: Tensor, rstd: Tensor) -> None:
    heads = queries_and_keys(qkv_inout, rstd.shape[1] // 2)
    x = heads.to(rstd.dtype)
    torch.mul(x, inverse_rms(rstd, x), out=heads)


def inverse_rms(rstd: Tensor, x: Tensor) -> Tensor:
    """Fills rstd (N, 2H) from heads x (N, 2H, D); returns it as (N, 2H, 1)."""
    torch.mean(x * x, -1, out=rstd)
    return rstd.add_(RMSNORM_EPSILON).rsqrt_().unsqueeze(-1)


def qk_norm_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor) -> None:
    dheads, dx = before_norm(dqkv_inout, qkv, rstd)
    dheads.copy_(dx)


def before_norm(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(the heads (N, 2H, D) of dqkv_inout, their gradient before the norm in rstd's dtype)."""
    dheads, heads = (queries_and_keys(t, rstd.shape[1] // 2) for t in (dqkv_inout, qkv))
    dy, y = dheads.to(rstd.dtype), heads.to(rstd.dtype)
    dx = dy * y
    torch.addcmul(dy, y, dx.mean(-1, keepdim=True), value=-1, out=dx)
    return dheads, dx.mul_(rstd.unsqueeze(-1))


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, length: int) -> None:
    heads = queries_and_keys(qkv_inout, rstd.shape[1] // 2)
    x = heads.to(rstd.dtype)
    turn(heads, x * inverse_rms(rstd, x), length, 1)


def qk_norm_rotary_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    dheads, dx = before_norm(dqkv_inout, qkv, rstd)
    turn(dheads, dx, length, -1)
