"""Layer norm: the forward and the backward each read every row once."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON
from handgrad.ops.sizes import backward_tile, forward_tile

EPSILON = tl.constexpr(LAYERNORM_EPSILON)


def layernorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    tensors = out, mean, rstd, inp, weight, bias
    launch(_forward, (triton.cdiv(N, rows),), *tensors, N, C, block, rows, num_warps=warps)


def layernorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dbias_below_acc: Tensor | None,
    *,
    scratch: Tensor,
) -> None:
    """`dbias_below_acc` sums the stream's gradient after rounding, as the next kernel reads it."""
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    accumulators = [acc for acc in (dweight_acc, dbias_acc, dbias_below_acc) if acc is not None]
    partials = float32_of(scratch, programs * len(accumulators) * C)
    tensors = dresidual_inout, partials, dout, inp, mean, rstd, weight
    below = dbias_below_acc is not None
    launch(_backward, (programs,), *tensors, N, C, *tile, below, stages, num_warps=warps)
    add_partials(accumulators, partials, programs)


@triton.jit
def _forward(out, mean, rstd, inp, weight, bias, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = first * C + (row * C + column), in_rows & in_row
    y, row_mean, row_rstd = normalised((inp, weight, bias), offset, column, inside, in_row, C)
    tl.store(out + offset, y, mask=inside)
    tl.store(mean + first + row, row_mean, mask=in_rows)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit
def forward_places(N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    """(first row, row offsets, columns, masks of existing rows and of columns) of a program's tile."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    return first, row, column, first + row < N, column < C


@triton.jit
def normalised(tensors, offset, column, inside, in_row, C: tl.constexpr):
    """(out in the input's dtype, mean, rstd) of a tile of rows."""
    inp, weight, bias = tensors
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    row_mean = tl.sum(x, 1, keep_dims=True) / C
    centred = tl.where(in_row, x - row_mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) / C
    row_rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + EPSILON))
    w = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=in_row, other=0.0).to(tl.float32)
    return (centred * row_rstd * w + b).to(inp.dtype.element_ty), row_mean, row_rstd


@triton.jit
def _backward(
    dresidual, partials, dout, inp, mean, rstd, weight, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    BELOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p takes the blocks of rows p, p + P, p + 2 P, ... and writes row p of partials (P, 2 or 3, C)."""
    row, column, w, sums = backward_begin(weight, C, BLOCK_C, ROWS)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        tensors = dresidual, dout, inp, mean, rstd
        _, _, _, sums = backward_rows(tensors, w, sums, first, row, column, N, C, BELOW)
    store_sums(partials, sums, column, C, BELOW)


@triton.jit
def backward_begin(weight, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    """(row offsets, columns, weight in float32, zero sums): the state before the loop over a program's rows."""
    column = tl.arange(0, BLOCK_C)[None, :]
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    zeros = tl.zeros((1, BLOCK_C), tl.float32)
    return tl.arange(0, ROWS)[:, None], column, w, (zeros, zeros, zeros)


@triton.jit
def backward_rows(tensors, w, sums, first, row, column, N, C: tl.constexpr, BELOW: tl.constexpr):
    """(updated stream in its own dtype, its offsets, their mask, sums of dw, db and the stream) after a tile of rows."""
    dresidual, dout, inp, mean, rstd = tensors
    dw, db, below = sums
    in_rows, in_row = row < N - first, column < C
    inside = in_rows & in_row
    offset = tl.cast(first, tl.int64) * C + (row * C + column)
    dy = tl.load(dout + offset, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(dresidual + offset, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.load(rstd + first + row, mask=in_rows, other=0.0)
    normal = (x - tl.load(mean + first + row, mask=in_rows, other=0.0)) * row_rstd
    # Outside the row dy and w are 0, so whatever `normal` holds there affects neither the sums nor the stored columns.
    g = dy * w
    g_mean = tl.sum(g, 1, keep_dims=True) / C
    gx_mean = tl.sum(g * normal, 1, keep_dims=True) / C
    updated = (stream + row_rstd * (g - g_mean - normal * gx_mean)).to(dresidual.dtype.element_ty)
    tl.store(dresidual + offset, updated, mask=inside)
    dw += tl.sum(dy * normal, 0, keep_dims=True)
    db += tl.sum(dy, 0, keep_dims=True)
    if BELOW:
        below += tl.sum(updated.to(tl.float32), 0, keep_dims=True)
    return updated, offset, inside, (dw, db, below)


@triton.jit
def store_sums(partials, sums, column, C: tl.constexpr, BELOW: tl.constexpr):
    """Stores the program's row of partials."""
    dw, db, below = sums
    in_row = column < C
    partials += tl.program_id(0) * (2 + BELOW) * C + column
    tl.store(partials, dw, mask=in_row)
    tl.store(partials + C, db, mask=in_row)
    if BELOW:
        tl.store(partials + 2 * C, below, mask=in_row)
