"""RMS norm of every head's query and key with a gain, and their rotation: one kernel forward, from what the product made
into what attention reads, and one backward, in place; the gains' gradients by sums in a fixed order.

A program takes whole token rows, one after another, as the kernels of `rotary` do.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops import sizes
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.cuda.rotary import (
    BACKWARD_BYTES_PER_WARP,
    FORWARD_BYTES_PER_WARP,
    frequency_table,
    pairs_at,
    places,
    store_pairs,
    tile,
    turned,
)


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
    """Rounded once, after all three."""
    forward(out, rstd, qkv, q_gain, k_gain, None, length, frequencies, scale, epsilon)


def forward(
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
) -> None:
    """Without `positions` (N), row n stands at position n mod length."""
    (N, columns), turned_heads, D = qkv.shape, rstd.shape[1], q_gain.shape[0]
    heads = columns // D
    *block, warps = tile(turned_heads, D, qkv.element_size(), FORWARD_BYTES_PER_WARP)
    values = triton.next_power_of_2((heads - turned_heads) * D)
    tensors = out, rstd, qkv, q_gain, k_gain, positions, frequency_table(frequencies, qkv.device)
    shape = N, length, columns, turned_heads, 2 * turned_heads - heads, D
    launch(_forward, (min(N, sizes.ROTARY_PROGRAMS),), *tensors, epsilon, *shape, *block, values, scale, num_warps=warps)


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
    scratch: Tensor,
) -> None:
    """Rounded once, before all three."""
    (N, columns), turned_heads, D = qkv.shape, rstd.shape[1], q_gain.shape[0]
    *block, warps = tile(turned_heads, D, qkv.element_size(), BACKWARD_BYTES_PER_WARP)
    programs = min(N, sizes.QK_GAIN_PROGRAMS)
    partials = float32_of(scratch, programs * 2 * D)
    tensors = dqkv_inout, partials, qkv, rstd, q_gain, k_gain, frequency_table(frequencies, qkv.device)
    shape = N, length, columns, turned_heads, 2 * turned_heads - columns // D, D
    launch(_backward, (programs,), *tensors, *shape, *block, scale, num_warps=warps)
    add_partials((dq_gain_acc, dk_gain_acc), partials, programs)


@triton.jit
def gains_at(q_gain, k_gain, head, pair, inside, QUERIES: tl.constexpr, D: tl.constexpr):
    """The gains of both channels of every head's pairs."""
    is_query = head < QUERIES
    q1, q2 = pairs_at(q_gain + pair + head * 0, inside, D)
    k1, k2 = pairs_at(k_gain + pair + head * 0, inside, D)
    return tl.where(is_query, q1, k1), tl.where(is_query, q2, k2)


@triton.jit
def _forward(
    out, rstd, qkv, q_gain, k_gain, positions, frequencies, epsilon, N, length, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    VALUES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = tl.load(frequencies + pair, mask=pair < D // 2, other=0.0)
    g1, g2 = gains_at(q_gain, k_gain, head, pair, inside, QUERIES, D)
    value = HEADS * D + tl.arange(0, VALUES)
    is_value = value < COLUMNS
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        first = tl.cast(row, tl.int64) * COLUMNS
        x1, x2 = pairs_at(qkv + first + (head * D + pair), inside, D)
        row_rstd = rstd_of(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True), D, epsilon)
        tl.store(rstd + tl.cast(row, tl.int64) * HEADS + head, row_rstd, mask=head < HEADS)
        y1, y2 = x1 * row_rstd * g1, x2 * row_rstd * g2
        if positions is not None:
            position = tl.load(positions + row)
        else:
            position = row % length
        cos, sin = turned(frequency * tl.cast(position, tl.float64))
        cos, sin = cos * SCALE, sin * SCALE
        store_pairs(out + first + (head * D + pair), y1 * cos - y2 * sin, y2 * cos + y1 * sin, inside, D)
        tl.store(out + first + value, tl.load(qkv + first + value, mask=is_value), mask=is_value)


@triton.jit
def _backward(
    dqkv, partials, qkv, rstd, q_gain, k_gain, frequencies, N, length, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Program p takes the rows p, p + P, p + 2 P, ... and writes row p of partials (P, 2, D)."""
    head, pair, inside = places(HEADS, D, BLOCK_H, BLOCK_P)
    frequency = tl.load(frequencies + pair, mask=pair < D // 2, other=0.0)
    g1, g2 = gains_at(q_gain, k_gain, head, pair, inside, QUERIES, D)
    sums1, sums2 = tl.zeros((BLOCK_H, BLOCK_P), tl.float32), tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * COLUMNS + (head * D + pair)
        dy1, dy2 = pairs_at(dqkv + place, inside, D)
        cos, sin = turned(frequency * tl.cast(row % length, tl.float64))
        cos, sin = cos * SCALE, sin * SCALE
        du1, du2 = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin
        x1, x2 = pairs_at(qkv + place, inside, D)
        row_rstd = tl.load(rstd + tl.cast(row, tl.int64) * HEADS + head, mask=head < HEADS, other=0.0)
        dx1, dx2, dg1, dg2 = through_gained_norm(du1, du2, x1, x2, g1, g2, row_rstd, D)
        sums1 += dg1
        sums2 += dg2
        store_pairs(dqkv + place, dx1, dx2, inside, D)
    is_query = head < QUERIES
    mine, in_row = partials + tl.program_id(0) * 2 * D + pair, pair < D // 2
    tl.store(mine, tl.sum(tl.where(is_query, sums1, 0.0), 0, keep_dims=True), mask=in_row)
    tl.store(mine + D // 2, tl.sum(tl.where(is_query, sums2, 0.0), 0, keep_dims=True), mask=in_row)
    tl.store(mine + D, tl.sum(tl.where(is_query, 0.0, sums1), 0, keep_dims=True), mask=in_row)
    tl.store(mine + D + D // 2, tl.sum(tl.where(is_query, 0.0, sums2), 0, keep_dims=True), mask=in_row)


@triton.jit
def through_gained_norm(du1, du2, x1, x2, g1, g2, row_rstd, D: tl.constexpr):
    """(the gradient before a norm of heads, both channels; their terms of the gains' gradients) of its input x."""
    n1, n2 = x1 * row_rstd, x2 * row_rstd
    dg1, dg2 = du1 * n1, du2 * n2
    du1, du2 = du1 * g1, du2 * g2
    along = tl.sum(du1 * n1 + du2 * n2, 1, keep_dims=True) / D
    return row_rstd * (du1 - n1 * along), row_rstd * (du2 - n2 * along), dg1, dg2
