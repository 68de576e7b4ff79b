"""Blocks of the attention kernels: their sizes on this GPU, which block a program takes, how it loads and stores tiles, and
where documents begin and end in a block."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.sizes import ATTENTION_TILES, TURING_TILES, AttentionTile, attention_tile

AMPERE = (8, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA GPU; None on the CPU, where the interpreter runs the kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def capability_here() -> tuple[int, int] | None:
    """Compute capability of the current GPU; None without one."""
    return capability(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def is_data_centre(version: tuple[int, int] | None) -> bool:
    """True for data-centre GPUs, Hopper and Blackwell. sm_120 has Blackwell's name, but not its shared memory."""
    return version is not None and version[0] in (9, 10)


def is_before_ampere(version: tuple[int, int] | None) -> bool:
    return version is not None and version < AMPERE


def widest_head(version: tuple[int, int] | None) -> int:
    """Channels of the widest head that the kernels support on a GPU."""
    return max(width for _, width in (TURING_TILES if is_before_ampere(version) else ATTENTION_TILES))


def choose_config(kernel: str, qkv: Tensor, D: int, grouped: bool = False, documents: bool = False) -> AttentionTile:
    version = capability(qkv.device)
    kind = {"narrow": qkv.element_size() == 2, "newer": is_data_centre(version), "turing": is_before_ampere(version)}
    return attention_tile(kernel, D, **kind, grouped=grouped, documents=documents)


@triton.jit
def head_of(blocks, H, T):
    """(block, batch entry, head, the head's offset in (B, H, T)) of this program. The blocks of one head are adjacent
    programs, so its keys and values come from memory once and then from the L2 cache."""
    program = tl.program_id(0)
    head = program // blocks
    return program % blocks, (head // H).to(tl.int64), head % H, head.to(tl.int64) * T


@triton.jit
def query_block(
    qkv, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr,
    GROUP: tl.constexpr = 1,
):  # fmt: skip
    """(queries, their head for the loops, their place) of this program. A place is (batch entry, head, row of (N, C),
    column, row of (B, H, T), first position, positions left). The last queries see the most keys, so they go first: the
    longest programs start earliest. GROUP query heads share a head of keys and values."""
    blocks = tl.cdiv(T, QUERIES)
    block, b, h, vector = head_of(blocks, H, T)
    first = (blocks - 1 - block) * QUERIES
    q_head = qkv + b * T * row_stride + h * D
    q = load_tile(q_head + first * row_stride, row_stride, T - first, D, QUERIES, WIDTH, TAIL)
    at = b, h, b * T + first, h * D, vector + first, first, T - first
    if GROUP == 1:
        return q, (q_head + C, C, row_stride, T), at
    else:
        k_head = qkv + b * T * row_stride + C + h // GROUP * D
        return q, (k_head, H // GROUP * D, row_stride, T), at  # of C // GROUP the compiler cannot know that D divides it


@triton.jit
def key_block(
    qkv, sums, dout, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr
):
    """(keys, values, their head for the loops, their place) of this program. The first keys have the most queries, so
    they go first: the longest programs start earliest."""
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
    """True for the elements of a tile that exist: the first `rows` rows if it may extend past the end, and D columns."""
    if not TAIL:
        return (tl.arange(0, WIDTH) < D)[None, :]
    elif WIDTH == D:
        return (tl.arange(0, ROWS) < rows)[:, None]
    else:
        return (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def load_tile(tile, row_stride, rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Loads a tile (ROWS, WIDTH) from the address of its first element; elements that do not exist are zero."""
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
    """(QUERIES, KEYS) bool: the key comes after the query."""
    return (first_key + tl.arange(0, KEYS))[None, :] > (first_query + tl.arange(0, QUERIES))[:, None]


# Boundaries of documents, from the document starts of a row; these never decrease along the row.


@triton.jit
def is_before(first_key, KEYS: tl.constexpr, starts):
    """(queries, KEYS) bool: the key comes before the start of the query's document."""
    return (first_key + tl.arange(0, KEYS))[None, :] < starts[:, None]


@triton.jit
def keys_of_queries(starts, first, T, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(begin, crossed) of a block of queries. Before its diagonal, every query sees the keys from `begin` on, and no query
    sees a key more than `crossed` before `begin`. Both are multiples of KEYS. If all queries belong to one document,
    `crossed` is at most KEYS; otherwise `begin` is at the diagonal."""
    none = tl.load(starts + first) // KEYS * KEYS
    begin = tl.minimum(tl.cdiv(tl.load(starts + tl.minimum(first + QUERIES, T) - 1), KEYS), first // KEYS) * KEYS
    return begin, begin - none


@triton.jit
def masked_block(key_start, diagonal, begin, starts):
    """The first key of a masked block: blocks before `begin` come first, then the diagonal's."""
    if starts is None:
        return key_start
    else:
        return tl.where(key_start < diagonal, key_start + begin - diagonal, key_start)


@triton.jit
def first_after(starts, first, key, T, SPAN: tl.constexpr = 128):
    """The first position whose document starts after `key`, or T; the search begins at `first` <= key. It counts earlier
    positions among every 128th, then among the remaining 128: two loads in sequence for 16,384 positions."""
    before = 0
    for span_start in range(first, T, SPAN * SPAN):
        indices = span_start + tl.arange(0, SPAN) * SPAN
        before += tl.sum((tl.load(starts + indices, mask=indices < T, other=2147483647) <= key).to(tl.int32))
    last = first + (before - 1) * SPAN
    indices = last + tl.arange(0, SPAN)
    return last + tl.sum((tl.load(starts + indices, mask=indices < T, other=2147483647) <= key).to(tl.int32))
