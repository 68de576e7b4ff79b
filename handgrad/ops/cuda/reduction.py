"""Sums over ranks in a fixed order; a checksum and a digest of their contents."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad import ops
from handgrad.ops.cuda.hashing import WEYL, mixed
from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.reduction import words_of

# A program of 256 threads has 32 KB in flight for any number of rows: up to eight rows by 16-byte loads. With such loads of
# 16 rows ptxas spills on sm_100.
TREE_BYTES, TREE_WARPS = 32768, 8

# Words per tile, and tiles per program.
CHECKSUM_WORDS, CHECKSUM_TILES, CHECKSUM_WARPS = 4096, 8, 8

COLUMNS, STEP = ops.DIGEST_COLUMNS, tl.constexpr(ops.CONTROL_STEP)
DIGEST_ROWS, DIGEST_WARPS = 8, 8  # rows per program; it keeps two sums per column


def tree_sum(out: Tensor, pieces: Tensor, *, rounded: bool) -> None:
    """Fastest if the rows begin at multiples of 16 bytes."""
    rows, n = pieces.shape
    block = tree_block(rows, pieces.element_size())
    grid = (triton.cdiv(n, block),)
    launch(_tree_sum, grid, out, pieces, pieces.stride(0), n, rows, rounded, block, num_warps=TREE_WARPS)


def tree_block(rows: int, itemsize: int) -> int:
    """Elements per program."""
    return max(TREE_BYTES // (rows * itemsize), 32 * TREE_WARPS)


@triton.jit
def _tree_sum(out, pieces, stride, n, P: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < n - start
    total = tree(pieces + start, tl.cast(stride, tl.int64), offset, inside, P, ROUNDED)
    tl.store(out + start + offset, total, mask=inside)


@triton.jit
def tree(pieces, stride, offset, inside, P: tl.constexpr, ROUNDED: tl.constexpr):
    """The float32 sum of P rows over a tile of columns."""
    if P == 1:
        return tl.load(pieces + offset, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tree(pieces, stride, offset, inside, P // 2, ROUNDED)
        second = tree(pieces + P // 2 * stride, stride, offset, inside, P // 2, ROUNDED)
        if ROUNDED and (P > 2 or pieces.dtype.element_ty == tl.float32):  # else these are bf16 rows
            first, second = rounded_to_bf16(first), rounded_to_bf16(second)
        return first + second


@triton.jit
def rounded_to_bf16(x):
    """float32 x rounded to the nearest bf16 number, ties to even. (By its bits: the interpreter would truncate.)"""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)  # else NaN


def checksum(out: Tensor, flat: Tensor) -> None:
    words = words_of(flat)
    out.zero_()
    programs = triton.cdiv(words.numel(), CHECKSUM_WORDS * CHECKSUM_TILES)
    launch(_checksum, (programs,), out, words, words.numel(), CHECKSUM_WORDS, CHECKSUM_TILES, num_warps=CHECKSUM_WARPS)


@triton.jit
def _checksum(out, words, n, BLOCK: tl.constexpr, TILES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    sums = tl.zeros((BLOCK,), tl.int64)
    for tile in range(TILES):
        start = first + tile * BLOCK
        offset = tl.arange(0, BLOCK)
        word = tl.load(words + start + offset, mask=offset < n - start, other=0).to(tl.uint32)
        if words.dtype.element_ty == tl.int16:
            word &= 0xFFFF
        sums += mixed(word).to(tl.int64) * (2 * (start + offset) + 1)  # masked words add 0, the hash of 0
    tl.atomic_add(out, tl.sum(sums))  # in any order: integer sums do not round


def digest(out_acc: Tensor, flat: Tensor, controls: Tensor, *, first: int) -> None:
    words = words_of(flat)
    first *= flat.itemsize // 4 or 1
    rows = triton.cdiv(first % COLUMNS + words.numel(), COLUMNS)
    grid = (triton.cdiv(rows, DIGEST_ROWS),)
    launch(_digest, grid, out_acc, words, controls, words.numel(), first, COLUMNS, DIGEST_ROWS, num_warps=DIGEST_WARPS)


@triton.jit
def _digest(out_acc, words, controls, n, first, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    step = mixed(tl.load(controls + STEP).to(tl.int64).to(tl.uint32))
    first = tl.cast(first, tl.int64)
    row = first // COLUMNS + tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, COLUMNS)
    sums, others = tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64)
    for _ in range(ROWS):
        start = row * COLUMNS - first
        word = tl.load(words + start + column, mask=(column >= -start) & (column < n - start), other=0).to(tl.int64)
        sums += word * key(row, 0, step)
        others += word * key(row, 4, step)
        row += 1
    tl.atomic_add(out_acc, tl.sum(sums * key(column, 2, step)))
    tl.atomic_add(out_acc + 1, tl.sum(others * key(column, 6, step)))


@triton.jit
def key(index, stream: tl.constexpr, step):
    """Odd 64-bit numbers, one per index: the upper 32 bits from a stream, the lower from the next."""
    index = tl.cast(index, tl.uint32)
    high, low = mixed(index ^ seed(stream, step)), mixed(index ^ seed(stream + 1, step))
    return (high.to(tl.int64) << 32) | low.to(tl.int64) | 1


@triton.jit
def seed(stream: tl.constexpr, step):
    """The 32-bit seed of a stream of keys; `step` is hashed already."""
    return mixed(step + tl.cast(stream, tl.uint32) * WEYL)
