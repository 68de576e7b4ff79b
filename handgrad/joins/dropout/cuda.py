"""Dropout on NVIDIA GPUs, in Triton: the operations of `handgrad.joins.dropout.reference`, with bit-identical masks.

One kernel does dropout alone and dropout with the residual sum, with a warp per row up to 2048 channels. Attention uses the
Triton loops for heads of any width, because the reference could not reproduce the masks of cuDNN's own generator.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.dropout import reference
from handgrad.joins.dropout.reference import Dropout
from handgrad.ops.cuda.attention_loops import LN_2, LOG2_E, dkdv_loop, dq_loop, forward_loop, load_dy_delta
from handgrad.ops.cuda.attention_tiles import key_block, load_vector, query_block, store_tile, store_vector
from handgrad.ops.cuda.attention_triton import launch_blocks, sums_in
from handgrad.ops.cuda.hashing import WEYL, mixed
from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.attention import CAUSAL, Mask
from handgrad.ops.sizes import attention_scratch_bytes, forward_tile  # noqa: F401

ROWS, ROW_STRIDE, PAIR = tl.constexpr(reference.ROWS), tl.constexpr(reference.ROW_STRIDE), tl.constexpr(reference.PAIR)

# Arguments that differ between sites; not specialised, so that one kernel serves all.
RANDOM = ("stream", "threshold")


def kernel_arguments(dropout: Dropout) -> tuple[Tensor, int, int, float]:
    """(samples, stream, threshold, scale); stream is reinterpreted as int32."""
    return dropout.samples, dropout.stream - (dropout.stream >> 31 << 32), dropout.threshold, dropout.scale


@triton.jit
def sample_key(samples, b, stream):
    """The 32-bit key of the micro-batch's sample b (one, or a tensor of them)."""
    sample = tl.load(samples + b)
    return mixed(sample.to(tl.uint32) ^ mixed((sample >> 32).to(tl.uint32) ^ stream.to(tl.uint32)))


@triton.jit
def head_key(key, head):
    """A sample's key for one head."""
    return mixed(head.to(tl.uint32) * WEYL + key)


