"""RMS norm without a gain: every row read once forward and once backward."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.sizes import forward_tile, rmsnorm_backward_tile

EPSILON = tl.constexpr(RMSNORM_EPSILON)


def rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    launch(_forward, (triton.cdiv(N, rows),), out, rstd, inp, N, C, block, rows, num_warps=warps)


def rmsnorm_backward(dresidual_inout: Tensor, dout: Tensor, inp: Tensor, rstd: Tensor) -> None:
    N, C = inp.shape
    block, rows, warps = rmsnorm_backward_tile(C)
    tensors = dresidual_inout, dout, inp, rstd
    launch(_backward, (triton.cdiv(N, rows),), *tensors, N, C, block, rows, num_warps=warps)


@triton.jit
def _forward(out, rstd, inp, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    place, inside = first * C + (row * C + column), in_rows & in_row
    y, row_rstd = normalised(inp, place, inside, C)
    tl.store(out + place, y, mask=inside)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit
def normalised(inp, place, inside, C: tl.constexpr):
    """(out in the input's dtype, rstd) of a tile of rows."""
    x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
    row_rstd = rstd_of(tl.sum(x * x, 1, keep_dims=True), C)
    return (x * row_rstd).to(inp.dtype.element_ty), row_rstd


@triton.jit
def rstd_of(sum_of_squares, count, epsilon=EPSILON):
    return tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares / count + epsilon))


@triton.jit
def _backward(dresidual, dout, inp, rstd, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    place, inside = first * C + (row * C + column), in_rows & in_row
    updated = updated_stream((dresidual, dout, inp, rstd), place, first + row, in_rows, inside, C)
    tl.store(dresidual + place, updated, mask=inside)


@triton.jit
def updated_stream(tensors, place, row, in_rows, inside, C: tl.constexpr):
    """The stream's gradient of a tile of rows with the norm's own path, in its dtype."""
    dresidual, dout, inp, rstd = tensors
    dy = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(dresidual + place, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.load(rstd + row, mask=in_rows, other=0.0)
    normal = x * row_rstd
    along = tl.sum(dy * normal, 1, keep_dims=True) / C
    return (stream + row_rstd * (dy - normal * along)).to(dresidual.dtype.element_ty)
