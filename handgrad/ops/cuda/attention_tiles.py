"""Tiles of attention's kernels: loading, storing, quantising."""

import triton
import triton.language as tl

from handgrad.fp8 import formats
from handgrad.fp8.cuda.quantizing import rounded

SCALE = tl.constexpr(formats.SCALE)


@triton.jit
def head_of(blocks, H, T):
    """(block, batch entry, head, head counted over the batch) of this program. The blocks of one head run side by side,
    so that its keys and values are read from memory once and then from the L2 cache."""
    program = tl.program_id(0)
    head = program // blocks
    return program % blocks, (head // H).to(tl.int64), head % H, head.to(tl.int64) * T


@triton.jit
def pointers_of(tile, row_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tile + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def mask_of(rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Which elements of a tile exist: the first `rows` rows where it may reach over the end, the first D columns."""
    if not TAIL:
        return (tl.arange(0, WIDTH) < D)[None, :]
    elif WIDTH == D:
        return (tl.arange(0, ROWS) < rows)[:, None]
    else:
        return (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def load_tile(tile, row_stride, rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """(ROWS, WIDTH) from the address of its first element; zero where nothing exists."""
    pointers = pointers_of(tile, row_stride, ROWS, WIDTH)
    if TAIL or WIDTH != D:
        return tl.load(pointers, mask=mask_of(rows, D, ROWS, WIDTH, TAIL), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(tile, row_stride, rows, x, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    pointers = pointers_of(tile, row_stride, ROWS, WIDTH)
    x = x.to(tile.dtype.element_ty)
    if TAIL or WIDTH != D:
        tl.store(pointers, x, mask=mask_of(rows, D, ROWS, WIDTH, TAIL))
    else:
        tl.store(pointers, x)


@triton.jit
def load_vector(vector, count, COUNT: tl.constexpr, TAIL: tl.constexpr):
    if TAIL:
        return tl.load(vector + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < count, other=0.0)
    else:
        return tl.load(vector + tl.arange(0, COUNT))


@triton.jit
def store_vector(vector, count, x, COUNT: tl.constexpr, TAIL: tl.constexpr):
    if TAIL:
        tl.store(vector + tl.arange(0, COUNT), x, mask=tl.arange(0, COUNT) < count)
    else:
        tl.store(vector + tl.arange(0, COUNT), x)


@triton.jit
def is_later(first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(QUERIES, KEYS): whether the key comes after the query."""
    return (first_key + tl.arange(0, KEYS))[None, :] > (first_query + tl.arange(0, QUERIES))[:, None]


@triton.jit
def store_quantized(
    rows, columns, scaling, x, row, column, C, N, left, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """A tile x (ROWS, WIDTH) of 16-bit numbers, from (row, column) on of a tensor (N, C), into its fp8 forms `rows` (N, C)
    and `columns` (C, N), either of which may be None."""
    x = x.to(tl.float32)
    scale = tl.load(scaling + SCALE)
    if rows is not None:
        store_tile(rows + row * C + column, C, left, rounded(x, scale, rows.dtype.element_ty), D, ROWS, WIDTH, TAIL)
    if columns is not None:
        pointers = pointers_of(columns + column.to(tl.int64) * N + row, N, WIDTH, ROWS)
        transposed = tl.trans(rounded(x, scale, columns.dtype.element_ty))
        if TAIL or WIDTH != D:
            tl.store(pointers, transposed, mask=tl.trans(mask_of(left, D, ROWS, WIDTH, TAIL)))
        else:
            tl.store(pointers, transposed)
