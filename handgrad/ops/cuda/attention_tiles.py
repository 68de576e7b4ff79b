"""Blocks of attention's kernels: which one a program has, and how tiles of it are loaded and stored."""

import triton
import triton.language as tl


@triton.jit
def head_of(blocks, H, T):
    """(block, batch entry, head, head counted over the batch) of this program. The blocks of one head run side by side,
    so that its keys and values are read from memory once and then from the L2 cache."""
    program = tl.program_id(0)
    head = program // blocks
    return program % blocks, (head // H).to(tl.int64), head % H, head.to(tl.int64) * T


@triton.jit
def query_block(
    qkv, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr,
    GROUP: tl.constexpr = 1,
):  # fmt: skip
    """(queries, their head for the loops, their place) of this program. A place is (batch entry, head, row of (N, C),
    column, row of (B, H, T), first position, positions left). The last queries see the most keys: longest programs
    first. GROUP heads of queries share one of keys and values."""
    blocks = tl.cdiv(T, QUERIES)
    block, b, h, vector = head_of(blocks, H, T)
    first = (blocks - 1 - block) * QUERIES
    q_head = qkv + b * T * row_stride + h * D
    q = load_tile(q_head + first * row_stride, row_stride, T - first, D, QUERIES, WIDTH, TAIL)
    place = b, h, b * T + first, h * D, vector + first, first, T - first
    if GROUP == 1:
        return q, (q_head + C, C, row_stride, T), place
    else:
        k_head = qkv + b * T * row_stride + C + h // GROUP * D
        return q, (k_head, C // GROUP, row_stride, T), place


@triton.jit
def key_block(
    qkv, sums, dout, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr
):
    """(keys, values, their head for the loops, their place) of this program. The first keys are seen by the most queries:
    longest programs first."""
    block, b, h, vector = head_of(tl.cdiv(T, KEYS), H, T)
    first = block * KEYS
    q_head = qkv + b * T * row_stride + h * D
    k_tile = q_head + C + first * row_stride
    k = load_tile(k_tile, row_stride, T - first, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + C, row_stride, T - first, D, KEYS, WIDTH, TAIL)
    head = q_head, dout + b * T * C + h * D, sums + 2 * vector, C, row_stride, T
    return k, v, head, (b, h, b * T + first, C + h * D, vector + first, first, T - first)


@triton.jit
def pointers_of(tile, row_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tile + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def mask_of(rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """True for a tile's elements that exist: the first `rows` rows where it may reach over the end, the first D columns."""
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
