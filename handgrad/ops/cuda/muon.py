"""Muon's update of a matrix: momentum, polar factors of a batch of matrices, new weights.

The GEMMs here are not the library's. One program sums a tile of one matrix in a fixed order, so a matrix has the same
bits in any batch, and a symmetric product needs only half the tiles.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops import sizes
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.optimizer import LEARNING_RATE, SCALE, STEP, UPDATE, VERDICT
from handgrad.ops.reference import muon as formula
from handgrad.ops.sizes import polar_bytes

ABOVE_LARGEST, LEAST_NORM = tl.constexpr(formula.ABOVE_LARGEST), tl.constexpr(formula.LEAST_NORM)
FIRST_MOMENTUM, WARM_UP_STEPS = tl.constexpr(formula.FIRST_MOMENTUM), tl.constexpr(formula.WARM_UP_STEPS)

# Elements per program over a flat matrix, and per tile of a program that sums squares.
FLAT_ELEMENTS, FLAT_WARPS = 4096, 8
SUM_WARPS = 8

# A GEMM's tile. Two programs fit a multiprocessor of Hopper, each with 96 KB of operands in flight, so one multiplies
# while the other begins or ends. With four warps they spill on Ampere and Blackwell.
SIDE, DEPTH, PRODUCT_WARPS, PRODUCT_STAGES = 128, 64, 8, 3
HOPPER, HOPPER_REGISTERS = 9, 128  # per lane: with more, two programs would not fit; elsewhere so few would spill

# Rows per program (for the moments: `sizes`), and columns per iteration.
MOMENT_COLUMNS, MOMENT_WARPS = 1024, 4
WEIGHT_ROWS, WEIGHT_COLUMNS, WEIGHT_WARPS = 8, 1024, 8

PARTIALS = 256  # partial sums per iteration


def muon_momentum(
    update: Tensor, m_inout: Tensor, gradient: Tensor, controls: Tensor, results: Tensor, *, momentum: float
) -> None:
    elements = gradient.numel()
    tensors = update, m_inout, gradient, controls, results
    grid = (triton.cdiv(elements, FLAT_ELEMENTS),)
    launch(_momentum, grid, *tensors, elements, float(momentum), FLAT_ELEMENTS, num_warps=FLAT_WARPS)


@triton.jit
def _momentum(
    update, m_buffer, gradient, controls, results, elements, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    if tl.load(results + VERDICT) == UPDATE:
        scale = tl.load(results + SCALE).to(tl.float32)
        warmed = tl.minimum(tl.load(controls + STEP) / WARM_UP_STEPS, 1.0)
        rest = (1.0 - (warmed * (MOMENTUM - FIRST_MOMENTUM) + FIRST_MOMENTUM)).to(tl.float32)
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < elements
        g = tl.load(gradient + offset, mask=inside, other=0.0) * scale
        m = tl.load(m_buffer + offset, mask=inside, other=0.0)
        m -= rest * (m - g)
        tl.store(m_buffer + offset, m, mask=inside)
        tl.store(update + offset, (m - rest * (m - g)).to(update.dtype.element_ty), mask=inside)


# Polar factor. X alternates between two buffers; after five polynomials the last X is in the tensor.


def muon_polar(update_to_polar_inout: Tensor, *, scratch: Tensor) -> None:
    update = update_to_polar_inout
    matrices, rows, columns = update.shape
    short, long = min(rows, columns), max(rows, columns)
    strides = (1, columns) if rows > columns else (columns, 1)  # of X: its shorter side comes first
    pieces = polar_bytes(matrices, rows, columns, update.element_size())
    raw_sums, *raw = scratch[: sum(pieces)].split(pieces)
    sums, (other, A, B) = raw_sums.view(torch.float32), (part.view(update.dtype) for part in raw)

    size, parts = rows * columns, triton.cdiv(rows * columns, sizes.SUM_ELEMENTS)
    flat = triton.cdiv(size, FLAT_ELEMENTS), matrices
    launch(_squares, (parts, matrices), sums, update, size, sizes.SUM_ELEMENTS, FLAT_ELEMENTS, num_warps=SUM_WARPS)
    launch(_normalize, flat, other, update, sums, size, parts, FLAT_ELEMENTS, PARTIALS, num_warps=FLAT_WARPS)
    tiles, options = triton.cdiv(short, SIDE), product_options(update.device)
    square, whole = (tiles, tiles, matrices), (tiles, triton.cdiv(long, SIDE), matrices)
    X, following = other, update
    for a, b, c in formula.POLAR_EXPRESS:
        of_x, of_a = (short, long, *strides), (short, short, short, 1)
        launch(_symmetric, square, A, X, *of_x, 1.0, 0.0, False, long % DEPTH == 0, SIDE, DEPTH, **options)
        launch(_symmetric, square, B, A, *of_a, c, b, True, short % DEPTH == 0, SIDE, DEPTH, **options)
        launch(_product, whole, following, B, X, *of_x, a, short % DEPTH == 0, SIDE, DEPTH, **options)
        X, following = following, X


@functools.cache
def product_options(device: torch.device) -> dict[str, int]:
    options = {"num_warps": PRODUCT_WARPS, "num_stages": PRODUCT_STAGES}
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
    return options | ({"maxnreg": HOPPER_REGISTERS} if is_hopper else {})


@triton.jit
def _squares(sums, matrices, size, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """sums (n, parts) = the sum of squares of each part of each matrix."""
    matrices += tl.program_id(1).to(tl.int64) * size
    first = tl.program_id(0) * BLOCK
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, BLOCK, TILE):
        index = first + start + tl.arange(0, TILE)
        x = tl.load(matrices + index, mask=index < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(total))


@triton.jit
def _normalize(out, matrices, sums, size, parts, BLOCK: tl.constexpr, PARTIALS: tl.constexpr):
    """out = matrices, each divided by a little more than its norm."""
    norm = tl.sqrt_rn(added_up(sums + tl.program_id(1) * parts, parts, PARTIALS))
    offset = tl.program_id(1).to(tl.int64) * size
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(matrices + offset + index, mask=index < size, other=0.0).to(tl.float32)
    x = x * (1.0 / (norm * ABOVE_LARGEST + LEAST_NORM))
    tl.store(out + offset + index, x.to(out.dtype.element_ty), mask=index < size)


@triton.jit
def added_up(values, N, BLOCK: tl.constexpr):
    """The sum of values (N) float32, added in the same order in every program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(values + index, mask=index < N, other=0.0)
    return tl.sum(total)


