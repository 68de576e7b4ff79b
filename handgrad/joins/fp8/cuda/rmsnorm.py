"""RMS norm that also writes fp8."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.layernorm import store_rows
from handgrad.joins.fp8.cuda.norms import norm_forward, quantize_plain, updated_in_fp8
from handgrad.joins.fp8.cuda.quantizing import (
    SCALE,
    UNALIGNED,
    count_numbers,
    store_part,
    store_statistics,
    target,
    transpose_rows,
)
from handgrad.joins.fp8.formats import Form, plain
from handgrad.ops import cuda
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.cuda.rmsnorm import normalised, updated_stream
from handgrad.ops.sizes import rmsnorm_backward_tile, rmsnorm_programs


def rmsnorm_forward(out: Form, rstd: Tensor, inp: Tensor) -> None:
    norm_forward(out, lambda y: cuda.rmsnorm_forward(y, rstd, inp), _forward, rstd, inp)


def rmsnorm_backward(dresidual_inout: Form, dout: Tensor, inp: Tensor, rstd: Tensor) -> None:
    dresidual = plain(dresidual_inout)
    if not updated_in_fp8(dresidual_inout):
        cuda.rmsnorm_backward(dresidual, dout, inp, rstd)
        quantize_plain(dresidual_inout)
        return
    N, C = inp.shape
    block, rows, warps = rmsnorm_backward_tile(C)
    programs = rmsnorm_programs(N, C)
    form = dresidual, dresidual_inout.rows, *target(dresidual_inout, programs)
    launch(_backward, (programs,), *form, dout, inp, rstd, N, C, block, rows, num_warps=warps)
    count_numbers(dresidual_inout, dresidual)
    transpose_rows(dresidual_inout)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    out, rows, scaling, statistics, PARTS, rstd, inp, N, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """out may be None."""
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    place, inside = first * C + (row * C + column), in_rows & in_row
    y, row_rstd = normalised(inp, place, inside, C)
    if out is not None:
        tl.store(out + place, y, mask=inside)
    y = y.to(tl.float32)  # 0 outside of the tensor
    store_rows(rows, place, y, tl.load(scaling + SCALE), inside)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dresidual, rows, scaling, statistics, PARTS, dout, inp, rstd, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Writes only the largest number of the statistics."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    largest = tl.zeros((ROWS, 1), tl.float32)
    scale = tl.load(scaling + SCALE)
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        in_rows = row < N - first
        place, inside = tl.cast(first, tl.int64) * C + (row * C + column), in_rows & (column < C)
        updated = updated_stream((dresidual, dout, inp, rstd), place, first + row, in_rows, inside, C)
        tl.store(dresidual + place, updated, mask=inside)
        u = updated.to(tl.float32)  # 0 outside of the tensor
        store_rows(rows, place, u, scale, inside)
        largest = tl.maximum(largest, tl.max(tl.abs(u), 1, keep_dims=True))
    store_part(statistics, PARTS, tl.program_id(0), tl.max(tl.max(largest, 1), 0), 0, 0)
