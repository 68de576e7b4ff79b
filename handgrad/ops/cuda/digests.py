"""The digest of a training's state: integers are added by atomics, in any order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad import ops
from handgrad.ops.cuda.hashing import WEYL, mixed
from handgrad.ops.cuda.launch import launch

COLUMNS, STEP = ops.DIGEST_COLUMNS, tl.constexpr(ops.CONTROL_STEP)
ROWS, WARPS = 8, 8  # rows of a program, which keeps two sums for each of its columns


def digest(out_acc: Tensor, flat: Tensor, controls: Tensor, *, first: int) -> None:
    words = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
    first *= flat.itemsize // 4 or 1
    rows = triton.cdiv(first % COLUMNS + words.numel(), COLUMNS)
    grid = (triton.cdiv(rows, ROWS),)
    launch(_digest, grid, out_acc, words, controls, words.numel(), first, COLUMNS, ROWS, num_warps=WARPS)


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
def key(place, stream: tl.constexpr, step):
    """Odd numbers of 64 bits at a place: the upper 32 from a stream, the lower from the next."""
    place = tl.cast(place, tl.uint32)
    high, low = mixed(place ^ seed(stream, step)), mixed(place ^ seed(stream + 1, step))
    return (high.to(tl.int64) << 32) | low.to(tl.int64) | 1


@triton.jit
def seed(stream: tl.constexpr, step):
    """32 bits for a stream of keys; `step`: hashed."""
    return mixed(step + tl.cast(stream, tl.uint32) * WEYL)
