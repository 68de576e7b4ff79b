"""Bias gradients from fp8 output gradients."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.formats import Form, plain
from handgrad.ops import cuda
from handgrad.ops.cuda.launch import launch

INVERSE = tl.constexpr(formats.INVERSE)

# Of a transposed tensor a program sums whole rows: 4.1 of 4.2 TB/s with four loads of a lane under way.
ROWS, COLUMNS, STAGES, WARPS = 4, 1024, 4, 4


def bias_backward(dbias_acc: Tensor, dout: Form, *, scratch: Tensor) -> None:
    if isinstance(dout, Tensor) or dout.columns is None:
        cuda.bias_backward(dbias_acc, plain(dout), scratch=scratch)
        return
    O, N = dout.columns.shape
    assert dout.columns.is_contiguous(), "columns of a chunk"
    tensors = dbias_acc, dout.columns, dout.scaling
    launch(_sum_fp8_rows, (triton.cdiv(O, ROWS),), *tensors, O, N, ROWS, COLUMNS, STAGES, num_warps=WARPS)


@triton.jit(do_not_specialize_on_alignment=["scaling"])
def _sum_fp8_rows(sums_acc, dout, scaling, O, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """sums_acc (O) += sums over the rows of dout (O, N), unscaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    first = dout + row.to(tl.int64) * N
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[None, :]
        sums += tl.load(first + column, mask=(row < O) & (column < N), other=0.0).to(tl.float32)
    total = tl.sum(sums, 1, keep_dims=True) * tl.load(scaling + INVERSE)
    tl.store(sums_acc + row, tl.load(sums_acc + row, mask=row < O) + total, mask=row < O)
