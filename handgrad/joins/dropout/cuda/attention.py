"""Attention with dropout, in the Triton loops for heads of any width: cuDNN draws its masks from a generator of its own,
which the reference could not repeat."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.dropout.cuda.masks import RANDOM, head_key, kept, kernel_arguments, row_keys, sample_key
from handgrad.joins.dropout.masks import Dropout
from handgrad.ops.cuda.attention_loops import LN_2, LOG2_E, dkdv_loop, dq_loop, forward_loop, load_dy_delta
from handgrad.ops.cuda.attention_tiles import key_block, load_vector, query_block, store_tile, store_vector
from handgrad.ops.cuda.attention_triton import launch_blocks, sums_in
from handgrad.ops.mask import CAUSAL, Mask

# M a mask of zeros and ones and c = 1 / (1 - p):  y = c (M P) v,  dv = c (M P)^T dy,
# dS = P (c M dP - delta) = c P (M dP - delta / c). So c stays out of the loops: they take M and delta / c, and what they
# add up is multiplied by c at the end.


@triton.jit
def keep_of_queries(mask, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(QUERIES, KEYS) of M; mask: (the queries' row keys, threshold)."""
    rows, threshold = mask
    return kept(rows[:, None], first_key, tl.arange(0, KEYS)[None, :], threshold)


@triton.jit
def keep_of_keys(mask, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(KEYS, QUERIES) of M^T; mask: (the head's key, threshold)."""
    key, threshold = mask
    rows = row_keys(key, first_query, tl.arange(0, QUERIES))
    return kept(rows[None, :], first_key, tl.arange(0, KEYS)[:, None], threshold)


@triton.jit(do_not_specialize=RANDOM)
def forward_kernel(
    out, lse, qkv, starts, samples, stream, threshold, dropout_scale, H, T, C, row_stride, D: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    q, head, place = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL)
    b, h, row, column, vector, first, left = place
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
    q, head, place = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL)
    b, h, row, column, vector, first, left = place
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
    k, v, head, place = key_block(qkv, sums, dout, H, T, C, row_stride, D, WIDTH, KEYS, TAIL)
    b, h, row, column, _, first, left = place
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
