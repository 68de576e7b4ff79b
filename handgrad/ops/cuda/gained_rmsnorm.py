"""RMS norm with a gain: every row read once forward and once backward; the gain's gradient by sums in a fixed order."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.sizes import backward_tile, forward_tile


def gained_rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor, *, epsilon: float) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    launch(_forward, (triton.cdiv(N, rows),), out, rstd, inp, gain, epsilon, N, C, block, rows, num_warps=warps)


def gained_rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor,
    *,
    scratch: Tensor,
) -> None:
    """A fixed number of programs, each a row of partial sums, as in layer norm's backward."""
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    partials = float32_of(scratch, programs * C)
    tensors = dresidual_inout, partials, dout, inp, rstd, gain
    launch(_backward, (programs,), *tensors, N, C, *tile, stages, num_warps=warps)
    add_partials((dgain_acc,), partials, programs)


@triton.jit
def _forward(out, rstd, inp, gain, epsilon, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    place, inside = first * C + (row * C + column), in_rows & in_row
    y, row_rstd = normalised((inp, gain), place, column, inside, in_row, epsilon, C)
    tl.store(out + place, y, mask=inside)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit
def normalised(tensors, place, column, inside, in_row, epsilon, C: tl.constexpr):
    """(out in the input's dtype, rstd) of a tile of rows."""
    inp, gain = tensors
    x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    row_rstd = rstd_of(tl.sum(x * x, 1, keep_dims=True), C, epsilon)
    return (x * row_rstd * g).to(inp.dtype.element_ty), row_rstd


@triton.jit
def _backward(
    dresidual, partials, dout, inp, rstd, gain, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program p takes the blocks of rows p, p + P, p + 2 P, ... and writes row p of partials (P, C)."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    in_row = column < C
    g = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    sums = tl.zeros((1, BLOCK_C), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = row < N - first
        inside = in_rows & in_row
        place = tl.cast(first, tl.int64) * C + (row * C + column)
        tensors = dresidual, dout, inp, rstd
        updated, dgain = backward_rows(tensors, g, place, first + row, in_rows, inside, C)
        tl.store(dresidual + place, updated, mask=inside)
        sums += dgain
    tl.store(partials + tl.program_id(0) * C + column, sums, mask=in_row)


@triton.jit
def backward_rows(tensors, g, place, row, in_rows, inside, C: tl.constexpr):
    """(the stream's gradient of a tile of rows with the norm's own path, in its dtype; their sum of the gain's)."""
    dresidual, dout, inp, rstd = tensors
    dy = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(dresidual + place, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.load(rstd + row, mask=in_rows, other=0.0)
    normal, u = x * row_rstd, dy * g
    along = tl.sum(u * normal, 1, keep_dims=True) / C
    updated = stream + row_rstd * (u - normal * along)
    return updated.to(dresidual.dtype.element_ty), tl.sum(dy * normal, 0, keep_dims=True)
