"""The gradient of queries, keys and values before QK-norm and rotation, in fp8. One pass reads attention's 16-bit gradient,
rotates it back and writes both forms.

The same pass quantises the values, which are not rotated. A program has all heads of some token rows, so that it computes
the angles of a row once. With gains it also writes a row of partial sums of their gradients.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import QUAD, counted, rounded_and_scaled, widened, word
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, rounded, store_part, target
from handgrad.joins.fp8.formats import Form, Quantized
from handgrad.joins.fp8.sizes import QUADS, QUADS_TILE
from handgrad.ops import cuda
from handgrad.ops.cuda import rotary as plain_rotary
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.rotary import (
    frequencies_at,
    heads_of,
    pairs_at,
    scaled_turn,
    through_gained_norm,
    through_norm,
    turned_back,
)
from handgrad.ops.reference.rotary import Frequencies

# A warp holds 16 pairs of each row: the widest loads that 128 registers per lane allow.
PAIRS_PER_WARP, MOST_WARPS = 16, 4


def tile(width: int) -> tuple[int, int]:
    """(padded pairs of a head, warps) of a program."""
    pairs = triton.next_power_of_2(width // 2)
    return pairs, min(MOST_WARPS, max(1, pairs // PAIRS_PER_WARP))


def rotary_backward(
    dqkv_inout: Form, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """Reads the gradient after the rotation from the `workspace` of a quantised dqkv. The next two operations and the norm
    with gains do the same."""
    backward(dqkv_inout, None, None, num_heads, length, rotary=True, frequencies=frequencies, scale=scale)


def qk_norm_backward(dqkv_inout: Form, qkv: Tensor, rstd: Tensor) -> None:
    backward(dqkv_inout, qkv, rstd, rstd.shape[1] // 2, 1, rotary=False)


def qk_norm_rotary_backward(dqkv_inout: Form, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    backward(dqkv_inout, qkv, rstd, rstd.shape[1] // 2, length, rotary=True)


def backward(
    dqkv: Form,
    qkv: Tensor | None,
    rstd: Tensor | None,
    num_heads: int,
    length: int,
    *,
    rotary: bool,
    frequencies: Frequencies = None,
    scale: float = 1.0,
) -> None:
    if isinstance(dqkv, Tensor):
        plain_rotary.backward(dqkv, qkv, rstd, num_heads, length, rotary=rotary, frequencies=frequencies, scale=scale)
    else:
        launch_backward(dqkv, None, qkv, rstd, (None, None), num_heads, length, frequencies, rotary, scale)


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
    plus: float = 0,
    scratch: Tensor,
) -> None:
    accumulators, turn = (dq_gain_acc, dk_gain_acc), {"length": length, "frequencies": frequencies, "scale": scale}
    if isinstance(dqkv_inout, Tensor):
        norm = qkv, rstd, q_gain, k_gain
        cuda.gained_qk_norm_rotary_backward(dqkv_inout, *accumulators, *norm, **turn, plus=plus, scratch=scratch)
        return
    assert not plus  # a network whose gains have one has forms of the loss head alone
    (N, columns), D, gains = qkv.shape, q_gain.shape[0], (q_gain, k_gain)
    programs, num_heads = triton.cdiv(N, QUADS_TILE[0]), 2 * rstd.shape[1] - columns // D
    partials = float32_of(scratch, programs * 2 * D)
    launch_backward(dqkv_inout, partials, qkv, rstd, gains, num_heads, length, frequencies, True, scale)
    add_partials(accumulators, partials, programs)


def launch_backward(
    dqkv: Quantized,
    partials: Tensor | None,
    qkv: Tensor | None,
    rstd: Tensor | None,
    gains: tuple[Tensor | None, Tensor | None],
    num_heads: int,
    length: int,
    frequencies: Frequencies,
    rotary: bool,
    scale: float,
) -> None:
    """Reads the workspace of dqkv without changing it. Also writes a `plain` 16-bit form, if dqkv has one."""
    assert dqkv.workspace is not None
    N, columns = dqkv.workspace.shape
    table, turned_heads, width = heads_of(dqkv.workspace, num_heads, frequencies)
    assert N % QUAD.value == 0, f"the number of tokens must be a multiple of {QUAD.value}, found {N}"
    assert width % 2 == 0, f"heads must have an even number of channels, found {width}"
    programs, (pairs, warps) = triton.cdiv(N, QUADS_TILE[0]), tile(width)
    forms = dqkv.plain, dqkv.rows, dqkv.columns, *target(dqkv, programs)
    inputs = partials, dqkv.workspace, qkv, rstd, *gains, table
    sizes = N // QUAD.value, length, columns, columns // width, turned_heads, num_heads, width, QUADS, pairs
    arguments = *forms, *inputs, *sizes, rotary, scale, *limits(dqkv)
    at_own_scale(dqkv, lambda: launch(_backward, (programs,), *arguments, num_warps=warps))


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _backward(
    plain, rows, columns, scaling, statistics, PARTS, partials, dturned, qkv, rstd, q_gain, k_gain, frequencies, N4, length,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    QUADS: tl.constexpr, BLOCK_P: tl.constexpr, ROTARY: tl.constexpr, TURN_SCALE: tl.constexpr, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """Some token rows, held in four tensors: row i of these is rows 4 i to 4 i + 3. N4 = N / 4. HEADS: of queries, keys and
    values together; TURNED: of queries and keys. plain, one of the forms, the table of frequencies and the gains may each
    be None. With gains, program p writes the sums of their gradients to row p of partials (P, 2, D)."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    quad, pair = tl.program_id(0) * QUADS + tl.arange(0, QUADS)[:, None], tl.arange(0, BLOCK_P)[None, :]
    in_quad, in_row = quad < N4, pair < D // 2
    row0 = quad.to(tl.int64) * QUAD
    nothing = None, None, None, None
    turns = nothing
    if ROTARY:
        frequency = frequencies_at(frequencies, pair, D)
        turn0 = scaled_turn(frequency, row0 % length, TURN_SCALE)
        turn1 = scaled_turn(frequency, (row0 + 1) % length, TURN_SCALE)
        turn2 = scaled_turn(frequency, (row0 + 2) % length, TURN_SCALE)
        turn3 = scaled_turn(frequency, (row0 + 3) % length, TURN_SCALE)
        turns = turn0, turn1, turn2, turn3
    tensors = plain, rows, columns, dturned, scale, counting
    geometry, totals = (quad, pair, in_quad, in_row, N4), (tl.zeros((QUADS, BLOCK_P), tl.float32), 0, 0)
    sizes = COLUMNS, TURNED, D, LARGEST, VANISHES_AT
    totals = through_heads(0, QUERIES, tensors, (qkv, rstd, q_gain, partials), turns, geometry, totals, sizes)
    totals = through_heads(QUERIES, TURNED, tensors, (qkv, rstd, k_gain, partials), turns, geometry, totals, sizes)
    largest, clipped, vanished = through_heads(TURNED, HEADS, tensors, nothing, nothing, geometry, totals, sizes)
    amax = tl.max(tl.max(largest, 1), 0).to(dturned.dtype.element_ty).to(tl.float32)
    store_part(statistics, PARTS, tl.program_id(0), amax, clipped, vanished)


