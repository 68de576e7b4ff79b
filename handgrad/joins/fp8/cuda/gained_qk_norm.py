"""The gradient of queries, keys and values before a norm of heads with gains and the rotation, in fp8: read as attention's
backward left it in 16 bits, turned back and written in both forms, in one pass, with the sums of the gains' gradients.

A program takes the rows that one of `rotary` takes, and leaves a row of partial sums.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import QUAD
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, store_part, target
from handgrad.joins.fp8.cuda.rotary import (
    check_tile,
    counted_quads,
    scaled_turn,
    store_quads,
    tile,
    widened_pairs,
    written_pairs,
)
from handgrad.joins.fp8.formats import Form
from handgrad.ops import cuda
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.gained_qk_norm import through_gained_norm
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.rotary import frequency_table, pairs_at, turned_back
from handgrad.ops.sizes import QUADS, QUADS_TILE


def gained_qk_norm_rotary_backward(
    dqkv_inout: Form,
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
    """Reads the workspace of a quantised dqkv and leaves it as it is."""
    accumulators, turn = (dq_gain_acc, dk_gain_acc), {"length": length, "frequencies": frequencies, "scale": scale}
    if isinstance(dqkv_inout, Tensor):
        norm = qkv, rstd, q_gain, k_gain
        cuda.gained_qk_norm_rotary_backward(dqkv_inout, *accumulators, *norm, **turn, scratch=scratch)
        return
    dqkv = dqkv_inout
    assert dqkv.workspace is not None
    (N, columns), turned_heads, D = qkv.shape, rstd.shape[1], q_gain.shape[0]
    check_tile(N, D)
    programs = triton.cdiv(N, QUADS_TILE[0])
    partials = float32_of(scratch, programs * 2 * D)
    forms = dqkv.plain, dqkv.rows, dqkv.columns, *target(dqkv, programs)
    inputs = dqkv.workspace, qkv, rstd, q_gain, k_gain, frequency_table(frequencies, qkv.device)
    heads, (pairs, warps) = columns // D, tile(D)
    sizes = N // QUAD.value, length, columns, heads, turned_heads, 2 * turned_heads - heads, D, QUADS, pairs
    arguments = *forms, partials, *inputs, *sizes, scale, *limits(dqkv)
    at_own_scale(dqkv, lambda: launch(_backward, (programs,), *arguments, num_warps=warps))
    add_partials(accumulators, partials, programs)


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _backward(
    plain, rows, columns, scaling, statistics, PARTS, partials, dturned, qkv, rstd, q_gain, k_gain, frequencies, N4, length,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    QUADS: tl.constexpr, BLOCK_P: tl.constexpr, TURN_SCALE: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """Some token rows, in four tensors, whose rows i are rows 4 i to 4 i + 3. N4 = N / 4. HEADS: of queries, keys and
    values together; TURNED: of queries and keys. Writes row p of partials (P, 2, D). plain may be None, so may one of
    the forms."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    quad, pair = tl.program_id(0) * QUADS + tl.arange(0, QUADS)[:, None], tl.arange(0, BLOCK_P)[None, :]
    in_quad, in_row = quad < N4, pair < D // 2
    inside = in_quad & in_row
    row0 = quad.to(tl.int64) * QUAD
    row1, row2, row3 = row0 + 1, row0 + 2, row0 + 3
    frequency = tl.load(frequencies + pair, mask=in_row, other=0.0)
    cos0, sin0 = scaled_turn(frequency, row0 % length, TURN_SCALE)
    cos1, sin1 = scaled_turn(frequency, row1 % length, TURN_SCALE)
    cos2, sin2 = scaled_turn(frequency, row2 % length, TURN_SCALE)
    cos3, sin3 = scaled_turn(frequency, row3 % length, TURN_SCALE)
    largest = tl.zeros((QUADS, BLOCK_P), tl.float32)
    sums = largest, largest
    clipped, vanished = 0, 0
    tensors, places = (plain, rows, dturned, qkv, rstd), (in_quad, inside)
    for head in range(HEADS):
        column, is_query = head * D + pair, head < QUERIES
        gains = pairs_at(tl.where(is_query, q_gain, k_gain) + pair, in_row, D)
        a0, x0, z0, sums = gained_pairs(
            tensors, sums, row0, column, head, places, cos0, sin0, gains, scale, COLUMNS, TURNED, D
        )
        a1, x1, z1, sums = gained_pairs(
            tensors, sums, row1, column, head, places, cos1, sin1, gains, scale, COLUMNS, TURNED, D
        )
        a2, x2, z2, sums = gained_pairs(
            tensors, sums, row2, column, head, places, cos2, sin2, gains, scale, COLUMNS, TURNED, D
        )
        a3, x3, z3, sums = gained_pairs(
            tensors, sums, row3, column, head, places, cos3, sin3, gains, scale, COLUMNS, TURNED, D
        )
        if (head == QUERIES - 1) | (head == TURNED - 1):  # the last of its gain
            mine = partials + (tl.program_id(0) * 2 + tl.where(is_query, 0, 1)) * D + pair
            tl.store(mine, tl.sum(sums[0], 0, keep_dims=True), mask=in_row)
            tl.store(mine + D // 2, tl.sum(sums[1], 0, keep_dims=True), mask=in_row)
            sums = tl.zeros_like(largest), tl.zeros_like(largest)
        largest = tl.maximum(largest, tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3)))
        if counting:
            found = counted_quads((x0, x1, x2, x3), (z0, z1, z2, z3), LARGEST, VANISHES_AT)
            clipped += found & 65535
            vanished += found >> 16
        if columns is not None:
            store_quads(columns, (x0, x1, x2, x3), (z0, z1, z2, z3), column, quad, inside, N4, D)
    amax = tl.max(tl.max(largest, 1), 0).to(dturned.dtype.element_ty).to(tl.float32)
    store_part(statistics, PARTS, tl.program_id(0), amax, clipped, vanished)


@triton.jit
def gained_pairs(
    tensors, sums, row, column, head, places, cos, sin, gains, scale, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """As `rotary.turned_pairs`, and the sums of both channels' terms of the gains' gradients, none of them a value's."""
    plain, rows, dturned, qkv, rstd = tensors
    in_quad, inside = places
    sums1, sums2 = sums
    place = row * COLUMNS + column
    dx1, dx2 = widened_pairs(dturned + place, inside, D)
    if head < TURNED:  # a query or a key
        du1, du2 = turned_back(dx1, dx2, cos, sin)
        x1, x2 = widened_pairs(qkv + place, inside, D)
        row_rstd = tl.load(rstd + row * TURNED + head, mask=in_quad, other=0.0)
        dx1, dx2, dg1, dg2 = through_gained_norm(du1, du2, x1, x2, gains[0], gains[1], row_rstd, D)
        sums1 += dg1
        sums2 += dg2
    amax, x, z = written_pairs((plain, rows), place, inside, dx1, dx2, scale, dturned.dtype.element_ty, D)
    return amax, x, z, (sums1, sums2)
