"""Sums over several workers in a fixed order; a checksum and a digest that show whether they hold the same bits."""

import torch
from torch import Tensor

from handgrad.ops import CONTROL_STEP, DIGEST_COLUMNS, DIGEST_SUMS
from handgrad.ops.hashing import BITS32, WEYL, mixed

CHUNK = 1 << 22  # words of a checksum at a time, for its temporaries to stay small
ROWS = 16  # of a digest at a time: their words in 64 bits stay in a cache


# Balanced tree: the sum of P rows is the sum of the first half's tree and the second half's. A subtree's sum can be made
# anywhere, so that no number of devices changes the result.


def tree_sum(out: Tensor, pieces: Tensor, *, rounded: bool) -> None:
    """out (n) = the sum of pieces (P, n) by the balanced binary tree, P = 2, 4, 8, ...: (p0 + p1) + (p2 + p3).

    `out` may be one of the rows, no other element of which changes. The rows may lie anywhere, each in one piece. Additions
    and result are float32 (or float64); if `rounded`, whatever is added is rounded to bf16 before, the result is not.
    Pieces of bf16 are the rows of a sum that is `rounded`, as they come from another device.
    """

    def tree(rows: Tensor) -> Tensor:
        if rows.shape[0] == 1:
            return rows[0]
        first, second = (tree(half) for half in rows.chunk(2))
        if rounded:
            first, second = first.bfloat16(), second.bfloat16()
        return first.to(out.dtype) + second.to(out.dtype)

    out.copy_(tree(pieces))


# Checksum: whether two devices hold the same bits, and whether one does from day to day. With w_i the i-th 32 bits (16 of
# numbers of 2 bytes) and h the hash of `mixed`, which maps no two numbers to one: the sum of (2 i + 1) h(w_i), modulo 2^64.


def checksum(out: Tensor, flat: Tensor) -> None:
    """out (1) int64 = a hash of all bits of flat (n), of 2, 4 or 8 bytes each and in one piece. A single flipped bit always
    changes it, as do two exchanged numbers of 2 or 4 bytes, up to 2^31 of them; anything else does but once in 2^32."""
    words = words_of(flat)
    out.zero_()
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64) & (0xFFFF if flat.itemsize == 2 else BITS32)
        odd = torch.arange(start, start + chunk.numel(), device=flat.device) * 2 + 1
        out += (mixed(chunk) * odd).sum()


def words_of(flat: Tensor) -> Tensor:
    """The bits of a flat tensor of 2, 4 or 8 bytes an element, as signed integers of 16 or 32 bits."""
    return flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)


# Digest of a training's state, which any division among devices gives alike: integers are added, in any order. With w(p)
# the bits of the number at place p, as a signed integer, sum j is
#
#     sum over p of  w(p) a_j(p div C) b_j(p mod C)    modulo 2^64,    C = 4096,
#
# where a and b are odd numbers of 64 bits, drawn by a hash from the step. Pieces of a state are added into the same sums,
# each with the place where it begins in the whole.


def digest(out_acc: Tensor, flat: Tensor, controls: Tensor, *, first: int) -> None:
    """out_acc (2) int64 += the sums over all bits of flat (n), of 2, 4 or 8 bytes each and in one piece, which begins at
    place `first`; `controls` has the step. 8 bytes are two places, of 4 each.

    A single flipped bit always changes both sums. Any other difference escapes one of them but once in 2^31, drawn anew in
    every step; an attacker who knows the keys can construct one.
    """
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
            # CUDA has no matrix-vector product of integers.
            out_acc[j] += ((part * by_column[j]).sum(1) * by_row[j][rows]).sum()


def keys(start: int, stop: int, stream: int, step: int, device: torch.device) -> Tensor:
    """(stop - start) odd numbers of 64 bits, as int64, one a place: the upper 32 from a stream, the rest from the next."""
    place = torch.arange(start, stop, device=device) & BITS32
    high, low = (mixed(place ^ seed(stream + half, step)) for half in (0, 1))
    return (high << 32) | low | 1


def seed(stream: int, step: int) -> int:
    """32 bits for a stream of keys in a step."""
    return mixed((mixed(step & BITS32) + stream * WEYL) & BITS32)
