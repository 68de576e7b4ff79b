"""RMS norm of every head's query and key, and their rotation by position: one kernel forward and one backward, in place in
the packed queries, keys and values, of which the values are not touched.

A program takes whole token rows, one after another, and has the angles of a row once for all its heads. Angles are float64
up to a fraction of a turn, so that they stay exact at any position; the sine and cosine of what is left are float32.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops import sizes
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.reference.rotary import ROTARY_BASE, Frequencies

# Bytes of the pairs' first channels that a warp holds: a lane loads 16 of each of several heads, whose angles are the same,
# and computes these once. The backward holds two tensors where the forward holds one.
FORWARD_BYTES_PER_WARP, BACKWARD_BYTES_PER_WARP = 2048, 1024

LOG2_BASE, LOG2_TURN = tl.constexpr(math.log2(ROTARY_BASE)), tl.constexpr(math.log2(2 * math.pi))
QUARTER = tl.constexpr(math.pi / 2)


def tile(turned_heads: int, width: int, itemsize: int, bytes_per_warp: int) -> tuple[int, int, int]:
    """(padded heads of queries and keys, padded pairs of a head, warps) of a program."""
    heads, pairs = triton.next_power_of_2(turned_heads), triton.next_power_of_2(width // 2)
    return heads, pairs, min(16, max(1, heads * pairs * itemsize // bytes_per_warp))


@functools.lru_cache(maxsize=8)
def frequency_table(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """The frequencies in turns per position, made once, at set-up."""
    return torch.tensor([angle / (2 * math.pi) for angle in frequencies], dtype=torch.float64, device=device)


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    forward(qkv_inout, None, None, num_heads, length, rotary=True, frequencies=frequencies, scale=scale)


def rotary_backward(
    dqkv_inout: Tensor, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    backward(dqkv_inout, None, None, num_heads, length, rotary=True, frequencies=frequencies, scale=scale)


def qk_norm_forward(qkv_inout: Tensor, rstd: Tensor) -> None:
    forward(qkv_inout, rstd, None, rstd.shape[1] // 2, 1, rotary=False)


def qk_norm_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor) -> None:
    backward(dqkv_inout, qkv, rstd, rstd.shape[1] // 2, 1, rotary=False)


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, length: int) -> None:
    """Rounded once, after both."""
    forward(qkv_inout, rstd, None, rstd.shape[1] // 2, length, rotary=True)


def qk_norm_rotary_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    """Rounded once, before both."""
    backward(dqkv_inout, qkv, rstd, rstd.shape[1] // 2, length, rotary=True)


def forward(
    qkv_inout: Tensor,
    rstd: Tensor | None,
    positions: Tensor | None,
    num_heads: int,
    length: int,
    *,
    rotary: bool,
    overlaps: bool = False,
    frequencies: Frequencies = None,
    scale: float = 1.0,
) -> None:
    """Without `rstd` there is no norm; without `positions` (N), row n stands at position n mod length. `overlaps`: as the
    launches of generation do."""
    table, turned_heads, width = heads_of(qkv_inout, num_heads, frequencies)
    N, columns = qkv_inout.shape
    *block, warps = tile(turned_heads, width, qkv_inout.element_size(), FORWARD_BYTES_PER_WARP)
    tensors, shape = (qkv_inout, rstd, positions, table), (N, length, columns, turned_heads, width)
    options: dict[str, Any] = overlapping(qkv_inout, warps) if overlaps else {"OVERLAPS": False, "num_warps": warps}
    launch(_forward, (min(N, sizes.ROTARY_PROGRAMS),), *tensors, *shape, *block, rotary, scale, **options)


def backward(
    dqkv_inout: Tensor,
    qkv: Tensor | None,
    rstd: Tensor | None,
    num_heads: int,
    length: int,
    *,
    rotary: bool,
    frequencies: Frequencies = None,
    scale: float = 1.0,
) -> None:
    table, turned_heads, width = heads_of(dqkv_inout, num_heads, frequencies)
    N, columns = dqkv_inout.shape
    *block, warps = tile(turned_heads, width, dqkv_inout.element_size(), BACKWARD_BYTES_PER_WARP)
    tensors, shape = (dqkv_inout, qkv, rstd, table), (N, length, columns, turned_heads, width)
    launch(_backward, (min(N, sizes.ROTARY_PROGRAMS),), *tensors, *shape, *block, rotary, scale, num_warps=warps)


def heads_of(qkv: Tensor, num_heads: int, frequencies: Frequencies) -> tuple[Tensor | None, int, int]:
    """(table of frequencies if they are not `ROTARY_BASE`'s, heads of queries and keys, their width)."""
    if frequencies is None:
        return None, 2 * num_heads, qkv.shape[1] // (3 * num_heads)
    width = 2 * len(frequencies)
    return frequency_table(frequencies, qkv.device), (qkv.shape[1] // width + num_heads) // 2, width


@triton.jit
def _forward(
    qkv, rstd, positions, frequencies, N, length, C3: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, ROTARY: tl.constexpr, SCALE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = frequencies_at(frequencies, pair, D)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        first = qkv + tl.cast(row, tl.int64) * C3 + (head * D + pair)
        x1, x2 = pairs_at(first, inside, D)
        if rstd is not None:
            row_rstd = rstd_of(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True), D)
            tl.store(rstd + tl.cast(row, tl.int64) * HEADS + head, row_rstd, mask=head < HEADS)
            x1, x2 = x1 * row_rstd, x2 * row_rstd
        if ROTARY:
            if positions is not None:
                position = tl.load(positions + row)
            else:
                position = row % length
            cos, sin = turned(frequency * tl.cast(position, tl.float64))
            if SCALE != 1.0:
                cos, sin = cos * SCALE, sin * SCALE
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        store_pairs(first, x1, x2, inside, D)


@triton.jit
def _backward(
    dqkv, qkv, rstd, frequencies, N, length, C3: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, ROTARY: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = frequencies_at(frequencies, pair, D)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * C3 + (head * D + pair)
        dx1, dx2 = pairs_at(dqkv + place, inside, D)
        if rstd is not None:
            y1, y2 = pairs_at(qkv + place, inside, D)
            row_rstd = tl.load(rstd + tl.cast(row, tl.int64) * HEADS + head, mask=head < HEADS, other=0.0)
            dx1, dx2 = through_norm(dx1, dx2, y1, y2, row_rstd, D)
        if ROTARY:
            cos, sin = turned(frequency * tl.cast(row % length, tl.float64))
            if SCALE != 1.0:
                cos, sin = cos * SCALE, sin * SCALE
            dx1, dx2 = turned_back(dx1, dx2, cos, sin)
        store_pairs(dqkv + place, dx1, dx2, inside, D)


@triton.jit
def through_norm(dy1, dy2, y1, y2, row_rstd, D: tl.constexpr):
    """The gradient before the norm of heads, of their outputs."""
    along = tl.sum(dy1 * y1 + dy2 * y2, 1, keep_dims=True) / D
    return row_rstd * (dy1 - y1 * along), row_rstd * (dy2 - y2 * along)


@triton.jit
def turned_back(dx1, dx2, cos, sin):
    return dx1 * cos + dx2 * sin, dx2 * cos - dx1 * sin


@triton.jit
def places(HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):
    """(heads, pairs of a head, which of them exist) of a row: pair i are the channels i and i + D/2."""
    head, pair = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_P)[None, :]
    return head, pair, (head < HEADS) & (pair < D // 2)


@triton.jit
def pairs_at(first, inside, D: tl.constexpr):
    """Both channels of the pairs whose first ones are at `first`, in float32."""
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    return x1, tl.load(first + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(first, x1, x2, inside, D: tl.constexpr):
    tl.store(first, x1.to(first.dtype.element_ty), mask=inside)
    tl.store(first + D // 2, x2.to(first.dtype.element_ty), mask=inside)


@triton.jit
def frequencies_at(table, pair, D: tl.constexpr):
    """Turns per position of the pairs, in float64: from the table, or by `ROTARY_BASE`."""
    if table is not None:
        return tl.load(table + pair, mask=pair < D // 2, other=0.0)
    else:
        return turns_per_position(pair, D)


@triton.jit
def turns_per_position(pair, D: tl.constexpr):
    """base^(-2i/D) / (2 pi) of the pairs, in float64."""
    return tl.exp2(pair.to(tl.float64) * (-LOG2_BASE / (D // 2)) - LOG2_TURN)


@triton.jit
def turned(turns):
    """(cos, sin) in float32 of an angle in turns, in float64: the series of what lies beyond the nearest quarter, at most
    pi/4, whose first term left out is less than 3e-9 of the result."""
    quarter = tl.floor(turns * 4 + 0.5)
    x = (turns * 4 - quarter).to(tl.float32) * QUARTER
    z = x * x
    c = 1 - z * (1 / 2 - z * (1 / 24 - z * (1 / 720 - z * (1 / 40320 - z * (1 / 3628800)))))
    s = x * (1 - z * (1 / 6 - z * (1 / 120 - z * (1 / 5040 - z * (1 / 362880)))))
    quadrant = quarter.to(tl.int64) & 3
    odd = (quadrant & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((quadrant + 1) & 2 != 0, -cos, cos), tl.where(quadrant & 2 != 0, -sin, sin)
