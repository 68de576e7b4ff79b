"""GEMMs of one row with a weight, for generation, at the speed of reading the weight.

A small weight gets one program per tile of rows, which holds the tile in registers. A large weight gets as many programs as
fit a GPU at once: each goes from tile to tile while the next one loads into shared memory (cp.async), and prepares x and
its norm once for all its tiles. Either way a program requests its first tile before it waits
for the previous kernel (programmatic dependent launch, from Hopper on), which hides the read behind that kernel. Every
output is one program's sum, in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.cuda.activations import gelu, relu2, sigmoid
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.layernorm import EPSILON
from handgrad.ops.cuda.rmsnorm import gain_at, rstd_of
from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON

# A tile of the weight: 64 numbers per thread.
TILE_ELEMENTS = 8192
ELEMENTS_PER_WARP = 2048
# Least warps of a program with more than one row; `benchmarks.decode_choices` compares it with one warp, not recorded yet.
FEWEST_WARPS = 4
LONGEST_ROW = 1 << 15  # channels of the longest row that one tile holds
FEWEST_PROGRAMS = 264  # two on each of 132 multiprocessors, as long as a tile has rows to give up
# Up to six tiles per multiprocessor have a program each, of SwiGLU up to twenty. More are shared by as many programs as are
# resident, five per multiprocessor, so that none starts late. A vocabulary's tiles are so many that more programs start one
# after the other (benchmarks/results/h200-decode-programs.json).
MOST_OF_ONE_TILE, MOST_OF_ONE_SWIGLU_TILE, RESIDENT = 792, 2640, 660
TILES_OF_A_VOCABULARY, MOST_OF_A_VOCABULARY = 7920, 1980
# Tiles that a program holds: one in use and one in flight; two in flight if it has more than `FEW_TILES`. With one, the
# programs of the next kernel find room in shared memory while these run.
STAGES, FEW_TILES, STAGES_OF_MANY = 2, 4, 3
# Registers per thread. With several tiles: so that five programs fit a multiprocessor. With a norm and one tile: because
# the assembler aims at 128 by itself and would spill for compute capability 10.0.
REGISTERS_OF_SEVERAL, REGISTERS = 96, 160


def takes(x: Tensor, weight: Tensor) -> bool:
    """True for a GEMM of one row that fits a program."""
    return x.shape[0] == 1 and weight.shape[1] <= LONGEST_ROW


def gemm_tile(O: int, K: int, weights: int = 1) -> tuple[int, int, int]:
    """(rows, padded row length, warps) of a program's tile in each of `weights`."""
    block = triton.next_power_of_2(K)
    rows = max(1, TILE_ELEMENTS // block)
    while rows > 1 and triton.cdiv(O, rows) < FEWEST_PROGRAMS:
        rows //= 2
    return rows, block, min(16, max(FEWEST_WARPS if rows > 1 else 1, weights * rows * block // ELEMENTS_PER_WARP))


def tiles_of(tiles: int, weights: int = 1) -> int:
    """The tiles of each program, except the last."""
    if tiles <= (MOST_OF_ONE_TILE if weights == 1 else MOST_OF_ONE_SWIGLU_TILE):
        return 1
    return triton.cdiv(tiles, RESIDENT if tiles <= TILES_OF_A_VOCABULARY else MOST_OF_A_VOCABULARY)


def stages_of(each: int) -> int:
    """Tiles that a program holds at once; 0 if it has only one."""
    return 0 if each == 1 else STAGES if each <= FEW_TILES else STAGES_OF_MANY


def registers(stages: int, *, normed: bool) -> dict[str, int]:
    """The launch option that limits registers per thread, if the program needs a limit."""
    if stages:
        return {"maxnreg": REGISTERS_OF_SEVERAL}
    return {"maxnreg": REGISTERS} if normed else {}


def row_gemm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor | None, Tensor | None] = (None, None),
    rms_norm: bool = False,
    epsilon: float = LAYERNORM_EPSILON,
    plus: float = 0,
    residual: Tensor | None = None,
    activation: str = "",
) -> None:
    """out (1, O) = f(norm(x) weight^T + bias (O) + residual (1, O)), for one row x (1, K). f is "gelu", "relu2" or nothing
    with weight (O, K), or "swiglu" with weight (2 O, K). The norm is a layer norm with weight and bias, an RMS
    norm with or without a gain (`plus` as in `rmsnorm_forward`), or nothing."""
    O, K = out.shape[1], weight.shape[1]
    weights = weight.shape[0] // O  # 2: a program reads as many rows from each half
    *tile, warps = gemm_tile(O, K, weights)
    tiles = triton.cdiv(O, tile[0])
    each = tiles_of(tiles, weights)
    stages = stages_of(each)
    tensors = out, x, *norm, weight, bias, residual
    constants = O, K, epsilon, *tile, activation, rms_norm, stages, plus
    options = overlapping(out, warps) | registers(stages, normed=norm[0] is not None)
    launch(_row_gemm, (triton.cdiv(tiles, each),), *tensors, *constants, **options)


@triton.jit
def weight_tile(weight, tile, offset, O, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    index = (row.to(tl.int64) + offset)[:, None] * K + column[None, :]
    inside = (row < O)[:, None] & (column < K)[None, :]
    return tl.load(weight + index, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(w, v):
    """(ROWS) float32: the tile w of the weight times the row v."""
    return tl.sum(w.to(tl.float32) * v[None, :], 1)


@triton.jit
def norm_parameters(norm_weight, norm_bias, K, BLOCK: tl.constexpr, PLUS: tl.constexpr):
    column = tl.arange(0, BLOCK)
    scale, shift = 1.0, 0.0
    if norm_weight is not None:
        scale = gain_at(norm_weight, column, column < K, PLUS)
    if norm_bias is not None:
        shift = tl.load(norm_bias + column, mask=column < K, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def prepared(x, scale, shift, K, epsilon, BLOCK: tl.constexpr, NORM: tl.constexpr, OVERLAPS: tl.constexpr):
    """(BLOCK) float32: the row after its norm; waits for the previous kernel, which writes it."""
    if OVERLAPS:
        gdc_wait()
    column = tl.arange(0, BLOCK)
    inside = column < K
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if NORM == "rms":
        v = (v * rstd_of(tl.sum(v * v, 0), K, epsilon) * scale).to(x.dtype.element_ty).to(tl.float32)
    if NORM == "layer":
        # Subtract the mean first: squares / K - mean^2 in one pass loses the variance of a row far from zero.
        centred = tl.where(inside, v - tl.sum(v, 0) / K, 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 0) / K + EPSILON))
        v = (centred * rstd * scale + shift).to(x.dtype.element_ty).to(tl.float32)
    return v


@triton.jit
def store_gemm(out, w, u, v, bias, residual, tile, O, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tile * ROWS + tl.arange(0, ROWS)
    here = row < O
    added = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        added += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)
    # The second condition always holds. Without it the compiler would hoist this load, like other loads in the loop's body,
    # above the wait for the kernel that writes the residual.
    if residual is not None and tile * ROWS < O:
        added += tl.load(residual + row, mask=here, other=0.0).to(tl.float32)
    y = product(w, v) + added
    if ACTIVATION == "gelu":
        y = gelu(y)
    if ACTIVATION == "relu2":
        y = relu2(y)
    if ACTIVATION == "swiglu":
        y = y * sigmoid(y) * product(u, v)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def _row_gemm(
    out, x, norm_weight, norm_bias, weight, bias, residual, O, K, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, RMS_NORM: tl.constexpr, STAGES: tl.constexpr, PLUS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`STAGES`: tiles that a program with several holds at once; 0 if each program has one tile."""
    NORM: tl.constexpr = "rms" if RMS_NORM else ("" if norm_weight is None else "layer")
    first, step = tl.program_id(0), tl.num_programs(0)
    # Load everything that no kernel of this step writes before waiting for the previous kernel.
    if STAGES:
        scale, shift = norm_parameters(norm_weight, norm_bias, K, BLOCK, PLUS)
        if OVERLAPS:
            gdc_launch_dependents()
        v = tl.zeros([BLOCK], tl.float32)
        for tile in tl.range(first, tl.cdiv(O, ROWS), step, num_stages=STAGES):
            w = weight_tile(weight, tile, 0, O, K, ROWS, BLOCK)
            u = weight_tile(weight, tile, O, O, K, ROWS, BLOCK) if ACTIVATION == "swiglu" else w
            if tile == first:
                v = prepared(x, scale, shift, K, epsilon, BLOCK, NORM, OVERLAPS)
            store_gemm(out, w, u, v, bias, residual, tile, O, ROWS, ACTIVATION)
    else:
        w = weight_tile(weight, first, 0, O, K, ROWS, BLOCK)
        u = weight_tile(weight, first, O, O, K, ROWS, BLOCK) if ACTIVATION == "swiglu" else w
        scale, shift = norm_parameters(norm_weight, norm_bias, K, BLOCK, PLUS)
        if OVERLAPS:
            gdc_launch_dependents()
        v = prepared(x, scale, shift, K, epsilon, BLOCK, NORM, OVERLAPS)
        store_gemm(out, w, u, v, bias, residual, first, O, ROWS, ACTIVATION)
