"""Layer norm that also writes fp8, and code shared by all such norms. They write fp8 rows in addition to the 16-bit form or
instead; a separate kernel transposes them."""

from collections.abc import Callable
from typing import Any, TypeGuard

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.quantizing import (
    SCALE,
    UNALIGNED,
    at_own_scale,
    count_numbers,
    limits,
    quantize,
    rounded,
    store_part,
    store_statistics,
    target,
    transpose_rows,
)
from handgrad.joins.fp8.formats import Form, Quantized, plain
from handgrad.ops import cuda
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import backward_begin, backward_rows, forward_places, normalised, store_sums
from handgrad.ops.sizes import backward_tile, forward_tile


def norm_forward(
    out: Form, in_16_bits: Callable[[Tensor], None], kernel: Any, *tensors: Any, mixed: tuple[Tensor | None, ...] = ()
) -> None:
    """Fills out (N, C). Without fp8 rows, calls `in_16_bits`, which does not quantise; else launches `kernel` on `mixed`,
    the forms of out and `tensors`."""
    if isinstance(out, Tensor) or out.rows is None:
        in_16_bits(plain(out))
        quantize_plain(out)
        return
    N, C = out.shape
    block, rows, warps = forward_tile(C)
    forms = out.plain, out.rows, *target(out, triton.cdiv(N, rows))
    arguments = *mixed, *forms, *tensors, N, C, block, rows, *limits(out)
    at_own_scale(out, lambda: launch(kernel, (triton.cdiv(N, rows),), *arguments, num_warps=warps))
    transpose_rows(out)


def updated_in_fp8(dresidual: Form) -> TypeGuard[Quantized]:
    """True if the kernel that updates the stream's gradient also quantises it. Without rows, or with current scaling,
    another kernel quantises it afterwards, because the in-place update cannot be repeated."""
    return isinstance(dresidual, Quantized) and not dresidual.current and dresidual.rows is not None


def quantize_plain(tensor: Form) -> None:
    """Quantises the 16-bit form, if the tensor has fp8 forms."""
    if isinstance(tensor, Quantized):
        quantize(tensor, plain(tensor))


def layernorm_forward(out: Form, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    tensors = mean, rstd, inp, weight, bias
    norm_forward(out, lambda y: cuda.layernorm_forward(y, *tensors), _forward, *tensors)


def layernorm_backward(
    dresidual_inout: Form,
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
    dresidual, tensors = plain(dresidual_inout), (dout, inp, mean, rstd, weight)
    if not updated_in_fp8(dresidual_inout):
        cuda.layernorm_backward(dresidual, dweight_acc, dbias_acc, *tensors, dbias_below_acc, scratch=scratch)
        quantize_plain(dresidual_inout)
        return
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    accumulators = [acc for acc in (dweight_acc, dbias_acc, dbias_below_acc) if acc is not None]
    partials = float32_of(scratch, programs * len(accumulators) * C)
    form, below = (dresidual_inout.rows, *target(dresidual_inout, programs)), dbias_below_acc is not None
    launch(_backward, (programs,), dresidual, *form, partials, *tensors, N, C, *tile, below, stages, num_warps=warps)
    add_partials(accumulators, partials, programs)
    count_numbers(dresidual_inout, dresidual)  # counting in the kernel would cost registers and occupancy
    transpose_rows(dresidual_inout)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    out, rows, scaling, statistics, PARTS, mean, rstd, inp, weight, bias, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """out may be None."""
    first, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = first * C + (row * C + column), in_rows & in_row
    y, row_mean, row_rstd = normalised((inp, weight, bias), offset, column, inside, in_row, C)
    if out is not None:
        tl.store(out + offset, y, mask=inside)
    y = y.to(tl.float32)
    store_rows(rows, offset, y, tl.load(scaling + SCALE), inside)
    y = tl.where(in_rows, y, 0.0)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(mean + first + row, row_mean, mask=in_rows)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit
def store_rows(rows, offset, x, scale, inside):
    """Stores float32 x as fp8, eight numbers of a lane per store."""
    tl.store(tl.max_contiguous(rows + offset, (1, 8)), rounded(x, scale, rows.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dresidual, rows, scaling, statistics, PARTS, partials, dout, inp, mean, rstd, weight, N, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BELOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes only amax of the statistics."""
    row, column, w, sums = backward_begin(weight, C, BLOCK_C, ROWS)
    LANE: tl.constexpr = 8  # neighbouring numbers in a lane, which keeps their maximum
    amax = tl.zeros((BLOCK_C // LANE,), tl.float32)
    scale = tl.load(scaling + SCALE)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        tensors = dresidual, dout, inp, mean, rstd
        updated, offset, inside, sums = backward_rows(tensors, w, sums, first, row, column, N, C, BELOW)
        u = updated.to(tl.float32)
        store_rows(rows, offset, u, scale, inside)
        magnitude = tl.abs(u) if C % LANE == 0 else tl.where(column < C, tl.abs(u), 0.0)
        magnitude = tl.reshape(magnitude, (ROWS, BLOCK_C // LANE, LANE))
        amax = tl.maximum(amax, tl.max(tl.max(magnitude, 2), 0))
    store_sums(partials, sums, column, C, BELOW)
    largest = tl.max(tl.where(tl.arange(0, BLOCK_C // LANE) * LANE < C, amax, 0.0), 0)
    store_part(statistics, PARTS, tl.program_id(0), largest, 0, 0)
