"""Sums over several workers in a fixed order, and a checksum that shows whether they hold the same bits."""

import torch
from torch import Tensor

from handgrad.ops.hashing import BITS32, mixed

CHUNK = 1 << 22  # words of a checksum at a time, for its temporaries to stay small


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
    words = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
    out.zero_()
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64) & (0xFFFF if flat.itemsize == 2 else BITS32)
        odd = torch.arange(start, start + chunk.numel(), device=flat.device) * 2 + 1
        out += (mixed(chunk) * odd).sum()
