"""Dropout's masks inside kernels: the bits of `handgrad.joins.dropout.reference`."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.dropout import masks
from handgrad.joins.dropout.masks import Dropout
from handgrad.ops.cuda.hashing import WEYL, mixed

ROWS, ROW_STRIDE, PAIR = tl.constexpr(masks.ROWS), tl.constexpr(masks.ROW_STRIDE), tl.constexpr(masks.PAIR)

# Arguments that differ from site to site: one kernel for all.
RANDOM = ("stream", "threshold")


def kernel_arguments(dropout: Dropout) -> tuple[Tensor, int, int, float]:
    """samples, stream (as int32, whatever its highest bit), threshold and scale."""
    return dropout.samples, dropout.stream - (dropout.stream >> 31 << 32), dropout.threshold, dropout.scale


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
    """The share in `kept` of the rows first + row, where `first` is a multiple of 16: the key that 16 rows share, and a
    row's own part."""
    first, row = tl.cast(first, tl.uint32), row.to(tl.uint32)
    shared = mixed((first // ROWS) * WEYL + (row // ROWS) * WEYL + key)
    return (row % ROWS) * ROW_STRIDE * WEYL + shared


@triton.jit
def kept(keys, first, column, threshold):
    """True where a number in column first + column is kept, `first` being a multiple of 16. Columns that differ in bit 3
    share a hash: a lane that has both makes it once."""
    first, column = tl.cast(first, tl.uint32), column.to(tl.uint32)
    first_of_pair = (column // (2 * PAIR) * (2 * PAIR)) | (column % PAIR)
    number = mixed(keys + first * WEYL + first_of_pair * WEYL)
    bits = tl.where(column & PAIR == 0, number & 0xFFFF, number >> 16)
    return bits.to(tl.int32) >= threshold
