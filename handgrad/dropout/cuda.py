"""Dropout: alone, and together with the residual sum; and its masks, which attention's kernels make, too."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.dropout import masks as places
from handgrad.dropout.masks import Dropout
from handgrad.ops.cuda.hashing import WEYL, mixed

# Dropout (Srivastava et al. 2014), inverted: y = M x / (1 - p), M = 1 with probability 1 - p, else 0.
# Backward: dx = M dy / (1 - p). M is not stored: both make it from (seed, site, sample, row, column).

ROWS, ROW_STRIDE, PAIR = tl.constexpr(places.ROWS), tl.constexpr(places.ROW_STRIDE), tl.constexpr(places.PAIR)

# A warp holds whole rows, 64 elements per lane, as in the layer norm's forward.
ELEMENTS_PER_WARP = 2048


def tile(channels: int) -> tuple[int, int, int]:
    """(padded channels, rows, warps) of a program."""
    block = triton.next_power_of_2(channels)
    return block, min(16, max(1, ELEMENTS_PER_WARP // block)), min(16, max(1, block // ELEMENTS_PER_WARP))


# Arguments that differ from place to place: one kernel for all.
RANDOM = ("stream", "threshold")


def kernel_arguments(dropout: Dropout | None) -> tuple[Tensor | None, int | None, int | None, float | None]:
    """samples, stream, threshold and scale, as the kernels take them: all None without dropout. The stream comes as int32,
    whatever its highest bit."""
    if dropout is None:
        return None, None, None, None
    return dropout.samples, dropout.stream - (dropout.stream >> 31 << 32), dropout.threshold, dropout.scale


def dropout_forward(out: Tensor, inp: Tensor, dropout: Dropout) -> None:
    """out (N, C) = inp (N, C) where it is kept, times 1 / (1 - p), else 0. `out` may be `inp`."""
    _launch(out, None, inp, dropout)


def dropout_backward(dinp: Tensor, dout: Tensor, dropout: Dropout) -> None:
    """dinp (N, C) from dout (N, C), which it may be: the same mask and factor as forward."""
    _launch(dinp, None, dout, dropout)


def dropout_residual_forward(branch_to_out_inout: Tensor, residual: Tensor, dropout: Dropout) -> None:
    """Turns a branch (N, C) into residual (N, C) + dropout(branch), in place, summed in float32 and rounded once."""
    _launch(branch_to_out_inout, residual, branch_to_out_inout, dropout)


def _launch(out: Tensor, residual: Tensor | None, inp: Tensor, dropout: Dropout) -> None:
    N, C = inp.shape
    block, rows, warps = tile(C)
    drop = kernel_arguments(dropout)
    T = N // dropout.samples.shape[0]
    _dropout[(triton.cdiv(N, rows),)](out, residual, inp, *drop, N, T, C, block, rows, num_warps=warps)


@triton.jit
def sample_key(samples, b, stream):
    """32 bits for the micro-batch's sample b (one, or a tensor of them)."""
    sample = tl.load(samples + b)
    return mixed(sample.to(tl.uint32) ^ mixed((sample >> 32).to(tl.uint32) ^ stream.to(tl.uint32)))


@triton.jit
def head_key(key, head):
    """A sample's key for one of its heads."""
    return mixed(head.to(tl.uint32) * WEYL + key)


@triton.jit
def row_keys(key, first, row):
    """What `kept` wants to know of the rows first + row, where `first` is a multiple of 16: the key that 16 rows share, and
    a row's own part."""
    first, row = tl.cast(first, tl.uint32), row.to(tl.uint32)
    shared = mixed((first // ROWS) * WEYL + (row // ROWS) * WEYL + key)
    return (row % ROWS) * ROW_STRIDE * WEYL + shared


@triton.jit
def kept(keys, first, column, threshold):
    """Whether the numbers in columns first + column are kept, where `first` is a multiple of 16. Columns that differ in bit
    3 share a hash: a lane that has both makes it once."""
    first, column = tl.cast(first, tl.uint32), column.to(tl.uint32)
    first_of_pair = (column // (2 * PAIR) * (2 * PAIR)) | (column % PAIR)
    number = mixed(keys + first * WEYL + first_of_pair * WEYL)
    bits = tl.where(column & PAIR == 0, number & 0xFFFF, number >> 16)
    return bits.to(tl.int32) >= threshold


@triton.jit(do_not_specialize=RANDOM)
def _dropout(
    out,
    residual,
    inp,
    samples,
    stream,
    threshold,
    dropout_scale,
    N,
    T,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
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
