"""GELU between fp8 products: forward, and the backward that writes both tensors its neighbours read.

An element of the backward is 7 bytes and, as the compiler makes them of `gelu` and `gelu_derivative`, 46 instructions: an
H200 issues these no faster than it moves the bytes. With what the leaves below do by hand they are 36.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import backward_tile, counted, launch_backward, rounded_and_scaled, widened
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, rounded, store_part, target
from handgrad.joins.fp8.formats import Quantized
from handgrad.ops.cuda.gelu import CUBIC, CUBIC3, SATURATED, SLOPE, SLOPE_LN2
from handgrad.ops.cuda.launch import launch
from handgrad.ops.sizes import NONLINEARITY_ELEMENTS

WARPS = 8  # of the forward


def gelu_forward_fp8(out: Quantized, hidden: Tensor) -> None:
    """The rows of out, and its statistics; hidden (N, F). With `current`, first the scale."""
    elements, block = hidden.numel(), NONLINEARITY_ELEMENTS
    programs = triton.cdiv(elements, block)
    arguments = out.rows, *target(out, programs), hidden, elements, *limits(out), elements % block == 0, block
    at_own_scale(out, lambda: launch(_forward, (programs,), *arguments, num_warps=WARPS))


def gelu_backward_fp8(dhidden: Quantized, inp: Quantized, dgelu: Tensor, hidden: Tensor) -> None:
    """dhidden is the gradient before the GELU, from dgelu (N, F), the one after it; with `current`, first its scale. The
    columns of inp, GELU(hidden), are made at its scale as it stands."""
    launch_backward(_backward, dhidden, inp, dgelu, hidden)


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _forward(
    rows, scaling, statistics, PARTS, hidden, elements, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EVEN: no block reaches past the end."""
    scale, counting = tl.load(scaling + SCALE), tl.load(scaling + COUNTING) != 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = (place < elements - start) | EVEN
    y, _ = gelu_and_derivative(widened(tl.load(hidden + start + place, mask=inside, other=0.0)))
    scaled = rounded_and_scaled(y, scale, hidden.dtype.element_ty)
    tl.store(rows + start + place, rounded(scaled, 1.0, rows.dtype.element_ty), mask=inside)
    found = 0
    if counting:
        found += tl.sum(counted(scaled, LARGEST, VANISHES_AT), 0)
    amax = tl.max(tl.abs(y), 0).to(hidden.dtype.element_ty)  # the largest is the largest after its rounding too
    store_part(statistics, PARTS, tl.program_id(0), amax.to(tl.float32), found & 65535, found >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dgelu, hidden, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tensors = drows, dcolumns, columns, scaling, inp_scaling, statistics, dgelu, hidden
    backward_tile(tensors, PARTS, N4, F, LARGEST, VANISHES_AT, EVEN, QUADS, COLUMNS, through_gelu)


@triton.jit
def through_gelu(x, dy, dscale, scale):
    """(magnitude of the gradient before the GELU, that gradient in 16 bits and scaled, GELU(x) in 16 bits and scaled) of
    16-bit x and dy."""
    y, derivative = gelu_and_derivative(widened(x))
    dx = widened(dy) * derivative
    return tl.abs(dx), rounded_and_scaled(dx, dscale, x.dtype), rounded_and_scaled(y, scale, x.dtype)


@triton.jit
def gelu_and_derivative(x):
    """`gelu` and `gelu_derivative` of float32 x, bit for bit. (Their quotients are products with this reciprocal, after a
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
    """exp2(-|x|) of float32 x; Triton would take |x|, then negate it, before its instruction, which does both."""
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
    """1 / x to one unit in the last place, of normal float32 x up to 2^126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
