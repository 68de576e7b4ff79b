"""Dropout alone, and together with the residual sum: one kernel, a row per warp up to 2048 channels."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.dropout.cuda.masks import RANDOM, kept, kernel_arguments, row_keys, sample_key
from handgrad.joins.dropout.masks import Dropout
from handgrad.ops.cuda.launch import launch
from handgrad.ops.sizes import forward_tile


def dropout_forward(out: Tensor, inp: Tensor, dropout: Dropout) -> None:
    launch_tiles(out, None, inp, dropout)


def dropout_backward(dinp: Tensor, dout: Tensor, dropout: Dropout) -> None:
    launch_tiles(dinp, None, dout, dropout)


def dropout_residual_forward(branch_to_out_inout: Tensor, residual: Tensor, dropout: Dropout) -> None:
    launch_tiles(branch_to_out_inout, residual, branch_to_out_inout, dropout)


def launch_tiles(out: Tensor, residual: Tensor | None, inp: Tensor, dropout: Dropout) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    T = N // dropout.samples.shape[0]
    grid = (triton.cdiv(N, rows),)
    launch(_dropout, grid, out, residual, inp, *kernel_arguments(dropout), N, T, C, block, rows, num_warps=warps)


@triton.jit(do_not_specialize=RANDOM)
def _dropout(
    out, residual, inp, samples, stream, threshold, dropout_scale, N, T, C: tl.constexpr, BLOCK_C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    in_rows = row < N
    inside = in_rows & (column < C)
    place = row.to(tl.int64) * C + column
    keys = row_keys(sample_key(samples, tl.where(in_rows, row // T, 0), stream), 0, row % T)
    x = tl.load(inp + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(kept(keys, 0, column, threshold), x * dropout_scale, 0.0)
    if residual is not None:
        x += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=inside)
