"""Column sums in two stages, for bias gradients and for the parameter gradients of norms."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch
from handgrad.ops.sizes import BIAS_COLUMNS, BIAS_ROWS, row_split

# Stage 1: a fixed number of programs each sum their own rows and write one row of partial sums. Stage 2 adds the partial
# rows and then the accumulator. The order of every sum depends only on the shapes, so neither the GPU nor its scheduler
# changes the bits.

WARPS = 4  # per program of stage 1

# Stage 2. A strip of 16 columns is 64 bytes, two sectors: 768 columns make 48 strips, and three sums 144 programs. A single
# warp walking 512 rows would take longer than stage 1.
PARTIAL_ROWS, PARTIAL_COLUMNS, PARTIAL_WARPS = 256, 16, 4


def bias_backward(dbias_acc: Tensor, dout: Tensor, *, scratch: Tensor) -> None:
    N, O = dout.shape
    split = row_split(N)
    partials = float32_of(scratch, split * O)
    grid, tile = (triton.cdiv(O, BIAS_COLUMNS), split), (BIAS_ROWS, BIAS_COLUMNS)
    launch(_sum_columns, grid, partials, dout, N, O, *tile, num_warps=WARPS)
    add_partials((dbias_acc,), partials, split)


def float32_of(scratch: Tensor, elements: int) -> Tensor:
    """The first `elements` numbers of the uint8 scratch buffer, as float32."""
    assert scratch.numel() >= 4 * elements, f"scratch of {scratch.numel()} bytes, {4 * elements} needed"
    return scratch[: 4 * elements].view(torch.float32)


def add_partials(accumulators: Sequence[Tensor], partials: Tensor, rows: int) -> None:
    """accumulators[s] (O) += the sum over the rows of partials (rows, len(accumulators), O); at most three accumulators."""
    slots, O = len(accumulators), accumulators[0].shape[0]
    first, second, third = (*accumulators, *accumulators[:1], *accumulators[:1])[:3]
    grid, tile = (triton.cdiv(O, PARTIAL_COLUMNS), slots), (PARTIAL_ROWS, PARTIAL_COLUMNS)
    launch(_add_partials, grid, first, second, third, partials, rows, O, slots, *tile, num_warps=PARTIAL_WARPS)


@triton.jit
def _sum_columns(partials, dout, N, O, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row p of partials (split, O) = the sum of the blocks of rows p, p + split, p + 2 split, ..."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_row = column < O
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)  # per lane; reduced across lanes and warps once, at the end
    for start in range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        sums += tl.load(dout + row.to(tl.int64) * O + column, mask=(row < N) & in_row, other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(1) * O + column, tl.sum(sums, 0, keep_dims=True), mask=in_row)


@triton.jit
def _add_partials(
    first_acc, second_acc, third_acc, partials, P, O, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Adds one strip of columns of one of the sums."""
    slot = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_row = column < O
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        sums += tl.load(partials + (row * SLOTS + slot) * O + column, mask=(row < P) & in_row, other=0.0)
    total = tl.sum(sums, 0, keep_dims=True)
    if slot == 0:
        tl.store(first_acc + column, tl.load(first_acc + column, mask=in_row) + total, mask=in_row)
    elif slot == 1:
        tl.store(second_acc + column, tl.load(second_acc + column, mask=in_row) + total, mask=in_row)
    else:
        tl.store(third_acc + column, tl.load(third_acc + column, mask=in_row) + total, mask=in_row)
