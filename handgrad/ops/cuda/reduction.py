"""Sums whose order is fixed, over what several workers made; and a number that shows whether they hold the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.hashing import mixed

# A program of 256 threads has 32 KB under way, whatever the rows: up to eight in 16-byte loads. With such loads of 16 rows
# ptxas spills on sm_100.
TREE_BYTES, TREE_WARPS = 32768, 8

# Words of one program, which goes over them in tiles.
CHECKSUM_WORDS, CHECKSUM_TILES, CHECKSUM_WARPS = 4096, 8, 8


# Balanced tree: the sum of P rows is the sum of the first half's tree and the second half's. A subtree's sum can be made
# anywhere, so that no number of devices changes the result.


def tree_sum(out: Tensor, pieces: Tensor, *, rounded: bool) -> None:
    """out (n) = the sum of pieces (P, n) by the balanced binary tree, P = 2, 4, 8, ...: (p0 + p1) + (p2 + p3).

    `out` may be one of the rows, no other element of which changes. The rows may lie anywhere, each in one piece, best at
    multiples of 16 bytes. Additions and result are float32; if `rounded`, whatever is added is rounded to bf16 before, the
    result is not. Pieces of bf16 are the rows of a sum that is `rounded`, as they come from another device.
    """
    rows, n = pieces.shape
    block = tree_block(rows, pieces.element_size())
    _tree_sum[(triton.cdiv(n, block),)](out, pieces, pieces.stride(0), n, rows, rounded, block, num_warps=TREE_WARPS)


def tree_block(rows: int, itemsize: int) -> int:
    """Elements of one program."""
    return max(TREE_BYTES // (rows * itemsize), 32 * TREE_WARPS)


@triton.jit
def _tree_sum(out, pieces, stride, n, P: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < n - start
    total = tree(pieces + start, tl.cast(stride, tl.int64), place, inside, P, ROUNDED)
    tl.store(out + start + place, total, mask=inside)


@triton.jit
def tree(pieces, stride, place, inside, P: tl.constexpr, ROUNDED: tl.constexpr):
    """The sum of P rows in float32, of a tile of columns."""
    if P == 1:
        return tl.load(pieces + place, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tree(pieces, stride, place, inside, P // 2, ROUNDED)
        second = tree(pieces + P // 2 * stride, stride, place, inside, P // 2, ROUNDED)
        if ROUNDED and (P > 2 or pieces.dtype.element_ty == tl.float32):  # else the rows are of bf16
            first, second = rounded_to_bf16(first), rounded_to_bf16(second)
        return first + second


@triton.jit
def rounded_to_bf16(x):
    """Float32 x rounded to the nearest number of bf16, of two equally near ones the even. (By its bits: the interpreter's
    conversion cuts off.)"""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)  # else NaN


# Checksum: whether two devices hold the same bits, and whether one does from day to day. With w_i the i-th 32 bits (16 of
# numbers of 2 bytes) and h the hash of `mixed`, which maps no two numbers to one: the sum of (2 i + 1) h(w_i), modulo 2^64.


def checksum(out: Tensor, flat: Tensor) -> None:
    """out (1) int64 = a hash of all bits of flat (n), of 2, 4 or 8 bytes each and in one piece. A single flipped bit always
    changes it, as do two exchanged numbers of 2 or 4 bytes, up to 2^31 of them; anything else does but once in 2^32."""
    words = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
    out.zero_()
    programs = triton.cdiv(words.numel(), CHECKSUM_WORDS * CHECKSUM_TILES)
    _checksum[(programs,)](out, words, words.numel(), CHECKSUM_WORDS, CHECKSUM_TILES, num_warps=CHECKSUM_WARPS)


@triton.jit
def _checksum(out, words, n, BLOCK: tl.constexpr, TILES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    sums = tl.zeros((BLOCK,), tl.int64)
    for tile in range(TILES):
        start = first + tile * BLOCK
        place = tl.arange(0, BLOCK)
        word = tl.load(words + start + place, mask=place < n - start, other=0).to(tl.uint32)
        if words.dtype.element_ty == tl.int16:
            word &= 0xFFFF
        sums += mixed(word).to(tl.int64) * (2 * (start + place) + 1)  # outside of the tensor 0: the hash of 0
    tl.atomic_add(out, tl.sum(sums))  # in any order: integers' sums have no rounding
