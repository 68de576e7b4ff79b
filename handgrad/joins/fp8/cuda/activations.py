"""GELU, squared ReLU and SwiGLU between fp8 GEMMs: forward, and the backward that writes both tensors its neighbours read.

An element of GELU's backward takes 7 bytes and, if the compiler translates `gelu` and `gelu_derivative`, 46 instructions:
an H200 issues these no faster than it moves the bytes. The hand-written leaves below reduce them to 36.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import (
    QUAD,
    backward_tile,
    counted,
    launch_backward,
    rounded_and_scaled,
    widened,
    word,
)
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, quantize, rounded, store_part, target
from handgrad.joins.fp8.formats import Quantized, plain
from handgrad.joins.fp8.sizes import NONLINEARITY_ELEMENTS, SWIGLU_TILE, tiles
from handgrad.ops.cuda.activations import CUBIC, CUBIC3, SATURATED, SLOPE, SLOPE_LN2, gated, relu2, relu2_forward
from handgrad.ops.cuda.launch import launch

WARPS = 8  # of the forward


def launch_forward(kernel: Any, out: Quantized, hidden: Tensor) -> None:
    """Writes the rows and statistics of out from hidden (N, F). With `current`, sets the scale first."""
    elements, block = hidden.numel(), NONLINEARITY_ELEMENTS
    programs = triton.cdiv(elements, block)
    arguments = out.rows, *target(out, programs), hidden, elements, *limits(out), elements % block == 0, block
    at_own_scale(out, lambda: launch(kernel, (programs,), *arguments, num_warps=WARPS))


@triton.jit
def store_scaled(rows, y, scale, inside, counting, TYPE: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr):
    """Stores y, rounded to the 16-bit TYPE and scaled; returns both counts packed in one number."""
    scaled = rounded_and_scaled(y, scale, TYPE)
    tl.store(rows, rounded(scaled, 1.0, rows.dtype.element_ty), mask=inside)
    counts = 0
    if counting:
        counts += tl.sum(counted(scaled, LARGEST, VANISHES_AT), 0)
    return counts


# GELU.


def gelu_forward_fp8(out: Quantized, hidden: Tensor) -> None:
    launch_forward(_gelu_forward, out, hidden)


def gelu_backward_fp8(dhidden: Quantized, inp: Quantized, dgelu: Tensor, hidden: Tensor) -> None:
    """Writes dhidden, the gradient before the GELU, from dgelu (N, F), the gradient after it; with `current`, sets its
    scale first. Also writes the columns of inp = GELU(hidden), at inp's existing scale."""
    launch_backward(_gelu_backward, dhidden, inp, dgelu, hidden)


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _gelu_forward(
    rows, scaling, statistics, PARTS, hidden, elements, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EVEN: no block reaches past the end."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = (offset < elements - start) | EVEN
    y, _ = gelu_and_derivative(widened(tl.load(hidden + start + offset, mask=inside, other=0.0)))
    TYPE: tl.constexpr = hidden.dtype.element_ty
    counts = store_scaled(rows + start + offset, y, scale, inside, counting, TYPE, LARGEST, VANISHES_AT)
    amax = tl.max(tl.abs(y), 0).to(TYPE)  # rounding is monotonic: round after taking the maximum
    store_part(statistics, PARTS, tl.program_id(0), amax.to(tl.float32), counts & 65535, counts >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _gelu_backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dgelu, hidden, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tensors = drows, dcolumns, columns, scaling, inp_scaling, statistics, dgelu, hidden
    backward_tile(tensors, PARTS, N4, F, LARGEST, VANISHES_AT, EVEN, QUADS, COLUMNS, through_gelu)


@triton.jit
def through_gelu(x, dy, dscale, scale):
    """From 16-bit x and dy: (magnitude of the gradient before the GELU, that gradient rounded to 16 bits and scaled,
    GELU(x) rounded to 16 bits and scaled)."""
    y, derivative = gelu_and_derivative(widened(x))
    dx = widened(dy) * derivative
    return tl.abs(dx), rounded_and_scaled(dx, dscale, x.dtype), rounded_and_scaled(y, scale, x.dtype)


@triton.jit
def gelu_and_derivative(x):
    """`gelu` and `gelu_derivative` of float32 x, bit for bit. (They divide by a product with this reciprocal, after a
    test whether 1 + e is above 2^126.)"""
    square = tl.minimum(x * x, SATURATED)
    e = exp2_of_minus_abs(x * SLOPE * (square * CUBIC + 1))
    larger = reciprocal(1 + e)
    smaller = e * larger
    positive = x >= 0
    y = x * tl.where(positive, 1.0, e) * larger
    s = tl.where(positive, larger, smaller)
    return y, s + x * (smaller * larger) * (square * CUBIC3 + 1) * SLOPE_LN2


# Leaves in PTX.


@triton.jit
def exp2_of_minus_abs(x):
    """exp2(-|x|) of float32 x, in one instruction; Triton would emit |x| and the negation separately."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def reciprocal(x):
    """1 / x to one unit in the last place, for normal float32 x up to 2^126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


# Squared ReLU: forward in place, backward from the output alone.


def relu2_forward_fp8(out: Quantized) -> None:
    """Squares in place in the 16-bit form (N, F), and writes rows and statistics. Current scaling takes two passes, because
    the in-place square cannot be repeated."""
    hidden = plain(out)
    if out.current:
        relu2_forward(hidden)
        quantize(replace(out, columns=None), hidden)
        return
    launch_forward(_relu2_forward, out, hidden)


def relu2_backward_fp8(dhidden: Quantized, inp: Quantized, dsquare: Tensor) -> None:
    """Writes dhidden, the gradient before the ReLU, from dsquare (N, F), the gradient after the square; with `current`,
    sets its scale first. Also writes the columns of inp, the square, at inp's existing scale."""
    launch_backward(_relu2_backward, dhidden, inp, dsquare, plain(inp))


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _relu2_forward(
    rows, scaling, statistics, PARTS, hidden, elements, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EVEN: no block reaches past the end."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = (offset < elements - start) | EVEN
    TYPE: tl.constexpr = hidden.dtype.element_ty
    y = relu2(widened(tl.load(hidden + start + offset, mask=inside, other=0.0)))
    tl.store(hidden + start + offset, y.to(TYPE), mask=inside)
    counts = store_scaled(rows + start + offset, y, scale, inside, counting, TYPE, LARGEST, VANISHES_AT)
    amax = tl.max(y, 0).to(TYPE)
    store_part(statistics, PARTS, tl.program_id(0), amax.to(tl.float32), counts & 65535, counts >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _relu2_backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dsquare, square, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tensors = drows, dcolumns, columns, scaling, inp_scaling, statistics, dsquare, square
    backward_tile(tensors, PARTS, N4, F, LARGEST, VANISHES_AT, EVEN, QUADS, COLUMNS, through_relu2)


@triton.jit
def through_relu2(y, dy, dscale, scale):
    """From 16-bit y and dy: (magnitude of the gradient before the ReLU, that gradient in 16 bits and scaled, y scaled)."""
    y32 = widened(y)
    # In bf16 the short root gave the exact one's gradients (benchmarks/results/h200-fp8-operations.json).
    dx = widened(dy) * (2 * (tl.sqrt(y32) if tl.bfloat16 == y.dtype else tl.sqrt_rn(y32)))
    return tl.abs(dx), rounded_and_scaled(dx, dscale, y.dtype), y32 * scale


# SwiGLU. Gates and gated values stay in 16 bits.


def swiglu_forward_fp8(out: Quantized, hidden: Tensor) -> None:
    """Writes the rows and statistics of out (N, F) from hidden (N, 2F). With `current`, sets the scale first."""
    N, F = out.shape
    rows, columns = SWIGLU_TILE
    grid, even = (triton.cdiv(F, columns), triton.cdiv(N, rows)), N % rows == 0 and F % columns == 0
    arguments = out.rows, *target(out, tiles(N, F, SWIGLU_TILE)), hidden, N, F, *limits(out), even, rows, columns
    at_own_scale(out, lambda: launch(_swiglu_forward, grid, *arguments, num_warps=WARPS))


def swiglu_backward_fp8(dhidden: Quantized, inp: Quantized, dout: Tensor, hidden: Tensor) -> None:
    """Writes dhidden (N, 2F), the gradient before the SwiGLU, from dout (N, F), the gradient after it; with `current`, sets
    its scale first. Also writes the columns of inp, the SwiGLU's output, at inp's existing scale."""
    launch_backward(_swiglu_backward, dhidden, inp, dout, hidden)


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _swiglu_forward(
    rows, scaling, statistics, PARTS, hidden, N, F, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """EVEN: no tile reaches past the end."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = ((row < N) & (column < F)) | EVEN
    offset = row.to(tl.int64) * F + column
    gate = hidden + row.to(tl.int64) * (2 * F) + column
    g = widened(tl.load(gate, mask=inside, other=0.0))
    u = widened(tl.load(gate + F, mask=inside, other=0.0))
    y, _, _ = gated(g, u, 0.0)
    scaled = rounded_and_scaled(y, scale, hidden.dtype.element_ty)
    tl.store(rows + offset, rounded(scaled, 1.0, rows.dtype.element_ty), mask=inside)
    counts = 0
    if counting:
        counts += tl.sum(tl.sum(counted(scaled, LARGEST, VANISHES_AT), 1), 0)
    amax = tl.max(tl.max(tl.abs(y), 1), 0).to(hidden.dtype.element_ty)  # rounding is monotonic: round after the maximum
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), counts & 65535, counts >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _swiglu_backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dout, hidden, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile, held in four tensors: row i of these is the tile's rows 4 i to 4 i + 3. N4 = N / 4."""
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
    counts = 0
    if counting:
        first = counted(dg0, LARGEST, VANISHES_AT) + counted(dg1, LARGEST, VANISHES_AT)
        first += counted(dg2, LARGEST, VANISHES_AT) + counted(dg3, LARGEST, VANISHES_AT)
        second = counted(du0, LARGEST, VANISHES_AT) + counted(du1, LARGEST, VANISHES_AT)
        second += counted(du2, LARGEST, VANISHES_AT) + counted(du3, LARGEST, VANISHES_AT)
        counts += tl.sum(tl.sum(first + second, 1), 0)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), counts & 65535, counts >> 16)
    dwords, words = dcolumns.to(tl.pointer_type(tl.int32)), columns.to(tl.pointer_type(tl.int32))
    offset, inside = column.to(tl.int64)[:, None] * N4 + quad[None, :], tl.trans(inside)
    tl.store(dwords + offset, tl.trans(word(dg0, dg1, dg2, dg3, DTYPE)), mask=inside)
    tl.store(dwords + F.to(tl.int64) * N4 + offset, tl.trans(word(du0, du1, du2, du3, DTYPE)), mask=inside)
    tl.store(words + offset, tl.trans(word(y0, y1, y2, y3, columns.dtype.element_ty)), mask=inside)


@triton.jit
def through_swiglu(tensors, row, column, inside, scales, F):
    """For one row of each quad, returns (the larger of |dg| and |du|; dg, du and the output, each in 16 bits and scaled).
    Writes the gradients' rows."""
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
