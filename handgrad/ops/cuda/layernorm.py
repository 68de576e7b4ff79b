"""Layer norm: every row read once forward and once backward."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.fp8 import formats
from handgrad.fp8.cuda.quantize import (
    UNALIGNED,
    count_numbers,
    limits,
    quantize,
    rescale,
    rounded,
    store_part,
    store_statistics,
    transpose_rows,
)
from handgrad.fp8.formats import Form, Quantized, plain
from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON

SCALE = tl.constexpr(formats.SCALE)

# Layer norm (Ba et al. 2016): x^ = (x - mean) rstd, y = x^ w + b, over the last axis, statistics in float32.
# Backward: with g = dy w,  dx = rstd (g - mean(g) - x^ mean(g x^)),  dw = sum dy x^,  db = sum dy.

# The fp8 rows are written beside the 16-bit ones or instead of them, their transpose by a kernel of its own.

# Forward: a warp holds whole rows, 64 elements per lane, so that no reduction leaves it; two short rows at a time halve the
# number of programs, whose launches would otherwise be the limit (65,536 in 47 us).
FORWARD_ELEMENTS_PER_WARP = 2048

# Backward: a fixed number of programs of four warps that all fit on 132 multiprocessors at once, and whose rows of partial
# sums are little beside 65,536 rows. Two rows at a time share the reductions' barriers. The three inputs of the next rows
# are on their way while these are summed (three stages of asynchronous copies): 92 % of the copy bandwidth where one stage
# reaches 68 %. In float32 the stages would not fit the shared memory of every GPU.
BACKWARD_PROGRAMS = 512  # half of it where a row is padded to more than 1024 channels
BACKWARD_ROWS = 2
BACKWARD_WARPS = 4
BACKWARD_STAGES = 3


def forward_tile(channels: int) -> tuple[int, int, int]:
    """(padded channels, rows, warps) of a program of the forward."""
    block = triton.next_power_of_2(channels)
    return block, min(16, max(1, FORWARD_ELEMENTS_PER_WARP // block)), min(16, max(1, block // FORWARD_ELEMENTS_PER_WARP))


def backward_tile(channels: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """(programs, padded channels, rows, warps, stages) of the backward. No more warps than 16-byte loads cover of a row:
    the sums over rows then stay in a lane."""
    block = triton.next_power_of_2(channels)
    programs = BACKWARD_PROGRAMS if block <= 1024 else -(-BACKWARD_PROGRAMS // 2)
    warps = max(1, min(BACKWARD_WARPS, block // 256))
    small = block <= 2048 and itemsize == 2
    return programs, block, BACKWARD_ROWS if block <= 2048 else 1, warps, BACKWARD_STAGES if small else 1


def forward_parts(N: int, C: int) -> int:
    """Parts of the statistics that the forward writes."""
    return triton.cdiv(N, forward_tile(C)[1])


def backward_parts(N: int, C: int) -> int:
    """Parts of the statistics that the backward writes, of 16-bit numbers."""
    programs, _, rows, _, _ = backward_tile(C, 2)
    return min(programs, triton.cdiv(N, rows))


def layernorm_forward(out: Form, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    """out, inp (N, C); mean, rstd (N); weight, bias (C)."""
    tensors = mean, rstd, inp, weight, bias
    if isinstance(out, Tensor):
        _launch_forward(out, None, *tensors)
    elif out.rows is None:
        _launch_forward(plain(out), None, *tensors)
        quantize(out, plain(out))
    else:
        _launch_forward(out.plain, out, *tensors)
        if out.current:
            rescale(out)
            _launch_forward(out.plain, out, *tensors)
        transpose_rows(out)


def _launch_forward(
    out: Tensor | None,
    quantized: Quantized | None,
    mean: Tensor,
    rstd: Tensor,
    inp: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    tensors = out, *quantized_arguments(quantized, forward_parts(N, C)), mean, rstd, inp, weight, bias
    _forward[(triton.cdiv(N, rows),)](
        *tensors, N, C, block, rows, LAYERNORM_EPSILON, *limits_of(quantized), num_warps=warps
    )


def quantized_arguments(quantized: Quantized | None, parts: int) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """rows, scaling, statistics and its parts, as the kernels take them."""
    if quantized is None:
        return None, None, None, 0
    room = quantized.statistics.shape[1]
    assert room >= parts, f"{room} parts, {parts} needed"
    return quantized.rows, quantized.scaling, quantized.statistics, room


def limits_of(quantized: Quantized | None) -> tuple[float, float]:
    return (0.0, 0.0) if quantized is None else limits(quantized)


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
    """Adds dL/dinp to the residual stream's gradient (N, C), and the parameter gradients (C) to theirs.

    The column sums of the updated stream (rounded, as the next kernel reads it) go to `dbias_below_acc` unless it is None.
    """
    dresidual = plain(dresidual_inout)
    quantized = dresidual_inout if isinstance(dresidual_inout, Quantized) else None
    # The stream cannot be updated twice: where its scale waits for it, and where there are no rows, it is read once more.
    fused = None if quantized is None or quantized.current or quantized.rows is None else quantized
    N, C = inp.shape
    programs, block, rows, warps, stages = backward_tile(C, inp.element_size())
    programs = min(programs, triton.cdiv(N, rows))
    accumulators = (dweight_acc, dbias_acc) if dbias_below_acc is None else (dweight_acc, dbias_acc, dbias_below_acc)
    partials = float32_of(scratch, programs * len(accumulators) * C)
    _backward[(programs,)](
        dresidual,
        *quantized_arguments(fused, programs),
        partials,
        dout,
        inp,
        mean,
        rstd,
        weight,
        N,
        C,
        block,
        rows,
        dbias_below_acc is not None,
        stages,
        num_warps=warps,
    )
    add_partials(accumulators, partials, programs)
    if fused is not None:
        count_numbers(fused, dresidual)  # counting in the kernel above would cost it registers, and programs at once
        transpose_rows(fused)
    elif quantized is not None:
        quantize(quantized, dresidual)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward(
    out,
    rows,
    scaling,
    statistics,
    PARTS,
    mean,
    rstd,
    inp,
    weight,
    bias,
    N,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr,
):
    """The 16-bit output, the fp8 rows with their statistics, or both: what is not wanted is None."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    in_rows, in_row = first + row < N, column < C
    place = first * C + (row * C + column)
    x = tl.load(inp + place, mask=in_rows & in_row, other=0.0).to(tl.float32)
    row_mean = tl.sum(x, 1, keep_dims=True) / C
    centred = tl.where(in_row, x - row_mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) / C
    row_rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + EPSILON))
    w = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=in_row, other=0.0).to(tl.float32)
    y = (centred * row_rstd * w + b).to(inp.dtype.element_ty)
    if out is not None:
        tl.store(out + place, y, mask=in_rows & in_row)
    if rows is not None:
        y = y.to(tl.float32)
        tl.store(
            tl.max_contiguous(rows + place, (1, 8)),
            rounded(y, tl.load(scaling + SCALE), rows.dtype.element_ty),
            mask=in_rows & in_row,
        )
        y = tl.where(in_rows, y, 0.0)
        store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)
    tl.store(mean + first + row, row_mean, mask=in_rows)
    tl.store(rstd + first + row, row_rstd, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _backward(
    dresidual,
    rows,
    scaling,
    statistics,
    PARTS,
    partials,
    dout,
    inp,
    mean,
    rstd,
    weight,
    N,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes the blocks of rows p, p + P, p + 2 P, ... and writes row p of partials (P, 2 or 3, C). Writes the fp8
    rows of the updated stream and its largest number unless they are None."""
    column = tl.arange(0, BLOCK_C)[None, :]
    in_row = column < C
    w = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    dw = tl.zeros((1, BLOCK_C), tl.float32)
    db = tl.zeros((1, BLOCK_C), tl.float32)
    below = tl.zeros((1, BLOCK_C), tl.float32)
    LANE: tl.constexpr = 8  # numbers side by side in a lane, which keeps the largest of them
    amax = tl.zeros((BLOCK_C // LANE,), tl.float32)
    scale = 1.0
    if rows is not None:
        scale = tl.load(scaling + SCALE)
    row = tl.arange(0, ROWS)[:, None]
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = row < N - first
        inside = in_rows & in_row
        place = tl.cast(first, tl.int64) * C + (row * C + column)
        dy = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
        stream = tl.load(dresidual + place, mask=inside, other=0.0).to(tl.float32)
        row_rstd = tl.load(rstd + first + row, mask=in_rows, other=0.0)
        normal = (x - tl.load(mean + first + row, mask=in_rows, other=0.0)) * row_rstd
        # Outside the row dy and w are 0: neither the sums nor the stored columns see what `normal` holds there.
        g = dy * w
        g_mean = tl.sum(g, 1, keep_dims=True) / C
        gx_mean = tl.sum(g * normal, 1, keep_dims=True) / C
        updated = (stream + row_rstd * (g - g_mean - normal * gx_mean)).to(dresidual.dtype.element_ty)
        tl.store(dresidual + place, updated, mask=inside)
        dw += tl.sum(dy * normal, 0, keep_dims=True)
        db += tl.sum(dy, 0, keep_dims=True)
        if BELOW:
            below += tl.sum(updated.to(tl.float32), 0, keep_dims=True)
        if rows is not None:
            u = updated.to(tl.float32)
            tl.store(tl.max_contiguous(rows + place, (1, 8)), rounded(u, scale, rows.dtype.element_ty), mask=inside)
            magnitude = tl.abs(u) if C % LANE == 0 else tl.where(in_row, tl.abs(u), 0.0)
            magnitude = tl.reshape(magnitude, (ROWS, BLOCK_C // LANE, LANE))
            amax = tl.maximum(amax, tl.max(tl.max(magnitude, 2), 0))
    partials += tl.program_id(0) * (2 + BELOW) * C + column
    tl.store(partials, dw, mask=in_row)
    tl.store(partials + C, db, mask=in_row)
    if BELOW:
        tl.store(partials + 2 * C, below, mask=in_row)
    if rows is not None:
        largest = tl.max(tl.where(tl.arange(0, BLOCK_C // LANE) * LANE < C, amax, 0.0), 0)
        store_part(statistics, PARTS, tl.program_id(0), largest, 0, 0)
