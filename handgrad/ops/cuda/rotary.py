"""RMS norm of every head's query and key, and their rotation by position: one kernel forward and one backward. They work in
place in the packed queries, keys and values, and do not touch the values. With gains the forward reads the GEMM's output
and writes attention's input; the backward sums the gains' gradients in a fixed order.

A program takes whole token rows, one after another, and computes the angles of a row once for all its heads. Angles are
float64 until reduced to a fraction of a turn, so they stay exact at any position; its sine and cosine are float32.
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
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.reference.rotary import ROTARY_BASE, Frequencies

# Bytes that a warp holds of the first channels of the pairs: a lane loads 16 from each of several heads; their angles are
# the same, so it computes them once. The backward holds two tensors where the forward holds one.
FORWARD_BYTES_PER_WARP, BACKWARD_BYTES_PER_WARP = 2048, 1024

LOG2_BASE, LOG2_TURN = tl.constexpr(math.log2(ROTARY_BASE)), tl.constexpr(math.log2(2 * math.pi))
QUARTER = tl.constexpr(math.pi / 2)


def tile(turned_heads: int, width: int, itemsize: int, bytes_per_warp: int) -> tuple[int, int, int]:
    """(padded query and key heads, padded pairs per head, warps) of a program."""
    heads, pairs = triton.next_power_of_2(turned_heads), triton.next_power_of_2(width // 2)
    return heads, pairs, min(16, max(1, heads * pairs * itemsize // bytes_per_warp))


@functools.lru_cache(maxsize=8)
def frequency_table(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """The frequencies in turns per position, computed once, at set-up."""
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
    """Rounds once, after norm and rotation."""
    forward(qkv_inout, rstd, None, rstd.shape[1] // 2, length, rotary=True)


def qk_norm_rotary_backward(dqkv_inout: Tensor, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    """Rounds once, after the backward of both."""
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
    """Without `rstd` there is no norm; without `positions` (N), row n has position n mod length. `overlaps`: the kernel may
    overlap with the previous one, as in generation."""
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
    """(table of frequencies, None for `ROTARY_BASE`; number of query and key heads; their width)."""
    if frequencies is None:
        return None, 2 * num_heads, qkv.shape[1] // (3 * num_heads)
    width = 2 * len(frequencies)
    return frequency_table(frequencies, qkv.device), (qkv.shape[1] // width + num_heads) // 2, width


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
    """Rounds once, after norm, gain and rotation."""
    gained_forward(out, rstd, qkv, q_gain, k_gain, None, length, frequencies, scale, epsilon, plus)


def gained_forward(
    out: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    positions: Tensor | None,
    length: int,
    frequencies: tuple[float, ...],
    scale: float,
    epsilon: float,
    plus: float,
    *,
    overlaps: bool = False,
) -> None:
    """`positions` and `overlaps` as in `forward`."""
    (N, columns), turned_heads, D = qkv.shape, rstd.shape[1], q_gain.shape[0]
    heads = columns // D
    *block, warps = tile(turned_heads, D, qkv.element_size(), FORWARD_BYTES_PER_WARP)
    values = triton.next_power_of_2((heads - turned_heads) * D)
    tensors = out, rstd, qkv, q_gain, k_gain, positions, frequency_table(frequencies, qkv.device)
    shape = epsilon, N, length, columns, turned_heads, 2 * turned_heads - heads, D
    constants, options = (*block, values, scale, plus), overlapping(qkv, warps) if overlaps else {"num_warps": warps}
    launch(_gained_forward, (min(N, sizes.ROTARY_PROGRAMS),), *tensors, *shape, *constants, **options)


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
    scratch: Tensor,
) -> None:
    """Rounds once, after the backward of all three."""
    (N, columns), turned_heads, D = qkv.shape, rstd.shape[1], q_gain.shape[0]
    *block, warps = tile(turned_heads, D, qkv.element_size(), BACKWARD_BYTES_PER_WARP)
    programs = min(N, sizes.QK_GAIN_PROGRAMS)
    partials = float32_of(scratch, programs * 2 * D)
    tensors = dqkv_inout, partials, qkv, rstd, q_gain, k_gain, frequency_table(frequencies, qkv.device)
    shape = N, length, columns, turned_heads, 2 * turned_heads - columns // D, D
    launch(_gained_backward, (programs,), *tensors, *shape, *block, scale, plus, num_warps=warps)
    add_partials((dq_gain_acc, dk_gain_acc), partials, programs)


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
            cos, sin = angles_at(frequency, positions, row, length, SCALE)
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
        offset = tl.cast(row, tl.int64) * C3 + (head * D + pair)
        dx1, dx2 = pairs_at(dqkv + offset, inside, D)
        if rstd is not None:
            y1, y2 = pairs_at(qkv + offset, inside, D)
            row_rstd = tl.load(rstd + tl.cast(row, tl.int64) * HEADS + head, mask=head < HEADS, other=0.0)
            dx1, dx2 = through_norm(dx1, dx2, y1, y2, row_rstd, D)
        if ROTARY:
            cos, sin = angles_at(frequency, None, row, length, SCALE)
            dx1, dx2 = turned_back(dx1, dx2, cos, sin)
        store_pairs(dqkv + offset, dx1, dx2, inside, D)


@triton.jit
def through_norm(dy1, dy2, y1, y2, row_rstd, D: tl.constexpr):
    """The gradient before the norm of heads, from their outputs y."""
    along = tl.sum(dy1 * y1 + dy2 * y2, 1, keep_dims=True) / D
    return row_rstd * (dy1 - y1 * along), row_rstd * (dy2 - y2 * along)


@triton.jit
def turned_back(dx1, dx2, cos, sin):
    return dx1 * cos + dx2 * sin, dx2 * cos - dx1 * sin


@triton.jit
def places(HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):
    """(heads, pairs of a head, mask of those in range) of a row; pair i has the channels i and i + D/2."""
    head, pair = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_P)[None, :]
    return head, pair, (head < HEADS) & (pair < D // 2)


@triton.jit
def pairs_at(first, inside, D: tl.constexpr):
    """Both channels of the pairs, in float32; `first` points to the first ones."""
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    return x1, tl.load(first + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(first, x1, x2, inside, D: tl.constexpr):
    tl.store(first, x1.to(first.dtype.element_ty), mask=inside)
    tl.store(first + D // 2, x2.to(first.dtype.element_ty), mask=inside)


@triton.jit
def frequencies_at(table, pair, D: tl.constexpr):
    """Turns per position of the pairs, in float64: from the table or from `ROTARY_BASE`."""
    return turns_per_position(pair, D) if table is None else tl.load(table + pair, mask=pair < D // 2, other=0.0)


@triton.jit
def turns_per_position(pair, D: tl.constexpr):
    """base^(-2i/D) / (2 pi) of the pairs, in float64."""
    return tl.exp2(pair.to(tl.float64) * (-LOG2_BASE / (D // 2)) - LOG2_TURN)


@triton.jit
def angles_at(frequency, positions, row, length, SCALE: tl.constexpr):
    """(cos, sin) of the angles of a row, times the scale. Without `positions`, the row has position row mod length."""
    position = row % length if positions is None else tl.load(positions + row)
    return scaled_turn(frequency, position, SCALE)


@triton.jit
def scaled_turn(frequency, position, SCALE: tl.constexpr):
    cos, sin = turned(frequency * tl.cast(position, tl.float64))
    if SCALE != 1.0:
        cos, sin = cos * SCALE, sin * SCALE
    return cos, sin


@triton.jit
def turned(turns):
    """(cos, sin) in float32 of an angle in turns, in float64. Expands the rest beyond the nearest quarter, at most pi/4, in
    a series; the first omitted term is less than 3e-9 of the result."""
    quarter = tl.floor(turns * 4 + 0.5)
    x = (turns * 4 - quarter).to(tl.float32) * QUARTER
    z = x * x
    c = 1 - z * (1 / 2 - z * (1 / 24 - z * (1 / 720 - z * (1 / 40320 - z * (1 / 3628800)))))
    s = x * (1 - z * (1 / 6 - z * (1 / 120 - z * (1 / 5040 - z * (1 / 362880)))))
    quadrant = quarter.to(tl.int64) & 3
    odd = (quadrant & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((quadrant + 1) & 2 != 0, -cos, cos), tl.where(quadrant & 2 != 0, -sin, sin)


# With gains.


@triton.jit
def gains_at(q_gain, k_gain, head, pair, inside, QUERIES: tl.constexpr, D: tl.constexpr, PLUS: tl.constexpr):
    """The gains of both channels of every head's pairs."""
    is_query = head < QUERIES
    q1, q2 = pairs_at(q_gain + pair + head * 0, inside, D)
    k1, k2 = pairs_at(k_gain + pair + head * 0, inside, D)
    g1, g2 = tl.where(is_query, q1, k1), tl.where(is_query, q2, k2)
    if PLUS != 0:
        g1, g2 = g1 + PLUS, g2 + PLUS
    return g1, g2


