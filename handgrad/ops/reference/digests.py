"""A digest of a training's state that any division among devices gives alike: integers are added, in any order."""

import torch
from torch import Tensor

from handgrad.ops import CONTROL_STEP, DIGEST_COLUMNS, DIGEST_SUMS
from handgrad.ops.hashing import BITS32, WEYL, mixed

ROWS = 16  # at a time: their words in 64 bits stay in a cache

# Digest: with w(p) the bits of the number at place p, as a signed integer, sum j is
#
#     sum over p of  w(p) a_j(p div C) b_j(p mod C)    modulo 2^64,    C = 4096,
#
# where a and b are odd numbers of 64 bits, drawn by a hash from the step. Parts of a state are added into the same sums,
# each with the place where it begins in the whole.


def digest(out_acc: Tensor, flat: Tensor, controls: Tensor, *, first: int) -> None:
    """out_acc (2) int64 += the sums over all bits of flat (n), of 2, 4 or 8 bytes each and in one piece, which begins at
    place `first`; `controls` has the step. 8 bytes are two places, of 4 each.

    A single flipped bit always changes both sums. Any other difference escapes one of them but once in 2^31, drawn anew in
    every step; an attacker who knows the keys can construct one.
    """
    words = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
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
