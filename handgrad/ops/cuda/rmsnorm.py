"""RMS norm: the forward and the backward each read every row once. Without a gain no sum crosses rows, so a program of the
backward has its own rows. With one, a fixed number of programs walk all rows, and each writes a row of partial sums.

With a gain the rows may be columns of a wider tensor, as queries are: STRIDE is their distance, the same in all tensors."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.sizes import backward_tile, forward_tile, rmsnorm_backward_tile

EPSILON = tl.constexpr(RMSNORM_EPSILON)


def rmsnorm_forward(
    out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor | None = None, *, epsilon: float = RMSNORM_EPSILON, plus: float = 0
) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    sizes = epsilon, N, C, block, rows, plus, stride_of(inp, out)
    launch(_forward, (triton.cdiv(N, rows),), out, rstd, inp, gain, *sizes, num_warps=warps)


def rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor | None,
    *,
    plus: float = 0,
    scratch: Tensor,
) -> None:
    (N, C), tensors = inp.shape, (dout, inp, rstd)
    if gain is None:
        block, rows, warps = rmsnorm_backward_tile(C)
        launch(_backward, (triton.cdiv(N, rows),), dresidual_inout, *tensors, N, C, block, rows, num_warps=warps)
        return
    assert dgain_acc is not None
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    partials = float32_of(scratch, programs * C)
    stride = stride_of(inp, dout, dresidual_inout)
    arguments = dresidual_inout, partials, *tensors, gain, N, C, *tile, stages, plus, stride
    launch(_gain_backward, (programs,), *arguments, num_warps=warps)
    add_partials((dgain_acc,), partials, programs)


def stride_of(*tensors: Tensor) -> int:
    """The distance of the rows, equal in all tensors."""
    first, *others = (tensor.stride(0) for tensor in tensors)
    assert all(stride == first for stride in others), (first, others)
    return first


@triton.jit
def _forward(
    out, rstd, inp, gain, epsilon, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    PLUS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = first * STRIDE + (row * STRIDE + column), in_rows & in_row
    y, row_rstd = normalised(inp, gain, offset, column, inside, in_row, epsilon, C, PLUS)
    tl.store(out + offset, y, mask=inside)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit
def normalised(inp, gain, offset, column, inside, in_row, epsilon, C: tl.constexpr, PLUS: tl.constexpr = 0):
    """(out in the input's dtype, rstd) for a tile of rows."""
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    g = None if gain is None else gain_at(gain, column, in_row, PLUS)
    row_rstd = rstd_of(tl.sum(x * x, 1, keep_dims=True), C, epsilon)
    y = x * row_rstd
    if g is not None:
        y *= g
    return y.to(inp.dtype.element_ty), row_rstd


@triton.jit
def gain_at(gain, column, in_row, PLUS: tl.constexpr):
    g = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    if PLUS != 0:
        g += PLUS
    return g


@triton.jit
def rstd_of(sum_of_squares, count, epsilon=EPSILON):
    return tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares / count + epsilon))


@triton.jit
def _backward(dresidual, dout, inp, rstd, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = first * C + (row * C + column), in_rows & in_row
    updated, _ = backward_rows((dresidual, dout, inp, rstd), None, offset, first + row, in_rows, inside, C)
    tl.store(dresidual + offset, updated, mask=inside)


@triton.jit
def _gain_backward(
    dresidual, partials, dout, inp, rstd, gain, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PLUS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Program p takes the blocks of rows p, p + P, p + 2 P, ... and writes row p of partials (P, C)."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    in_row = column < C
    g = gain_at(gain, column, in_row, PLUS)
    sums = tl.zeros((1, BLOCK_C), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = row < N - first
        inside = in_rows & in_row
        offset = tl.cast(first, tl.int64) * STRIDE + (row * STRIDE + column)
        updated, dgain = backward_rows((dresidual, dout, inp, rstd), g, offset, first + row, in_rows, inside, C)
        tl.store(dresidual + offset, updated, mask=inside)
        sums += tl.sum(dgain, 0, keep_dims=True)
    tl.store(partials + tl.program_id(0) * C + column, sums, mask=in_row)


@triton.jit
def backward_rows(tensors, g, offset, row, in_rows, inside, C: tl.constexpr):
    """(the stream's gradient plus the gradient through the norm, in its dtype; each row's gradient of the gain) for a tile
    of rows. g: the gain, or None."""
    dresidual, dout, inp, rstd = tensors
    dy = tl.load(dout + offset, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(dresidual + offset, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.load(rstd + row, mask=in_rows, other=0.0)
    normal = x * row_rstd
    u = dy if g is None else dy * g
    along = tl.sum(u * normal, 1, keep_dims=True) / C
    updated = (stream + row_rstd * (u - normal * along)).to(dresidual.dtype.element_ty)
    return updated, dy * normal  # never None: Triton 3.6 returns no None in a tuple
