"""GELU between fp8 products: forward, and the backward that writes both tensors its neighbours read.

An element of the backward is 7 bytes and, as the compiler makes them of `gelu` and `gelu_derivative`, 46 instructions: an
H200 issues these no faster than it moves the bytes. With what the leaves below do by hand they are 36.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.fp8.cuda.quantizing import COUNTING, SCALE, at_own_scale, limits, rounded, store_part, target
from handgrad.fp8.formats import Quantized
from handgrad.ops.cuda.gelu import CUBIC, CUBIC3, SATURATED, SLOPE, SLOPE_LN2
from handgrad.ops.cuda.launch import launch

# Forward: a program's elements.
BLOCK, WARPS = 8192, 8

# Backward: a program's tile, in quads of rows. A lane has 8 columns of a quad, whose fp8 numbers are one word of the
# transposed forms: 32 rows are 32 bytes of a column there, one sector. Small tiles are faster: 413 us at 124M, where 128
# rows of 64 columns with 8 warps take 511 (benchmarks/results/h200-fp8-choices.json).
QUAD = tl.constexpr(4)
QUADS, COLUMNS, BACKWARD_WARPS = 8, 128, 4


def forward_parts(N: int, F: int) -> int:
    """Parts of the statistics that the forward writes."""
    return triton.cdiv(N * F, BLOCK)


def backward_parts(N: int, F: int) -> int:
    """Parts of the statistics that the backward writes."""
    return triton.cdiv(N, QUADS * QUAD.value) * triton.cdiv(F, COLUMNS)


def gelu_forward_fp8(out: Quantized, hidden: Tensor) -> None:
    """The rows of out, and its statistics; hidden (N, F). With `current`, first the scale."""
    elements, programs = hidden.numel(), forward_parts(*hidden.shape)
    arguments = out.rows, *target(out, programs), hidden, elements, *limits(out), elements % BLOCK == 0, BLOCK
    at_own_scale(out, lambda: launch(_forward, (programs,), *arguments, num_warps=WARPS))


def gelu_backward_fp8(dhidden: Quantized, inp: Quantized, dgelu: Tensor, hidden: Tensor) -> None:
    """dhidden is the gradient before the GELU, from dgelu (N, F), the one after it; with `current`, first its scale. The
    columns of inp, GELU(hidden), are made at its scale as it stands."""
    (N, F), rows = hidden.shape, QUADS * QUAD.value
    assert N % QUAD.value == 0, f"the number of tokens must be a multiple of {QUAD.value}, found {N}"
    scaling, *statistics = target(dhidden, backward_parts(N, F))
    tensors = dhidden.rows, dhidden.columns, inp.columns, scaling, inp.scaling, *statistics, dgelu, hidden
    sizes, even = (N // QUAD.value, F, *limits(dhidden)), N % rows == 0 and F % COLUMNS == 0
    grid = (triton.cdiv(F, COLUMNS), triton.cdiv(N, rows))
    arguments = *tensors, *sizes, even, QUADS, COLUMNS
    at_own_scale(dhidden, lambda: launch(_backward, grid, *arguments, num_warps=BACKWARD_WARPS))


@triton.jit(do_not_specialize_on_alignment=["scaling", "statistics"])
def _forward(
    rows,
    scaling,
    statistics,
    PARTS,
    hidden,
    elements,
    LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    drows,
    dcolumns,
    columns,
    scaling,
    inp_scaling,
    statistics,
    PARTS,
    dgelu,
    hidden,
    N4,
    F,
    LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr,
    EVEN: tl.constexpr,
    QUADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile, in four tensors: their rows i are the tile's rows 4 i to 4 i + 3. N4 = N / 4."""
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
    dy0 = tl.load(dgelu + place0, mask=inside, other=0.0)
    dy1 = tl.load(dgelu + place1, mask=inside, other=0.0)
    dy2 = tl.load(dgelu + place2, mask=inside, other=0.0)
    dy3 = tl.load(dgelu + place3, mask=inside, other=0.0)
    a0, dx0, y0 = through_gelu(x0, dy0, dscale, scale)
    a1, dx1, y1 = through_gelu(x1, dy1, dscale, scale)
    a2, dx2, y2 = through_gelu(x2, dy2, dscale, scale)
    a3, dx3, y3 = through_gelu(x3, dy3, dscale, scale)
    largest = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    amax = tl.max(tl.max(largest, 1), 0).to(hidden.dtype.element_ty)
    found = 0
    if counting:
        first = counted(dx0, LARGEST, VANISHES_AT) + counted(dx1, LARGEST, VANISHES_AT)
        second = counted(dx2, LARGEST, VANISHES_AT) + counted(dx3, LARGEST, VANISHES_AT)
        found += tl.sum(tl.sum(first + second, 1), 0)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_part(statistics, PARTS, part, amax.to(tl.float32), found & 65535, found >> 16)
    tl.store(drows + place0, rounded(dx0, 1.0, DTYPE), mask=inside)
    tl.store(drows + place1, rounded(dx1, 1.0, DTYPE), mask=inside)
    tl.store(drows + place2, rounded(dx2, 1.0, DTYPE), mask=inside)
    tl.store(drows + place3, rounded(dx3, 1.0, DTYPE), mask=inside)
    place, inside = column.to(tl.int64)[:, None] * N4 + quad[None, :], tl.trans(inside)
    tl.store(dwords + place, tl.trans(word(dx0, dx1, dx2, dx3, DTYPE)), mask=inside)
    tl.store(words + place, tl.trans(word(y0, y1, y2, y3, columns.dtype.element_ty)), mask=inside)


@triton.jit
def through_gelu(x, dy, dscale, scale):
    """(magnitude of the gradient before the GELU, that gradient in 16 bits and scaled, GELU(x) in 16 bits and scaled) of
    16-bit x and dy."""
    y, derivative = gelu_and_derivative(widened(x))
    dx = widened(dy) * derivative
    return tl.abs(dx), rounded_and_scaled(dx, dscale, x.dtype), rounded_and_scaled(y, scale, x.dtype)


@triton.jit
def gelu_and_derivative(x):
    """What `gelu` and `gelu_derivative` make of float32 x, bit for bit. (Their quotients are products with this reciprocal,
    after a test whether 1 + e is above 2^126.)"""
    square = tl.minimum(x * x, SATURATED)
    e = exp2_of_minus_abs(x * SLOPE * (square * CUBIC + 1))
    larger = reciprocal(1 + e)
    smaller = e * larger
    positive = x >= 0
    y = x * tl.where(positive, 1.0, e) * larger
    s = tl.where(positive, larger, smaller)
    return y, s + x * (smaller * larger) * (square * CUBIC3 + 1) * SLOPE_LN2


@triton.jit
def counted(scaled, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr):
    """1 for what is too large, 65536 for what vanishes: both counts of fewer than 65536 numbers in one sum."""
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
    """Float32 x rounded to the 16-bit TYPE, times the scale (a power of two), as float32."""
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            mul.rn.bf16x2 both, both, $4;
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
    """Float32 a, b, c, d, rounded to the fp8 format TYPE, in the bytes of an int32, a first."""
    if tl.float8e4nv == TYPE:
        return tl.inline_asm_elementwise(WORD_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(WORD_E5M2, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
