"""Sums over several workers in a fixed order; a checksum and a digest to check that they hold the same bits."""

import torch
from torch import Tensor

from handgrad.ops import CONTROL_STEP, DIGEST_COLUMNS, DIGEST_SUMS
from handgrad.ops.hashing import BITS32, WEYL, mixed

CHUNK = 1 << 22  # words per step of a checksum: its temporaries stay small
ROWS = 16  # rows per step of a digest: their words, widened to 64 bits, stay in cache


# Balanced tree: the sum of P rows is the first half's tree plus the second half's. Any device may sum a subtree, so the
# number of devices does not change the result.


def tree_sum(out: Tensor, pieces: Tensor, *, rounded: bool) -> None:
    """out (n) = the sum of pieces (P, n) by the balanced binary tree, P = 2, 4, 8, ...: (p0 + p1) + (p2 + p3).

    `out` may be one of the rows; nothing else changes. The rows may lie anywhere, each contiguous. Additions and result are
    float32 (or float64); `rounded` rounds every operand of an addition to bf16 first, but not the result. bf16 pieces are
    rows of a `rounded` sum, as another device sends them."""

    def tree(rows: Tensor) -> Tensor:
        if rows.shape[0] == 1:
            return rows[0]
        first, second = (tree(half) for half in rows.chunk(2))
        if rounded:
            first, second = first.bfloat16(), second.bfloat16()
        return first.to(out.dtype) + second.to(out.dtype)

    out.copy_(tree(pieces))


# Checksum: shows whether two devices hold the same bits, or one device on two days. With w_i the i-th 32-bit word (16-bit
# for numbers of 2 bytes) and h the bijective hash `mixed`: the sum of (2 i + 1) h(w_i), modulo 2^64.


def checksum(out: Tensor, flat: Tensor) -> None:
    """out (1) int64 = a hash of all bits of flat (n), contiguous, 2, 4 or 8 bytes per element. A flipped bit always changes
    it, and so does an exchange of two numbers of 2 or 4 bytes, up to 2^31 of them; it misses other changes once in 2^32."""
    words = words_of(flat)
    out.zero_()
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64) & (0xFFFF if flat.itemsize == 2 else BITS32)
        odd = torch.arange(start, start + chunk.numel(), device=flat.device) * 2 + 1
        out += (mixed(chunk) * odd).sum()


def words_of(flat: Tensor) -> Tensor:
    """The bits of a flat tensor with 2, 4 or 8 bytes per element, as signed integers of 16 or 32 bits."""
    return flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)


# Digest of a training state, the same however devices divide the state: it adds integers, so order does not matter. With
# w(p) the bits of the number at index p, as a signed integer, sum j is
#
#     sum over p of  w(p) a_j(p div C) b_j(p mod C)    modulo 2^64,    C = 4096,
#
# where a and b are odd 64-bit numbers that a hash draws from the step. Each piece of a state adds to the same sums, given
# the index where it begins in the whole.


def digest(out_acc: Tensor, flat: Tensor, controls: Tensor, *, first: int) -> None:
    """out_acc (2) int64 += the sums over all bits of flat (n), contiguous, 2, 4 or 8 bytes per element, which begins at
    index `first`; `controls` has the step. An element of 8 bytes counts as two, of 4 each.

    A flipped bit always changes both sums. A sum misses any other difference once in 2^31, with new keys every step; an
    attacker who knows the keys can construct one."""
    words = words_of(flat)
    first, step, C = first * (flat.itemsize // 4 or 1), int(controls[CONTROL_STEP]), DIGEST_COLUMNS
    row, last, stop = first // C, -(-(first + words.numel()) // C), first + words.numel()
    by_row = [keys(row, last, 4 * j, step, flat.device) for j in range(DIGEST_SUMS)]
    by_column = [keys(0, C, 4 * j + 2, step, flat.device) for j in range(DIGEST_SUMS)]
    block = torch.zeros(ROWS * C, dtype=torch.int64, device=flat.device)
    for start in range(row * C, stop, ROWS * C):
        begin, end = max(start, first), min(start + ROWS * C, stop)
        rows = slice(start // C - row, -(-end // C) - row)
        block[end - start :].zero_()
        block[begin - start : end - start].copy_(words[begin - first : end - first])
        part = block.view(ROWS, C)[: rows.stop - rows.start]
        for j in range(DIGEST_SUMS):
            # torch has no integer matrix-vector product on CUDA.
            out_acc[j] += ((part * by_column[j]).sum(1) * by_row[j][rows]).sum()


def keys(start: int, stop: int, stream: int, step: int, device: torch.device) -> Tensor:
    """(stop - start) odd 64-bit numbers, as int64, one per index: upper 32 bits from a stream, the rest from the next."""
    indices = torch.arange(start, stop, device=device) & BITS32
    high, low = (mixed(indices ^ seed(stream + half, step)) for half in (0, 1))
    return (high << 32) | low | 1


def seed(stream: int, step: int) -> int:
    """The 32-bit seed of a stream of keys in a step."""
    return mixed((mixed(step & BITS32) + stream * WEYL) & BITS32)