@triton.jit
def through_heads(FIRST: tl.constexpr, END: tl.constexpr, tensors, norm, turns, geometry, totals, sizes):
    """Writes the heads from FIRST to before END: the queries, the keys or the values. Returns (largest magnitudes, numbers
    clipped and vanished) so far."""
    plain, rows, columns, dturned, scale, counting = tensors
    qkv, rstd, gain, partials = norm
    quad, pair, in_quad, in_row, N4 = geometry
    largest, clipped, vanished = totals
    COLUMNS, TURNED, D, LARGEST, VANISHES_AT = sizes
    forms, inputs = (plain, rows, scale, rstd), (dturned, qkv, rstd)
    inside, row0 = in_quad & in_row, quad.to(tl.int64) * QUAD
    sums = tl.zeros_like(largest), tl.zeros_like(largest)
    gains = None if gain is None else pairs_at(gain + pair, in_row, D)
    for head in range(FIRST, END):
        column, row0_rstd = head * D + pair, row0 * TURNED + head
        place0 = row0 * COLUMNS + column
        place1, place2, place3 = place0 + COLUMNS, place0 + 2 * COLUMNS, place0 + 3 * COLUMNS
        # All loads before the first store, which none could overtake: a row at a time leaves too few bytes in flight.
        loads0 = loaded_pairs(inputs, place0, row0_rstd, in_quad, inside, D)
        loads1 = loaded_pairs(inputs, place1, row0_rstd + TURNED, in_quad, inside, D)
        loads2 = loaded_pairs(inputs, place2, row0_rstd + 2 * TURNED, in_quad, inside, D)
        loads3 = loaded_pairs(inputs, place3, row0_rstd + 3 * TURNED, in_quad, inside, D)
        a0, x0, z0, sums = written_pairs(forms, place0, inside, loads0, gains, turns[0], sums, D)
        a1, x1, z1, sums = written_pairs(forms, place1, inside, loads1, gains, turns[1], sums, D)
        a2, x2, z2, sums = written_pairs(forms, place2, inside, loads2, gains, turns[2], sums, D)
        a3, x3, z3, sums = written_pairs(forms, place3, inside, loads3, gains, turns[3], sums, D)
        largest = tl.maximum(largest, tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3)))
        if counting:
            both = counted_quads((x0, x1, x2, x3), (z0, z1, z2, z3), LARGEST, VANISHES_AT)
            clipped += both & 65535
            vanished += both >> 16
        if columns is not None:
            store_quads(columns, (x0, x1, x2, x3), (z0, z1, z2, z3), column, quad, inside, N4, D)
    if gain is not None:
        partial = partials + (tl.program_id(0) * 2 + (1 if FIRST else 0)) * D + pair
        tl.store(partial, tl.sum(sums[0], 0, keep_dims=True), mask=in_row)
        tl.store(partial + D // 2, tl.sum(sums[1], 0, keep_dims=True), mask=in_row)
    return largest, clipped, vanished


@triton.jit
def loaded_pairs(inputs, offset, rstd_place, in_quad, inside, D: tl.constexpr):
    """(gradients, outputs of the norm or inputs of one with gains, rstd) of a row. Without a norm only the first counts."""
    dturned, qkv, rstd = inputs
    d = tl.load(dturned + offset, mask=inside, other=0.0), tl.load(dturned + offset + D // 2, mask=inside, other=0.0)
    if rstd is None:
        return d, d, 0.0
    else:
        y = tl.load(qkv + offset, mask=inside, other=0.0), tl.load(qkv + offset + D // 2, mask=inside, other=0.0)
        return d, y, tl.load(rstd + rstd_place, mask=in_quad, other=0.0)


@triton.jit
def written_pairs(forms, offset, inside, loads, gains, turn, sums, D: tl.constexpr):
    """Computes the gradients of a row before norm and rotation; writes the forms that exist. Returns (larger magnitude of a
    pair, its first and second channel in 16 bits and scaled, sums with the terms of the gains' gradients)."""
    plain, rows, scale, rstd = forms
    d, y, row_rstd = loads
    dx1, dx2 = widened(d[0]), widened(d[1])
    if gains is not None:
        dx1, dx2 = turned_back(dx1, dx2, turn[0], turn[1])
        x1, x2 = widened(y[0]), widened(y[1])
        dx1, dx2, dg1, dg2 = through_gained_norm(dx1, dx2, x1, x2, gains[0], gains[1], row_rstd, D)
        sums = sums[0] + dg1, sums[1] + dg2
    else:
        if rstd is not None:
            dx1, dx2 = through_norm(dx1, dx2, widened(y[0]), widened(y[1]), row_rstd, D)
        if turn is not None:
            dx1, dx2 = turned_back(dx1, dx2, turn[0], turn[1])
    if plain is not None:
        tl.store(plain + offset, dx1.to(plain.dtype.element_ty), mask=inside)
        tl.store(plain + offset + D // 2, dx2.to(plain.dtype.element_ty), mask=inside)
    s1, s2 = rounded_and_scaled(dx1, scale, d[0].dtype), rounded_and_scaled(dx2, scale, d[0].dtype)
    if rows is not None:
        tl.store(rows + offset, rounded(s1, 1.0, rows.dtype.element_ty), mask=inside)
        tl.store(rows + offset + D // 2, rounded(s2, 1.0, rows.dtype.element_ty), mask=inside)
    return tl.maximum(tl.abs(dx1), tl.abs(dx2)), s1, s2, sums


@triton.jit
def counted_quads(firsts, seconds, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr):
    """The sum of `counted` over four rows of pairs, scaled."""
    x0, x1, x2, x3 = firsts
    z0, z1, z2, z3 = seconds
    first = counted(x0, LARGEST, VANISHES_AT) + counted(x1, LARGEST, VANISHES_AT)
    first += counted(x2, LARGEST, VANISHES_AT) + counted(x3, LARGEST, VANISHES_AT)
    first += counted(z0, LARGEST, VANISHES_AT) + counted(z1, LARGEST, VANISHES_AT)
    first += counted(z2, LARGEST, VANISHES_AT) + counted(z3, LARGEST, VANISHES_AT)
    return tl.sum(tl.sum(first, 1), 0)


@triton.jit
def store_quads(columns, firsts, seconds, column, quad, inside, N4, D: tl.constexpr):
    """Stores four rows of scaled pairs, with first channels `column`, in the transposed form."""
    x0, x1, x2, x3 = firsts
    z0, z1, z2, z3 = seconds
    DTYPE: tl.constexpr = columns.dtype.element_ty
    into = columns.to(tl.pointer_type(tl.int32)) + tl.trans(column.to(tl.int64) * N4 + quad)
    tl.store(into, tl.trans(word(x0, x1, x2, x3, DTYPE)), mask=tl.trans(inside))
    tl.store(into + D // 2 * tl.cast(N4, tl.int64), tl.trans(word(z0, z1, z2, z3, DTYPE)), mask=tl.trans(inside))
