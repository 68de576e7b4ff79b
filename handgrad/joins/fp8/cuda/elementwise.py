"""The backward of a nonlinearity between fp8 GEMMs, which writes both tensors that its neighbours read, and shared parts of
such kernels, some of them in PTX."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, rounded, store_part, target
from handgrad.joins.fp8.formats import Quantized
from handgrad.joins.fp8.sizes import QUADS, QUADS_TILE, ROWS_OF_QUAD, tiles
from handgrad.ops.cuda.launch import launch

QUAD = tl.constexpr(ROWS_OF_QUAD)
BACKWARD_WARPS = 4


def launch_backward(kernel: Any, dhidden: Quantized, inp: Quantized, dout: Tensor, hidden: Tensor) -> None:
    """Writes dhidden, the gradient before a nonlinearity, from dout (N, F), the gradient after it; with `current`, sets its
    scale first. Also writes the columns of inp, the nonlinearity's output, at inp's existing scale."""
    (N, F), (rows, columns) = dout.shape, QUADS_TILE
    assert N % QUAD.value == 0, f"the number of tokens must be a multiple of {QUAD.value}, found {N}"
    scaling, *statistics = target(dhidden, tiles(N, F, QUADS_TILE))
    tensors = dhidden.rows, dhidden.columns, inp.columns, scaling, inp.scaling, *statistics, dout, hidden
    sizes, even = (N // QUAD.value, F, *limits(dhidden)), N % rows == 0 and F % columns == 0
    grid = (triton.cdiv(F, columns), triton.cdiv(N, rows))
    arguments = *tensors, *sizes, even, QUADS, columns
    at_own_scale(dhidden, lambda: launch(kernel, grid, *arguments, num_warps=BACKWARD_WARPS))


@triton.jit
def backward_tile(
    tensors, PARTS, N4, F, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr, EVEN: tl.constexpr, QUADS: tl.constexpr,
    COLUMNS: tl.constexpr, through: tl.constexpr,
):  # fmt: skip
    """One tile, held in four tensors: row i of these is the tile's rows 4 i to 4 i + 3. N4 = N / 4. From `hidden`, the
    gradient `dout` and both scales, `through` computes (magnitude of the gradient before the nonlinearity, that gradient in
    16 bits and scaled, the nonlinearity's output in 16 bits and scaled)."""
    drows, dcolumns, columns, scaling, inp_scaling, statistics, dout, hidden = tensors
    DTYPE: tl.constexpr = drows.dtype.element_ty
    dwords, words = dcolumns.to(tl.pointer_type(tl.int32)), columns.to(tl.pointer_type(tl.int32))
    dscale, scale = tl.load(scaling + SCALE), tl.load(inp_scaling + SCALE)
    counting = tl.load(scaling + COUNTING) != 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    inside = ((quad < N4)[:, None] & (column < F)[None, :]) | EVEN
    place0 = quad.to(tl.int64)[:, None] * (QUAD * F) + column[None, :]
    place1, place2, place3 = place0 + F, place0 + 2 * F, place0 + 3 * F
    x0 = tl.load(hidden + place0, mask=inside, other=0.0)
    x1 = tl.load(hidden + place1, mask=inside, other=0.0)
    x2 = tl.load(hidden + place2, mask=inside, other=0.0)
    x3 = tl.load(hidden + place3, mask=inside, other=0.0)
    dy0 = tl.load(dout + place0, mask=inside, other=0.0)
    dy1 = tl.load(dout + place1, mask=inside, other=0.0)
    dy2 = tl.load(dout + place2, mask=inside, other=0.0)
    dy3 = tl.load(dout + place3, mask=inside, other=0.0)
    a0, dx0, y0 = through(x0, dy0, dscale, scale)
    a1, dx1, y1 = through(x1, dy1, dscale, scale)
    a2, dx2, y2 = through(x2, dy2, dscale, scale)
    a3, dx3, y3 = through(x3, dy3, dscale, scale)
    largest = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    amax = tl.max(tl.max(largest, 1), 0).to(hidden.dtype.element_ty)
    counts = 0
    if counting:
        first = counted(dx0, LARGEST, VANISHES_AT) + counted(dx1, LARGEST, VANISHES_AT)
        second = counted(dx2, LARGEST, VANISHES_AT) + counted(dx3, LARGEST, VANISHES_AT)
        counts += tl.sum(tl.sum(first + second, 1), 0)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), counts & 65535, counts >> 16)
    tl.store(drows + place0, rounded(dx0, 1.0, DTYPE), mask=inside)
    tl.store(drows + place1, rounded(dx1, 1.0, DTYPE), mask=inside)
    tl.store(drows + place2, rounded(dx2, 1.0, DTYPE), mask=inside)
    tl.store(drows + place3, rounded(dx3, 1.0, DTYPE), mask=inside)
    offset, inside = column.to(tl.int64)[:, None] * N4 + quad[None, :], tl.trans(inside)
    tl.store(dwords + offset, tl.trans(word(dx0, dx1, dx2, dx3, DTYPE)), mask=inside)
    tl.store(words + offset, tl.trans(word(y0, y1, y2, y3, columns.dtype.element_ty)), mask=inside)


@triton.jit
def counted(scaled, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr):
    """1 for a number that is too large, 65536 for one that vanishes: one sum holds both counts, for fewer than 65536."""
    magnitude = tl.abs(scaled)
    return tl.where(magnitude > LARGEST, 1, tl.where((magnitude <= VANISHES_AT) & (magnitude > 0), 65536, 0))


# Leaves in PTX. Two bf16 numbers share a register; Triton converts half of them one by one, on the unit of exponentials and
# reciprocals, which gives 16 results per cycle and multiprocessor.


@triton.jit
def widened(x):
    """16-bit x as float32."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def rounded_and_scaled(x, scale, TYPE: tl.constexpr):
    """Float32 x rounded to the 16-bit TYPE, times the scale (a power of two), as float32. Ada has no product of two bf16
    numbers, so this adds -0, which changes no product."""
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both, minus_zeros;
            mov.b32 minus_zeros, 0x80008000;
            cvt.rn.bf16x2.f32 both, $3, $2;
            fma.rn.bf16x2 both, both, $4, minus_zeros;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=f,=f,f,f,r",
            [x, scale.to(tl.bfloat16)],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(TYPE).to(tl.float32) * scale


WORD_E4M3, WORD_E5M2 = (
    tl.constexpr(f"""{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{kind}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{kind}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
    }}""")
    for kind in ("e4m3", "e5m2")
)


@triton.jit
def word(a, b, c, d, TYPE: tl.constexpr):
    """Packs float32 a, b, c, d, rounded to the fp8 format TYPE, into an int32, a in the lowest byte."""
    if tl.float8e4nv == TYPE:
        return tl.inline_asm_elementwise(WORD_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(WORD_E5M2, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
