"""RMS norm with a gain that also writes fp8: the rows beside the 16-bit ones or instead of them, their transpose by a
kernel of its own."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.fp8.cuda.layernorm import forward_parts, store_rows
from handgrad.fp8.cuda.quantizing import (
    SCALE,
    UNALIGNED,
    at_own_scale,
    count_numbers,
    limits,
    quantize,
    store_part,
    store_statistics,
    target,
    transpose_rows,
)
from handgrad.fp8.formats import Form, Quantized, plain
from handgrad.ops import cuda
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.gained_rmsnorm import backward_rows, normalised
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import backward_tile, forward_places, forward_tile


def gained_rmsnorm_forward(out: Form, rstd: Tensor, inp: Tensor, gain: Tensor, *, epsilon: float) -> None:
    if isinstance(out, Tensor) or out.rows is None:
        cuda.gained_rmsnorm_forward(plain(out), rstd, inp, gain, epsilon=epsilon)
        if isinstance(out, Quantized):
            quantize(out, plain(out))
        return
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    form = out.plain, out.rows, *target(out, forward_parts(N, C))
    arguments = *form, rstd, inp, gain, epsilon, N, C, block, rows, *limits(out)
    at_own_scale(out, lambda: launch(_forward, (triton.cdiv(N, rows),), *arguments, num_warps=warps))
    transpose_rows(out)


def gained_rmsnorm_backward(
    dresidual_inout: Form,
    dgain_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor,
    *,
    scratch: Tensor,
) -> None:
    """A stream without rows, or whose scale waits for it, is read once more: it cannot be updated twice."""
    dresidual, tensors = plain(dresidual_inout), (dout, inp, rstd, gain)
    if isinstance(dresidual_inout, Tensor) or dresidual_inout.current or dresidual_inout.rows is None:
        cuda.gained_rmsnorm_backward(dresidual, dgain_acc, *tensors, scratch=scratch)
        if isinstance(dresidual_inout, Quantized):
            quantize(dresidual_inout, dresidual)
        return
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    partials = float32_of(scratch, programs * C)
    arguments = dresidual, dresidual_inout.rows, *target(dresidual_inout, programs), partials, *tensors, N, C
    launch(_backward, (programs,), *arguments, *tile, stages, num_warps=warps)
    add_partials((dgain_acc,), partials, programs)
    count_numbers(dresidual_inout, dresidual)
    transpose_rows(dresidual_inout)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    out, rows, scaling, statistics, PARTS, rstd, inp, gain, epsilon, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """out may be None."""
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    place, inside = first * C + (row * C + column), in_rows & in_row
    y, row_rstd = normalised((inp, gain), place, column, inside, in_row, epsilon, C)
    if out is not None:
        tl.store(out + place, y, mask=inside)
    y = y.to(tl.float32)  # 0 outside of the tensor
    store_rows(rows, place, y, tl.load(scaling + SCALE), inside)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dresidual, rows, scaling, statistics, PARTS, partials, dout, inp, rstd, gain, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As the plain one; of the statistics, the largest number alone."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    in_row = column < C
    g = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    sums, largest = tl.zeros((1, BLOCK_C), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    scale = tl.load(scaling + SCALE)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = row < N - first
        inside = in_rows & in_row
        place = tl.cast(first, tl.int64) * C + (row * C + column)
        tensors = dresidual, dout, inp, rstd
        updated, dgain = backward_rows(tensors, g, place, first + row, in_rows, inside, C)
        tl.store(dresidual + place, updated, mask=inside)
        sums += dgain
        u = updated.to(tl.float32)  # 0 outside of the tensor
        store_rows(rows, place, u, scale, inside)
        largest = tl.maximum(largest, tl.max(tl.abs(u), 1, keep_dims=True))
    tl.store(partials + tl.program_id(0) * C + column, sums, mask=in_row)
    store_part(statistics, PARTS, tl.program_id(0), tl.max(tl.max(largest, 1), 0), 0, 0)
