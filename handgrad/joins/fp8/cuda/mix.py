"""The mixed stream that enters a block, and its RMS norm, with fp8 results: the norm's output in the forward, the stream's
gradient in the backward. The mixture stays in 16 bits."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.layernorm import norm_forward, quantize_plain, store_rows, updated_in_fp8
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
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.cuda.mix import backward_rows, mixture, store_sums
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.sizes import backward_tile


def mix_rmsnorm_forward(
    mixed: Tensor | None,
    out: Form,
    rstd: Tensor,
    inp: Tensor,
    first: Tensor | None,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
) -> None:
    tensors = rstd, inp, first, residual_scalar, input_scalar
    norm_forward(out, lambda y: cuda.mix_rmsnorm_forward(mixed, y, *tensors), _forward, *tensors, mixed=(mixed,))


def mix_rmsnorm_backward(
    dstream_inout: Form,
    dfirst_inout: Tensor | None,
    dresidual_scalar_acc: Tensor | None,
    dinput_scalar_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    first: Tensor | None,
    rstd: Tensor,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
    *,
    scratch: Tensor,
) -> None:
    dstream, tensors = plain(dstream_inout), (dout, inp, first, rstd, residual_scalar, input_scalar)
    if not updated_in_fp8(dstream_inout):
        sums = dresidual_scalar_acc, dinput_scalar_acc
        cuda.mix_rmsnorm_backward(dstream, dfirst_inout, *sums, *tensors, scratch=scratch)
        quantize_plain(dstream_inout)
        return
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    accumulators = [acc for acc in (dresidual_scalar_acc, dinput_scalar_acc) if acc is not None]
    partials = float32_of(scratch, programs * len(accumulators))
    arguments = dstream, dstream_inout.rows, *target(dstream_inout, programs), dfirst_inout, partials, *tensors, N, C
    launch(_backward, (programs,), *arguments, *tile, stages, num_warps=warps)
    add_partials(accumulators, partials, programs)
    count_numbers(dstream_inout, dstream)
    transpose_rows(dstream_inout)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    mixed, out, rows, scaling, statistics, PARTS, rstd, inp, first, residual_scalar, input_scalar, N, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """mixed and out may be None."""
    start, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = start * C + (row * C + column), in_rows & in_row
    m, _, _ = mixture((inp, first, residual_scalar, input_scalar), offset, inside)
    if mixed is not None:
        tl.store(mixed + offset, m, mask=inside)
    m = m.to(tl.float32)
    row_rstd = rstd_of(tl.sum(m * m, 1, keep_dims=True), C)
    y = (m * row_rstd).to(inp.dtype.element_ty)
    if out is not None:
        tl.store(out + offset, y, mask=inside)
    y = y.to(tl.float32)  # 0 outside of the tensor
    store_rows(rows, offset, y, tl.load(scaling + SCALE), inside)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(rstd + start + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dstream, rows, scaling, statistics, PARTS, dfirst, partials, dout, inp, first, rstd, residual_scalar, input_scalar, N,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like the plain kernel. Writes only amax of the statistics."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    dr, ds, largest = tl.zeros((ROWS, 1), tl.float32), tl.zeros((ROWS, 1), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    scale = tl.load(scaling + SCALE)
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = start + row < N
        inside = in_rows & (column < C)
        offset = tl.cast(start, tl.int64) * C + (row * C + column)
        tensors = dstream, dfirst, dout, inp, first, rstd, residual_scalar, input_scalar
        updated, dr_rows, ds_rows = backward_rows(tensors, offset, start + row, in_rows, inside, C)
        dr += dr_rows
        ds += ds_rows
        tl.store(dstream + offset, updated, mask=inside)
        u = updated.to(tl.float32)  # 0 outside of the tensor
        store_rows(rows, offset, u, scale, inside)
        largest = tl.maximum(largest, tl.max(tl.abs(u), 1, keep_dims=True))
    store_sums(partials, dr, ds, residual_scalar, input_scalar)
    store_part(statistics, PARTS, tl.program_id(0), tl.max(tl.max(largest, 1), 0), 0, 0)
