"""Quantising to fp8, and the scales. All kernels that write fp8 use the functions at the end."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from handgrad import ops
from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.formats import Quantized
from handgrad.joins.fp8.sizes import QUANTIZE_TILE, tiles
from handgrad.ops.cuda.launch import launch

STEP = tl.constexpr(ops.CONTROL_STEP)
SCALE, INVERSE, COUNTING = tl.constexpr(formats.SCALE), tl.constexpr(formats.INVERSE), tl.constexpr(formats.COUNTING)
MARGIN, SATURATED_STEPS = tl.constexpr(formats.MARGIN), tl.constexpr(formats.SATURATED_STEPS)
SCALING_PLACES = tl.constexpr(formats.SCALING_PLACES)
AMAX, CLIPPED, VANISHED = (tl.constexpr(place) for place in (formats.AMAX, formats.CLIPPED, formats.VANISHED))
STATISTICS_PLACES = tl.constexpr(formats.STATISTICS_PLACES)
USED_SCALE, SATURATED = tl.constexpr(formats.USED_SCALE), tl.constexpr(formats.SATURATED)
REPORT_PLACES = tl.constexpr(formats.REPORT_PLACES)
LARGEST_MANTISSA = tl.constexpr(formats.LARGEST_MANTISSA)
LARGEST_SCALE_EXPONENT = tl.constexpr(formats.LARGEST_SCALE_EXPONENT)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)  # of float32

WARPS = 4

# Separate counting: as many programs as run concurrently. Most launches have nothing to do.
COUNTERS, COUNT_BLOCK = 512, 2048

# One program folds a tensor's statistics: 16 KB of up to 50,000 parts in flight.
PARTS_BLOCK, PARTS_WARPS = 4096, 8

# Rows of `statistics` have any alignment: without this, Triton would compile each kernel for aligned and unaligned rows.
UNALIGNED = ["scaling", "statistics", "totals", "history", "report", "largest_exponents"]


Forms = tuple[Tensor | None, Tensor | None]  # rows and columns


def limits(tensor: Quantized) -> tuple[float, float]:
    """(the format's largest number, the largest that rounds to zero), for `store_statistics`."""
    return formats.largest_number(tensor.format), formats.VANISHES_AT[tensor.format]


def grid_of(N: int, C: int) -> tuple[int, int]:
    """Programs along both sides of a tensor."""
    return triton.cdiv(N, QUANTIZE_TILE[0]), triton.cdiv(C, QUANTIZE_TILE[1])


def target(out: Quantized, parts: int) -> tuple[Tensor, Tensor, int]:
    """The kernels' arguments (scaling, statistics, number of its parts). `parts`: written by the kernel."""
    room = out.statistics.shape[1]
    assert room >= parts, f"{room} parts, {parts} needed"
    return out.scaling, out.statistics, room


def quantize(out: Quantized, inp: Tensor) -> None:
    N, C = inp.shape
    into = target(out, tiles(N, C, QUANTIZE_TILE))
    if out.current:
        _launch_quantize(out, (None, None), into, inp)
        rescale(out)
    _launch_quantize(out, (out.rows, out.columns), into, inp)


def write_forms(out: Quantized, inp: Tensor) -> None:
    """Writes the fp8 forms of inp (N, C) that out has, at the existing scale."""
    _launch_quantize(out, (out.rows, out.columns), (out.scaling, None, 0), inp)


def _launch_quantize(out: Quantized, forms: Forms, into: tuple[Tensor, Tensor | None, int], inp: Tensor) -> None:
    sizes = *inp.shape, *QUANTIZE_TILE
    launch(_quantize, grid_of(*inp.shape), *forms, *into, inp, *sizes, *limits(out), num_warps=WARPS)


def count_numbers(tensor: Quantized, inp: Tensor) -> None:
    """Writes only the counts of the statistics, of inp (N, C), in a step that counts."""
    elements, parts = inp.numel(), tensor.statistics.shape[1]
    grid = (min(COUNTERS, parts, triton.cdiv(elements, COUNT_BLOCK)),)
    arguments = tensor.statistics, parts, inp, elements, tensor.scaling, COUNT_BLOCK, *limits(tensor)
    launch(_count_numbers, grid, *arguments, num_warps=WARPS)


def transpose(columns: Tensor, rows: Tensor) -> None:
    """columns (C, N) = the transpose of rows (N, C), both fp8. If they are the first N of a buffer's M columns, as in the
    head's last chunk, transposes M rows to all M columns: nothing reads columns after N."""
    M, C = columns.stride(0), rows.shape[1]
    launch(_transpose, grid_of(M, C), columns, rows, M, C, *QUANTIZE_TILE, num_warps=WARPS)


def transpose_rows(tensor: Quantized) -> None:
    """Writes `columns` from `rows`, if the tensor has columns."""
    if tensor.columns is not None:
        assert tensor.rows is not None
        transpose(tensor.columns, tensor.rows)


def rescale(tensor: Quantized) -> None:
    """Sets the scale for the amax in the tensor's own statistics."""
    arguments = tensor.scaling, tensor.statistics, tensor.statistics.shape[1], formats.LARGEST_EXPONENT[tensor.format]
    launch(_rescale, (1,), *arguments, PARTS_BLOCK, num_warps=PARTS_WARPS)


def at_own_scale(tensor: Quantized, run: Callable[[], None]) -> None:
    """Calls `run`, which writes the tensor and its statistics; with `current`, sets the scale from these and repeats."""
    run()
    if tensor.current:
        rescale(tensor)
        run()


def fold_statistics(totals_inout: Tensor, statistics: Tensor) -> None:
    n, columns, parts = statistics.shape
    launch(_fold_statistics, (n, columns), totals_inout, statistics, parts, PARTS_BLOCK, num_warps=PARTS_WARPS)


def update_scaling(
    scaling_inout: Tensor,
    history_inout: Tensor,
    totals_inout: Tensor,
    report: Tensor,
    largest_exponents: Tensor,
    controls: Tensor,
    *,
    count_every: int,
    saturation_steps: int,
    widen: bool,
) -> None:
    """One program per tensor."""
    n, window = history_inout.shape
    tensors = scaling_inout, history_inout, totals_inout, report, largest_exponents, controls
    sizes, settings = (window, triton.next_power_of_2(window)), (count_every, saturation_steps, widen)
    launch(_update_scaling, (n,), *tensors, *sizes, *settings, num_warps=1)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _quantize(
    rows, columns, scaling, statistics, PARTS, inp, N, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """One tile. rows, columns and statistics may be None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (column < C)[None, :]
    offset = row.to(tl.int64)[:, None] * C + column[None, :]
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scaling + SCALE)
    if rows is not None:
        tl.store(rows + offset, rounded(x, scale, rows.dtype.element_ty), mask=inside)
    if columns is not None:
        transposed = tl.trans(rounded(x, scale, columns.dtype.element_ty))
        offset = column.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(columns + offset, transposed, mask=(column < C)[:, None] & (row < N)[None, :])
    if statistics is not None:
        part, programs = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.num_programs(0) * tl.num_programs(1)
        store_statistics(statistics, PARTS, part, x, scaling, LARGEST, VANISHES_AT)
        # Clear parts that another operation wrote for the same tensor, at an earlier scale.
        for unused in range(part + programs, PARTS, programs):
            store_part(statistics, PARTS, unused, 0.0, 0, 0)


@triton.jit
def _transpose(columns, rows, N, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(rows + row.to(tl.int64)[:, None] * C + column[None, :], mask=(row < N)[:, None] & (column < C)[None, :])
    offset = column.to(tl.int64)[:, None] * N + row[None, :]
    tl.store(columns + offset, tl.trans(x), mask=(column < C)[:, None] & (row < N)[None, :])


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _count_numbers(
    statistics, PARTS, inp, elements, scaling, BLOCK: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr
):
    """Program p counts the blocks p, p + P, p + 2 P, ..."""
    if tl.load(scaling + COUNTING) != 0:
        scale = tl.load(scaling + SCALE)
        clipped, vanished = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for start in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
            offset = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            scaled = tl.abs(tl.load(inp + offset, mask=offset < elements, other=0.0).to(tl.float32)) * scale
            clipped += (scaled > LARGEST).to(tl.int32)
            vanished += ((scaled <= VANISHES_AT) & (scaled > 0)).to(tl.int32)
        tl.store(statistics + CLIPPED * PARTS + tl.program_id(0), tl.sum(clipped, 0))
        tl.store(statistics + VANISHED * PARTS + tl.program_id(0), tl.sum(vanished, 0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _rescale(scaling, statistics, PARTS, LARGEST_EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, PARTS, BLOCK):
        part = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(statistics + AMAX * PARTS + part, mask=part < PARTS, other=0.0))
    store_scale(scaling, tl.max(largest, 0), tl.load(scaling + MARGIN), LARGEST_EXPONENT)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _fold_statistics(totals, statistics, PARTS, BLOCK: tl.constexpr):
    """Folds one place of one tensor."""
    tensor, column = tl.program_id(0), tl.program_id(1)
    totals += tensor * STATISTICS_PLACES + column
    statistics += (tensor * STATISTICS_PLACES + column).to(tl.int64) * PARTS
    before = tl.load(totals)
    largest, sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, PARTS, BLOCK):
        part = start + tl.arange(0, BLOCK)
        x = tl.load(statistics + part, mask=part < PARTS, other=0.0)
        largest = tl.maximum(largest, x)
        sums += x.to(tl.float64)
    joined = tl.maximum(before, tl.max(largest, 0).to(tl.float64))
    tl.store(totals, tl.where(column == AMAX, joined, before + tl.sum(sums, 0)))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _update_scaling(
    scaling, history, totals, report, largest_exponents, controls, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    COUNT_EVERY: tl.constexpr, SATURATION_STEPS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    scaling += tensor * SCALING_PLACES
    history += tensor * WINDOW
    totals += tensor * STATISTICS_PLACES
    report += tensor * REPORT_PLACES
    step = tl.load(controls + STEP).to(tl.int64)
    amax, clipped, vanished = tl.load(totals + AMAX), tl.load(totals + CLIPPED), tl.load(totals + VANISHED)
    scale, margin, saturated = tl.load(scaling + SCALE), tl.load(scaling + MARGIN), tl.load(scaling + SATURATED_STEPS)
    largest_exponent = tl.load(largest_exponents + tensor)
    slot = tl.arange(0, BLOCK)
    window = tl.load(history + slot, mask=slot < WINDOW, other=0.0)
    tl.debug_barrier()  # read everything before the first store

    largest = amax.to(tl.float32)
    limit = power_of_two(largest_exponent) * LARGEST_MANTISSA
    saturated = tl.where(largest * scale > limit, saturated + 1, 0.0)
    tl.store(report + AMAX, amax)
    tl.store(report + CLIPPED, clipped)
    tl.store(report + VANISHED, vanished)
    tl.store(report + USED_SCALE, scale)
    tl.store(report + SATURATED, saturated)
    if WIDEN:
        due = saturated >= SATURATION_STEPS
        margin += due.to(tl.float32)
        saturated = tl.where(due, 0.0, saturated)
        tl.store(scaling + MARGIN, margin)
    tl.store(scaling + SATURATED_STEPS, saturated)
    now = (step % WINDOW).to(tl.int32)
    new = tl.where(largest < float("inf"), largest, 0.0)
    tl.store(history + now, new)
    store_scale(scaling, tl.max(tl.where(slot == now, new, window), 0), margin, largest_exponent)
    tl.store(scaling + COUNTING, ((step + 1) % COUNT_EVERY == 0).to(tl.float32))
    tl.store(totals + AMAX, 0.0)
    tl.store(totals + CLIPPED, 0.0)
    tl.store(totals + VANISHED, 0.0)


@triton.jit
def store_scale(scaling, amax, margin, largest_exponent):
    """Stores scale and inverse for numbers up to amax, like the reference. Keeps them if amax is 0 or not finite."""
    tiny = amax < SMALLEST_NORMAL
    bits = tl.where(tiny, amax * (2.0**24), amax).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - tl.where(tiny, 127 + 24, 127)  # amax = f 2^exponent, 1 <= f < 2
    e = largest_exponent - exponent - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32) - margin.to(tl.int32)  # f > 1.75
    e = tl.minimum(tl.maximum(e, -LARGEST_SCALE_EXPONENT), LARGEST_SCALE_EXPONENT)
    if (amax > 0) & (amax < float("inf")):
        tl.store(scaling + SCALE, power_of_two(e))
        tl.store(scaling + INVERSE, power_of_two(-e))


@triton.jit
def power_of_two(e):
    """2^e for int32 e, as a normal float32 number."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


# Shared by the kernels that produce quantised tensors.


@triton.jit
def rounded(x, scale, TYPE: tl.constexpr):
    """x * scale in the fp8 format TYPE, for float32 x. The hardware conversion saturates."""
    return (x * scale).to(TYPE)


@triton.jit
def store_statistics(statistics, PARTS, part, x, scaling, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr):
    """Stores part `part` of statistics (3, PARTS) for a float32 tile x (rows, columns), which is 0 outside the tensor."""
    magnitude = tl.abs(x)
    amax = tl.max(tl.max(magnitude, 1), 0)
    clipped, vanished = 0, 0
    if tl.load(scaling + COUNTING) != 0:  # counting costs as much as the rest of a kernel
        tl.static_assert(x.shape[0] * x.shape[1] < 65536)
        scaled = magnitude * tl.load(scaling + SCALE)
        # Both counts in one sum: two of them cost a kernel 50 registers, counting or not.
        both = tl.where(scaled > LARGEST, 1, tl.where((scaled <= VANISHES_AT) & (magnitude > 0), 65536, 0))
        counts = tl.sum(tl.sum(both, 1), 0)
        clipped, vanished = counts & 65535, counts >> 16
    store_part(statistics, PARTS, part, amax, clipped, vanished)


@triton.jit
def store_part(statistics, PARTS, part, amax, clipped, vanished):
    tl.store(statistics + AMAX * PARTS + part, tl.maximum(amax, 0.0))  # 0 if all numbers are NaN
    tl.store(statistics + CLIPPED * PARTS + part, clipped)
    tl.store(statistics + VANISHED * PARTS + part, vanished)
