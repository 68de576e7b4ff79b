"""SwiGLU between fp8 products: forward, and the backward that writes both tensors its neighbours read. Gates and the
numbers that they let through stay in 16 bits."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import (
    BACKWARD_WARPS,
    QUAD,
    counted,
    rounded_and_scaled,
    widened,
    word,
)
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, rounded, store_part, target
from handgrad.joins.fp8.formats import Quantized
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.swiglu import gated
from handgrad.ops.sizes import QUADS, QUADS_TILE, SWIGLU_TILE, tiles

WARPS = 8  # of the forward; the backward has the tile of every nonlinearity


def swiglu_forward_fp8(out: Quantized, hidden: Tensor) -> None:
    """The rows of out (N, F), and its statistics; hidden (N, 2F). With `current`, first the scale."""
    N, F = out.shape
    rows, columns = SWIGLU_TILE
    grid, even = (triton.cdiv(F, columns), triton.cdiv(N, rows)), N % rows == 0 and F % columns == 0
    arguments = out.rows, *target(out, tiles(N, F, SWIGLU_TILE)), hidden, N, F, *limits(out), even, rows, columns
    at_own_scale(out, lambda: launch(_forward, grid, *arguments, num_warps=WARPS))


def swiglu_backward_fp8(dhidden: Quantized, inp: Quantized, dout: Tensor, hidden: Tensor) -> None:
    """dhidden (N, 2F) is the gradient before the SwiGLU, from dout (N, F), the one after it; with `current`, first its
    scale. The columns of inp, its output, are made at their scale as it stands."""
    (N, F), (rows, columns) = dout.shape, QUADS_TILE
    assert N % QUAD.value == 0, f"the number of tokens must be a multiple of {QUAD.value}, found {N}"
    scaling, *statistics = target(dhidden, tiles(N, F, QUADS_TILE))
    tensors = dhidden.rows, dhidden.columns, inp.columns, scaling, inp.scaling, *statistics, dout, hidden
    sizes, even = (N // QUAD.value, F, *limits(dhidden)), N % rows == 0 and F % columns == 0
    grid, tile = (triton.cdiv(F, columns), triton.cdiv(N, rows)), (even, QUADS, columns)
    at_own_scale(dhidden, lambda: launch(_backward, grid, *tensors, *sizes, *tile, num_warps=BACKWARD_WARPS))


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _forward(
    rows, scaling, statistics, PARTS, hidden, N, F, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """EVEN: no tile reaches past the end."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = ((row < N) & (column < F)) | EVEN
    place = row.to(tl.int64) * F + column
    gate = hidden + row.to(tl.int64) * (2 * F) + column
    g = widened(tl.load(gate, mask=inside, other=0.0))
    u = widened(tl.load(gate + F, mask=inside, other=0.0))
    y, _, _ = gated(g, u, 0.0)
    scaled = rounded_and_scaled(y, scale, hidden.dtype.element_ty)
    tl.store(rows + place, rounded(scaled, 1.0, rows.dtype.element_ty), mask=inside)
    found = 0
    if counting:
        found += tl.sum(tl.sum(counted(scaled, LARGEST, VANISHES_AT), 1), 0)
    amax = tl.max(tl.max(tl.abs(y), 1), 0).to(hidden.dtype.element_ty)  # the largest is the largest after its rounding too
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), found & 65535, found >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dout, hidden, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile, in four tensors: their rows i are the tile's rows 4 i to 4 i + 3. N4 = N / 4."""
    DTYPE: tl.constexpr = drows.dtype.element_ty
    dscale, scale = tl.load(scaling + SCALE), tl.load(inp_scaling + SCALE)
    counting = tl.load(scaling + COUNTING) != 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    inside = ((quad < N4)[:, None] & (column < F)[None, :]) | EVEN
    row0 = quad.to(tl.int64)[:, None] * QUAD
    tensors, scales = (drows, dout, hidden), (dscale, scale)
    a0, dg0, du0, y0 = through_swiglu(tensors, row0, column[None, :], inside, scales, F)
    a1, dg1, du1, y1 = through_swiglu(tensors, row0 + 1, column[None, :], inside, scales, F)
    a2, dg2, du2, y2 = through_swiglu(tensors, row0 + 2, column[None, :], inside, scales, F)
    a3, dg3, du3, y3 = through_swiglu(tensors, row0 + 3, column[None, :], inside, scales, F)
    largest = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    amax = tl.max(tl.max(largest, 1), 0).to(hidden.dtype.element_ty)
    found = 0
    if counting:
        first = counted(dg0, LARGEST, VANISHES_AT) + counted(dg1, LARGEST, VANISHES_AT)
        first += counted(dg2, LARGEST, VANISHES_AT) + counted(dg3, LARGEST, VANISHES_AT)
        second = counted(du0, LARGEST, VANISHES_AT) + counted(du1, LARGEST, VANISHES_AT)
        second += counted(du2, LARGEST, VANISHES_AT) + counted(du3, LARGEST, VANISHES_AT)
        found += tl.sum(tl.sum(first + second, 1), 0)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), found & 65535, found >> 16)
    dwords, words = dcolumns.to(tl.pointer_type(tl.int32)), columns.to(tl.pointer_type(tl.int32))
    place, inside = column.to(tl.int64)[:, None] * N4 + quad[None, :], tl.trans(inside)
    tl.store(dwords + place, tl.trans(word(dg0, dg1, dg2, dg3, DTYPE)), mask=inside)
    tl.store(dwords + F.to(tl.int64) * N4 + place, tl.trans(word(du0, du1, du2, du3, DTYPE)), mask=inside)
    tl.store(words + place, tl.trans(word(y0, y1, y2, y3, columns.dtype.element_ty)), mask=inside)


@triton.jit
def through_swiglu(tensors, row, column, inside, scales, F):
    """(the larger of |dg| and |du|; dg, du and the output, each in 16 bits and scaled) for a row of every quad. Writes the
    gradients' rows."""
    drows, dout, hidden = tensors
    dscale, scale = scales
    TYPE: tl.constexpr = hidden.dtype.element_ty
    DTYPE: tl.constexpr = drows.dtype.element_ty
    gate = row * (2 * F) + column
    g = widened(tl.load(hidden + gate, mask=inside, other=0.0))
    u = widened(tl.load(hidden + gate + F, mask=inside, other=0.0))
    y, dg, du = gated(g, u, widened(tl.load(dout + row * F + column, mask=inside, other=0.0)))
    largest = tl.maximum(tl.abs(dg), tl.abs(du))
    dg, du = rounded_and_scaled(dg, dscale, TYPE), rounded_and_scaled(du, dscale, TYPE)
    tl.store(drows + gate, rounded(dg, 1.0, DTYPE), mask=inside)
    tl.store(drows + gate + F, rounded(du, 1.0, DTYPE), mask=inside)
    return largest, dg, du, rounded_and_scaled(y, scale, TYPE)
