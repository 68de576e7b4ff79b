"""RMS norm that also writes fp8."""

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
from handgrad.joins.fp8.sizes import rmsnorm_programs
from handgrad.ops import cuda
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.cuda.rmsnorm import backward_rows, normalised
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.sizes import backward_tile, rmsnorm_backward_tile


def rmsnorm_forward(
    out: Form, rstd: Tensor, inp: Tensor, gain: Tensor | None = None, *, epsilon: float = RMSNORM_EPSILON, plus: float = 0
) -> None:
    tensors, options = (rstd, inp, gain), {"epsilon": epsilon, "plus": plus}
    norm_forward(out, lambda y: cuda.rmsnorm_forward(y, *tensors, **options), _forward, *tensors, epsilon, plus)


def rmsnorm_backward(
    dresidual_inout: Form,
    dgain_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor | None,
    *,
    plus: float = 0,
    scratch: Tensor,
) -> None:
    dresidual, tensors = plain(dresidual_inout), (dout, inp, rstd)
    if not updated_in_fp8(dresidual_inout):
        cuda.rmsnorm_backward(dresidual, dgain_acc, *tensors, gain, plus=plus, scratch=scratch)
        quantize_plain(dresidual_inout)
        return
    assert not plus  # a network whose gains have one has forms of the loss head alone
    (N, C), rows = inp.shape, dresidual_inout.rows
    if gain is None:
        programs, (*tile, warps) = rmsnorm_programs(N, C), rmsnorm_backward_tile(C)
        arguments = dresidual, rows, *target(dresidual_inout, programs), *tensors, N, C, *tile
        launch(_backward, (programs,), *arguments, num_warps=warps)
    else:
        assert dgain_acc is not None
        programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
        partials = float32_of(scratch, programs * C)
        arguments = dresidual, rows, *target(dresidual_inout, programs), partials, *tensors, gain, N, C, *tile, stages
        launch(_gain_backward, (programs,), *arguments, num_warps=warps)
        add_partials((dgain_acc,), partials, programs)
    count_numbers(dresidual_inout, dresidual)
    transpose_rows(dresidual_inout)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    out, rows, scaling, statistics, PARTS, rstd, inp, gain, epsilon, PLUS: tl.constexpr, N, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """out may be None."""
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = first * C + (row * C + column), in_rows & in_row
    y, row_rstd = normalised(inp, gain, offset, column, inside, in_row, epsilon, C, PLUS)
    if out is not None:
        tl.store(out + offset, y, mask=inside)
    y = y.to(tl.float32)  # 0 outside of the tensor
    store_rows(rows, offset, y, tl.load(scaling + SCALE), inside)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dresidual, rows, scaling, statistics, PARTS, dout, inp, rstd, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Writes only amax of the statistics."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    largest = tl.zeros((ROWS, 1), tl.float32)
    scale = tl.load(scaling + SCALE)
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        in_rows = row < N - first
        offset, inside = tl.cast(first, tl.int64) * C + (row * C + column), in_rows & (column < C)
        updated, _ = backward_rows((dresidual, dout, inp, rstd), None, offset, first + row, in_rows, inside, C)
        tl.store(dresidual + offset, updated, mask=inside)
        u = updated.to(tl.float32)  # 0 outside of the tensor
        store_rows(rows, offset, u, scale, inside)
        largest = tl.maximum(largest, tl.max(tl.abs(u), 1, keep_dims=True))
    store_part(statistics, PARTS, tl.program_id(0), tl.max(tl.max(largest, 1), 0), 0, 0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _gain_backward(
    dresidual, rows, scaling, statistics, PARTS, partials, dout, inp, rstd, gain, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like the plain kernel. Writes only amax of the statistics."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    in_row = column < C
    g = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    sums, largest = tl.zeros((1, BLOCK_C), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    scale = tl.load(scaling + SCALE)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = row < N - first
        inside = in_rows & in_row
        offset = tl.cast(first, tl.int64) * C + (row * C + column)
        updated, dgain = backward_rows((dresidual, dout, inp, rstd), g, offset, first + row, in_rows, inside, C)
        tl.store(dresidual + offset, updated, mask=inside)
        sums += tl.sum(dgain, 0, keep_dims=True)
        u = updated.to(tl.float32)  # 0 outside of the tensor
        store_rows(rows, offset, u, scale, inside)
        largest = tl.maximum(largest, tl.max(tl.abs(u), 1, keep_dims=True))
    tl.store(partials + tl.program_id(0) * C + column, sums, mask=in_row)
    store_part(statistics, PARTS, tl.program_id(0), tl.max(tl.max(largest, 1), 0), 0, 0)
