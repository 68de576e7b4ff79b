"""Squared ReLU between fp8 products: forward in place, and the backward that writes both tensors its neighbours read, from
the output alone."""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import backward_tile, counted, launch_backward, rounded_and_scaled, widened
from handgrad.joins.fp8.cuda.gelu import WARPS
from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, limits, quantize, rounded, store_part, target
from handgrad.joins.fp8.formats import Quantized, plain
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.relu2 import relu2, relu2_forward
from handgrad.ops.sizes import NONLINEARITY_ELEMENTS


def relu2_forward_fp8(out: Quantized) -> None:
    """In place in the 16-bit form (N, F), and the rows with their statistics. A scale that waits for the numbers makes it
    two passes: a square cannot be taken twice."""
    hidden = plain(out)
    if out.current:
        relu2_forward(hidden)
        quantize(replace(out, columns=None), hidden)
        return
    elements, block = hidden.numel(), NONLINEARITY_ELEMENTS
    programs = triton.cdiv(elements, block)
    arguments = out.rows, *target(out, programs), hidden, elements, *limits(out), elements % block == 0, block
    launch(_forward, (programs,), *arguments, num_warps=WARPS)


def relu2_backward_fp8(dhidden: Quantized, inp: Quantized, dsquare: Tensor) -> None:
    """dhidden is the gradient before the ReLU, from dsquare (N, F), the one after the square; with `current`, first its
    scale. The columns of inp, the square, are made at its scale as it stands."""
    launch_backward(_backward, dhidden, inp, dsquare, plain(inp))


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
    y = relu2(widened(tl.load(hidden + start + place, mask=inside, other=0.0)))
    tl.store(hidden + start + place, y.to(hidden.dtype.element_ty), mask=inside)
    scaled = rounded_and_scaled(y, scale, hidden.dtype.element_ty)
    tl.store(rows + start + place, rounded(scaled, 1.0, rows.dtype.element_ty), mask=inside)
    found = 0
    if counting:
        found += tl.sum(counted(scaled, LARGEST, VANISHES_AT), 0)
    amax = tl.max(y, 0).to(hidden.dtype.element_ty)
    store_part(statistics, PARTS, tl.program_id(0), amax.to(tl.float32), found & 65535, found >> 16)


@triton.jit(do_not_specialize_on_alignment=["scaling", "inp_scaling", "statistics"])
def _backward(
    drows, dcolumns, columns, scaling, inp_scaling, statistics, PARTS, dsquare, square, N4, F, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tensors = drows, dcolumns, columns, scaling, inp_scaling, statistics, dsquare, square
    backward_tile(tensors, PARTS, N4, F, LARGEST, VANISHES_AT, EVEN, QUADS, COLUMNS, through_relu2)


@triton.jit
def through_relu2(y, dy, dscale, scale):
    """(magnitude of the gradient before the ReLU, that gradient in 16 bits and scaled, y scaled) of 16-bit y and dy."""
    y32 = widened(y)
    dx = widened(dy) * (2 * tl.sqrt_rn(y32))
    return tl.abs(dx), rounded_and_scaled(dx, dscale, y.dtype), y32 * scale