@triton.jit
def row_keys(key, first, row):
    """The row-dependent input of `kept` for rows first + row: the key shared by 16 rows, and each row's own part. `first`
    is a multiple of 16."""
    first, row = tl.cast(first, tl.uint32), row.to(tl.uint32)
    shared = mixed((first // ROWS) * WEYL + (row // ROWS) * WEYL + key)
    return (row % ROWS) * ROW_STRIDE * WEYL + shared


@triton.jit
def kept(keys, first, column, threshold):
    """True where a number in column first + column is kept; `first` is a multiple of 16. Columns that differ only in bit 3
    share a hash, so that a lane with both computes it once."""
    first, column = tl.cast(first, tl.uint32), column.to(tl.uint32)
    first_of_pair = (column // (2 * PAIR) * (2 * PAIR)) | (column % PAIR)
    number = mixed(keys + first * WEYL + first_of_pair * WEYL)
    bits = tl.where(column & PAIR == 0, number & 0xFFFF, number >> 16)
    return bits.to(tl.int32) >= threshold


def dropout_forward(out: Tensor, inp: Tensor, dropout: Dropout) -> None:
    launch_tiles(out, None, inp, dropout)


def dropout_backward(dinp: Tensor, dout: Tensor, dropout: Dropout) -> None:
    launch_tiles(dinp, None, dout, dropout)


def dropout_residual_forward(branch_to_out_inout: Tensor, residual: Tensor, dropout: Dropout) -> None:
    launch_tiles(branch_to_out_inout, residual, branch_to_out_inout, dropout)


def launch_tiles(out: Tensor, residual: Tensor | None, inp: Tensor, dropout: Dropout) -> None:
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    T = N // dropout.samples.shape[0]
    grid = (triton.cdiv(N, rows),)
    launch(_dropout, grid, out, residual, inp, *kernel_arguments(dropout), N, T, C, block, rows, num_warps=warps)


@triton.jit(do_not_specialize=RANDOM)
def _dropout(
    out, residual, inp, samples, stream, threshold, dropout_scale, N, T, C: tl.constexpr, BLOCK_C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    in_rows = row < N
    inside = in_rows & (column < C)
    offset = row.to(tl.int64) * C + column
    keys = row_keys(sample_key(samples, tl.where(in_rows, row // T, 0), stream), 0, row % T)
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(kept(keys, 0, column, threshold), x * dropout_scale, 0.0)
    if residual is not None:
        x += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, x.to(out.dtype.element_ty), mask=inside)


# In attention, M a mask of zeros and ones and c = 1 / (1 - p):  y = c (M P) v,  dv = c (M P)^T dy,
# dS = P (c M dP - delta) = c P (M dP - delta / c). So c stays out of the loops: they use M and delta / c, and multiply
# their sums by c at the end.


@triton.jit
def keep_of_queries(mask, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """A (QUERIES, KEYS) tile of M; mask: (row keys of the queries, threshold)."""
    rows, threshold = mask
    return kept(rows[:, None], first_key, tl.arange(0, KEYS)[None, :], threshold)


@triton.jit
def keep_of_keys(mask, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """A (KEYS, QUERIES) tile of M^T; mask: (the head's key, threshold)."""
    key, threshold = mask
    rows = row_keys(key, first_query, tl.arange(0, QUERIES))
    return kept(rows[None, :], first_key, tl.arange(0, KEYS)[:, None], threshold)


@triton.jit(do_not_specialize=RANDOM)
def forward_kernel(
    out, lse, qkv, starts, samples, stream, threshold, dropout_scale, H, T, C, row_stride, D: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL)
    b, h, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    mask = row_keys(head_key(sample_key(samples, b, stream), h), first, tl.arange(0, QUERIES)), threshold
    y, m, l = forward_loop(q, head, first, D, KEYS, TAIL, mask, keep_of_queries, starts)
    store_tile(out + row * C + column, C, left, y / l[:, None] * dropout_scale, D, QUERIES, WIDTH, TAIL)
    store_vector(lse + vector, left, (m + tl.log2(l)) * LN_2, QUERIES, TAIL)


@triton.jit(do_not_specialize=RANDOM)
def dq_kernel(
    dqkv, sums, dout, out, lse, qkv, starts, samples, stream, threshold, dropout_scale, H, T, C, row_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL)
    b, h, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    dy, delta = load_dy_delta(dout, out, row * C + column, C, left, D, QUERIES, WIDTH, TAIL)
    mask = row_keys(head_key(sample_key(samples, b, stream), h), first, tl.arange(0, QUERIES)), threshold
    delta /= dropout_scale
    lse2 = load_vector(lse + vector, left, QUERIES, TAIL) * LOG2_E
    store_tile(sums + 2 * vector, 2, left, tl.join(lse2, delta), 2, QUERIES, 2, TAIL)
    dq = dq_loop(q, dy, lse2, delta, head, first, D, KEYS, TAIL, mask, keep_of_queries, starts)
    dq *= dropout_scale
    store_tile(dqkv + row * row_stride + column, row_stride, left, dq, D, QUERIES, WIDTH, TAIL)


@triton.jit(do_not_specialize=RANDOM)
def dkdv_kernel(
    dqkv, sums, dout, qkv, starts, samples, stream, threshold, dropout_scale, H, T, C, row_stride, D: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    k, v, head, block = key_block(qkv, sums, dout, H, T, C, row_stride, D, WIDTH, KEYS, TAIL)
    b, h, row, column, _, first, left = block
    if starts is not None:
        starts += b * T
    mask = head_key(sample_key(samples, b, stream), h), threshold
    dk, dv = dkdv_loop(k, v, head, first, D, QUERIES, TAIL, mask, keep_of_keys, starts)
    dk *= dropout_scale
    dv *= dropout_scale
    dk_tile = dqkv + row * row_stride + column
    store_tile(dk_tile, row_stride, left, dk, D, KEYS, WIDTH, TAIL)
    store_tile(dk_tile + C, row_stride, left, dv, D, KEYS, WIDTH, TAIL)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, dropout: Dropout, *, mask: Mask = CAUSAL) -> None:
    launch_blocks("forward", forward_kernel, lse, out, lse, qkv, mask=mask, more=kernel_arguments(dropout))


def attention_backward(
    dqkv: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    dropout: Dropout,
    *,
    scratch: Tensor,
    mask: Mask = CAUSAL,
) -> None:
    sums, more = sums_in(scratch, lse), kernel_arguments(dropout)
    launch_blocks("dq", dq_kernel, lse, dqkv, sums, dout, out, lse, qkv, mask=mask, more=more)
    launch_blocks("dkdv", dkdv_kernel, lse, dqkv, sums, dout, qkv, mask=mask, more=more)