@triton.jit
def _symmetric(
    out, x, R, C, row_stride, column_stride, scale, added_scale, ADDS: tl.constexpr, WHOLE: tl.constexpr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out (n, R, R) = scale x x^T; with `ADDS`, where x is symmetric, plus added_scale x. A program computes a tile on or
    below the diagonal and stores its mirror image, too."""
    row, column = tl.program_id(0), tl.program_id(1)
    if column <= row:
        matrix = tl.program_id(2).to(tl.int64)
        x += matrix * R * C
        out += matrix * R * R
        rows, columns = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
        left, right = (rows % R)[:, None] * row_stride, (columns % R)[None, :] * row_stride
        sums = scale * summed(x, left, column_stride, x, right, column_stride, C, WHOLE, SIDE, DEPTH)
        inside = (rows[:, None] < R) & (columns[None, :] < R)
        offset = rows[:, None] * R + columns[None, :]
        if ADDS:
            sums += added_scale * tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        tile = sums.to(out.dtype.element_ty)
        tl.store(out + offset, tile, mask=inside)
        if column < row:
            mirrored = columns[:, None] * R + rows[None, :]
            tl.store(out + mirrored, tl.trans(tile), mask=(columns[:, None] < R) & (rows[None, :] < R))


@triton.jit
def _product(
    out, b_matrices, x, R, C, row_stride, column_stride, x_scale, WHOLE: tl.constexpr, SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out (n, R, C) = B x + x_scale x, B (n, R, R) symmetric."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * R * C
    out += matrix * R * C
    b_matrices += matrix * R * R
    rows, columns = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    left, right = (rows % R)[:, None] * R, (columns % C)[None, :] * column_stride
    sums = summed(b_matrices, left, 1, x, right, row_stride, R, WHOLE, SIDE, DEPTH)
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    offset = rows[:, None] * row_stride + columns[None, :] * column_stride
    sums += x_scale * tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def summed(
    left, left_place, left_stride, right, right_place, right_stride, K, WHOLE: tl.constexpr, SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of a GEMM with K terms per sum. The first factors are at the offsets (SIDE, 1) in `left` and (1, SIDE) in
    `right`. `WHOLE`: K is a multiple of DEPTH. Rows and columns beyond the matrix read its beginning, and the caller stores
    no sums there: masks on every load would take many of the loop's instructions."""
    k = tl.arange(0, DEPTH)
    left_place += k[None, :] * left_stride
    right_place += k[:, None] * right_stride
    sums = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, K, DEPTH):
        if WHOLE:
            a, b = tl.load(left + left_place), tl.load(right + right_place)
        else:
            a = tl.load(left + left_place, mask=k[None, :] < K - start, other=0.0)
            b = tl.load(right + right_place, mask=k[:, None] < K - start, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        left += DEPTH * left_stride
        right += DEPTH * right_stride
    return sums


# New weights. The sums of squares of the rows give their moments, and from these |N|.


def muon_update(
    published: Tensor,
    weight_inout: Tensor,
    moments_inout: Tensor,
    polar: Tensor,
    controls: Tensor,
    results: Tensor,
    *,
    rate: float,
    beta2: float,
    weight_decay: float,
    scratch: Tensor,
) -> None:
    rows, columns = weight_inout.shape
    parts = triton.cdiv(rows, sizes.MOMENT_ROWS)
    factors, sums = scratch[: 4 * (rows + parts)].view(torch.float32).split([rows, parts])
    constants = rows, columns, float(beta2), sizes.MOMENT_ROWS, MOMENT_COLUMNS
    launch(_moments, (parts,), factors, sums, moments_inout, polar, results, *constants, num_warps=MOMENT_WARPS)
    tensors = published, weight_inout, polar, factors, sums, controls, results
    publishes = published.data_ptr() != weight_inout.data_ptr()
    settings = formula.UPDATE_RMS * (rows * columns) ** 0.5, float(rate), float(weight_decay), publishes
    tile = WEIGHT_ROWS, WEIGHT_COLUMNS, PARTIALS
    grid = (triton.cdiv(rows, WEIGHT_ROWS), triton.cdiv(columns, WEIGHT_COLUMNS))
    launch(_weights, grid, *tensors, rows, columns, parts, *settings, *tile, num_warps=WEIGHT_WARPS)


@triton.jit
def _moments(
    factors, sums, moments, polar, results, R, C, BETA2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Updates moments (R) to v; factors (R) = 1 / sqrt(v); sums = the sum of squares of N over a program's rows."""
    if tl.load(results + VERDICT) == UPDATE:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (rows[:, None] < R) & (columns[None, :] < C)
            x = tl.load(polar + rows[:, None] * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            total += x * x
        squares = tl.sum(total, 1)
        v = tl.load(moments + rows, mask=rows < R, other=0.0)
        v = BETA2 * v + (1.0 - BETA2) * (squares / C)
        factor = 1.0 / (tl.sqrt_rn(v) + LEAST_NORM)
        tl.store(moments + rows, v, mask=rows < R)
        tl.store(factors + rows, factor, mask=rows < R)
        tl.store(sums + tl.program_id(0), tl.sum(squares * factor * factor))


@triton.jit
def _weights(
    published, weight, polar, factors, sums, controls, results, R, C, parts, norm, RATE: tl.constexpr,
    DECAY: tl.constexpr, PUBLISH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """weight -= rate (s N + decay weight where N weight > 0)."""
    if tl.load(results + VERDICT) == UPDATE:
        rate = (RATE * tl.load(controls + LEARNING_RATE)).to(tl.float32)
        scale = norm / (tl.sqrt_rn(added_up(sums, parts, PARTIALS)) + LEAST_NORM)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < R) & (columns[None, :] < C)
        offset = rows[:, None] * C + columns[None, :]
        factor = scale * tl.load(factors + rows, mask=rows < R, other=0.0)
        n = tl.load(polar + offset, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
        w = tl.load(weight + offset, mask=inside, other=0.0)
        w -= rate * (n + tl.where(n * w > 0, DECAY * w, 0.0))
        tl.store(weight + offset, w, mask=inside)
        if PUBLISH:
            tl.store(published + offset, w.to(published.dtype.element_ty), mask=inside)