@triton.jit
def _gained_forward(
    out, rstd, qkv, q_gain, k_gain, positions, frequencies, epsilon, N, length, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    VALUES: tl.constexpr, SCALE: tl.constexpr, PLUS: tl.constexpr = 0, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = tl.load(frequencies + pair, mask=pair < D // 2, other=0.0)
    g1, g2 = gains_at(q_gain, k_gain, head, pair, inside, QUERIES, D, PLUS)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    value = HEADS * D + tl.arange(0, VALUES)
    is_value = value < COLUMNS
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        first = tl.cast(row, tl.int64) * COLUMNS
        x1, x2 = pairs_at(qkv + first + (head * D + pair), inside, D)
        row_rstd = rstd_of(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True), D, epsilon)
        tl.store(rstd + tl.cast(row, tl.int64) * HEADS + head, row_rstd, mask=head < HEADS)
        y1, y2 = x1 * row_rstd * g1, x2 * row_rstd * g2
        cos, sin = angles_at(frequency, positions, row, length, SCALE)
        store_pairs(out + first + (head * D + pair), y1 * cos - y2 * sin, y2 * cos + y1 * sin, inside, D)
        tl.store(out + first + value, tl.load(qkv + first + value, mask=is_value), mask=is_value)


@triton.jit
def _gained_backward(
    dqkv, partials, qkv, rstd, q_gain, k_gain, frequencies, N, length, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, SCALE: tl.constexpr,
    PLUS: tl.constexpr = 0,
):  # fmt: skip
    """Program p takes the rows p, p + P, p + 2 P, ... and writes row p of partials (P, 2, D)."""
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = tl.load(frequencies + pair, mask=pair < D // 2, other=0.0)
    g1, g2 = gains_at(q_gain, k_gain, head, pair, inside, QUERIES, D, PLUS)
    sums1, sums2 = tl.zeros((BLOCK_H, BLOCK_P), tl.float32), tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * COLUMNS + (head * D + pair)
        dy1, dy2 = pairs_at(dqkv + offset, inside, D)
        cos, sin = angles_at(frequency, None, row, length, SCALE)
        du1, du2 = turned_back(dy1, dy2, cos, sin)
        x1, x2 = pairs_at(qkv + offset, inside, D)
        row_rstd = tl.load(rstd + tl.cast(row, tl.int64) * HEADS + head, mask=head < HEADS, other=0.0)
        dx1, dx2, dg1, dg2 = through_gained_norm(du1, du2, x1, x2, g1, g2, row_rstd, D)
        sums1 += dg1
        sums2 += dg2
        store_pairs(dqkv + offset, dx1, dx2, inside, D)
    is_query = head < QUERIES
    partial, in_row = partials + tl.program_id(0) * 2 * D + pair, pair < D // 2
    tl.store(partial, tl.sum(tl.where(is_query, sums1, 0.0), 0, keep_dims=True), mask=in_row)
    tl.store(partial + D // 2, tl.sum(tl.where(is_query, sums2, 0.0), 0, keep_dims=True), mask=in_row)
    tl.store(partial + D, tl.sum(tl.where(is_query, 0.0, sums1), 0, keep_dims=True), mask=in_row)
    tl.store(partial + D + D // 2, tl.sum(tl.where(is_query, 0.0, sums2), 0, keep_dims=True), mask=in_row)


@triton.jit
def through_gained_norm(du1, du2, x1, x2, g1, g2, row_rstd, D: tl.constexpr):
    """(gradient before a norm of heads, both channels; terms of the gains' gradients, both channels), from its input x."""
    n1, n2 = x1 * row_rstd, x2 * row_rstd
    dg1, dg2 = du1 * n1, du2 * n2
    du1, du2 = du1 * g1, du2 * g2
    along = tl.sum(du1 * n1 + du2 * n2, 1, keep_dims=True) / D
    return row_rstd * (du1 - n1 * along), row_rstd * (du2 - n2 * along), dg1, dg2
