"""The loops of the attention kernels over keys and over queries. They take and return tiles; the kernels store them."""

import triton
import triton.language as tl

from handgrad.ops.cuda.attention_tiles import (
    first_after,
    is_before,
    is_later,
    keys_of_queries,
    load_tile,
    load_vector,
    masked_block,
)

# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Online over blocks of keys, m the running maximum, l the running denominator (Dao 2023, algorithm 1):
# m' = max(m, max S),  P~ = exp(S - m'),  l' = l exp(m - m') + sum P~,  y' = y exp(m - m') + P~ v;  at the end y / l, and
# lse = m + log l.
# Backward: delta = rowsum(dy y),  dv = P^T dy,  dP = dy v^T,  dS = P (dP - delta),
# dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).
#
# All exponentials use base 2 with log2(e) folded into the scale: exp(S - m) = 2^(q k^T scale2 - m2), one fused
# multiply-add and one exponential instruction per score. P and dS are rounded to the inputs' dtype before their products.
#
# A loop may take a mask: KEEP(mask, first query, first key, QUERIES, KEYS) returns a bool tile. Where it is false, P counts
# as zero in y and dv, and dP in dS.
#
# A loop may take `starts`, a row's document starts: query i sees key j if starts[i] <= j <= i. The keys of a block of
# queries then begin with its first query's document, and the queries of a block of keys end with its last key's document.
# A block with keys that some query does not see is masked, as on the diagonal.

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)  # initial maximum if a block may hide all keys: minus infinity less itself would be NaN

# For products of float32 inputs, even in a TF32 run: Triton truncates to save the instruction that rounds, and the
# gradients of a block came out worse than the reference's in TF32.
PRECISION = tl.constexpr("ieee")


# Tiles on the diagonal are handled separately, so the loop over the others needs no masks: in a second loop for queries;
# unrolled ahead of the loop for keys and values. Otherwise ptxas serializes a loop's tensor-core instructions (its warning
# C7515; tests/kernels looks for such warnings): it did for keys and values with two loops in either order, and for queries
# with the diagonal first.


@triton.jit
def forward_loop(
    q, head, first, D: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, mask=None, KEEP: tl.constexpr = None,
    starts=None,
):  # fmt: skip
    """(y l, m, l) of a block of queries. `head`: (its keys, offset from keys to values, row stride, T)."""
    QUERIES: tl.constexpr = q.shape[0]
    y = tl.zeros((QUERIES, q.shape[1]), tl.float32)
    m = tl.full((QUERIES,), -float("inf") if starts is None else LOWEST, tl.float32)
    l = tl.zeros((QUERIES,), tl.float32)
    diagonal = first // KEYS * KEYS
    begin, crossed, own = 0, 0, None
    if starts is not None:
        begin, crossed = keys_of_queries(starts, first, head[3], QUERIES, KEYS)
    for key in range(begin, diagonal, KEYS):  # before this block's first query: all exist, and every query sees them
        y, m, l = forward_step(y, m, l, q, head, first, key, D, KEYS, False, False, mask, KEEP, None)
    if starts is not None:
        own = load_vector(starts + first, head[3] - first, QUERIES, TAIL)
    for key_start in range(diagonal - crossed, first + QUERIES, KEYS):
        key = masked_block(key_start, diagonal, begin, starts)
        y, m, l = forward_step(y, m, l, q, head, first, key, D, KEYS, True, TAIL, mask, KEEP, own)
    return y, m, l


@triton.jit
def forward_step(
    y, m, l, q, head, first_query, first_key, D: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
    TAIL: tl.constexpr, mask, KEEP: tl.constexpr, own, IN_ORDER: tl.constexpr = True,
):  # fmt: skip
    """IN_ORDER: the queries have consecutive positions; otherwise all have the first one's."""
    QUERIES: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    k_head, C, row_stride, T = head
    k_tile = k_head + first_key * row_stride
    k = load_tile(k_tile, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DIAGONAL:
        LATER_QUERIES: tl.constexpr = QUERIES if IN_ORDER else 1
        s = tl.where(is_later(first_query, first_key, LATER_QUERIES, KEYS), -float("inf"), s)
    if own is not None:
        s = tl.where(is_before(first_key, KEYS, own), -float("inf"), s)
    m_new = tl.maximum(m, tl.max(s, 1) * scale2)
    p = tl.exp2(s * scale2 - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    if mask is not None:
        p = tl.where(KEEP(mask, first_query, first_key, QUERIES, KEYS), p, 0.0)
    v = load_tile(k_tile + C, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None], input_precision=PRECISION)
    return y, m_new, l


@triton.jit
def load_dy_delta(
    dout, out, start, C, left, D: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr
):
    """(dy, delta) of a block of queries that begins at element `start` of dout and out."""
    dy = load_tile(dout + start, C, left, D, QUERIES, WIDTH, TAIL)
    y = load_tile(out + start, C, left, D, QUERIES, WIDTH, TAIL)
    return dy, tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)


@triton.jit
def dq_loop(
    q, dy, lse2, delta, head, first, D: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, mask=None,
    KEEP: tl.constexpr = None, starts=None,
):  # fmt: skip
    """dq of a block of queries; `head` as in the forward."""
    QUERIES: tl.constexpr = q.shape[0]
    dq = tl.zeros((QUERIES, q.shape[1]), tl.float32)
    diagonal = first // KEYS * KEYS
    begin, crossed, own = 0, 0, None
    if starts is not None:
        begin, crossed = keys_of_queries(starts, first, head[3], QUERIES, KEYS)
    for key in range(begin, diagonal, KEYS):
        dq = dq_step(dq, q, dy, lse2, delta, head, first, key, D, KEYS, False, False, mask, KEEP, None)
    if starts is not None:
        own = load_vector(starts + first, head[3] - first, QUERIES, TAIL)
    for key_start in range(diagonal - crossed, first + QUERIES, KEYS):
        key = masked_block(key_start, diagonal, begin, starts)
        dq = dq_step(dq, q, dy, lse2, delta, head, first, key, D, KEYS, True, TAIL, mask, KEEP, own)
    return dq * (1.0 / D**0.5)


@triton.jit
def dq_step(
    dq, q, dy, lse2, delta, head, first_query, first_key, D: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
    TAIL: tl.constexpr, mask, KEEP: tl.constexpr, own,
):  # fmt: skip
    QUERIES: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    k_head, C, row_stride, T = head
    k_tile = k_head + first_key * row_stride
    k = load_tile(k_tile, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + C, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    p = tl.exp2(s * scale2 - lse2[:, None])
    if DIAGONAL:
        p = tl.where(is_later(first_query, first_key, QUERIES, KEYS), 0.0, p)
    if own is not None:
        p = tl.where(is_before(first_key, KEYS, own), 0.0, p)
    if mask is not None:
        dp = tl.where(KEEP(mask, first_query, first_key, QUERIES, KEYS), dp, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dkdv_loop(
    k, v, head, first, D: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, mask=None, KEEP: tl.constexpr = None,
    starts=None,
):  # fmt: skip
    """dk and dv of a block of keys. `head`: (its queries, its dy, its sums, row stride of dy, row stride, T). Here KEEP
    returns tiles (KEYS, QUERIES)."""
    KEYS: tl.constexpr = k.shape[0]
    dk = tl.zeros((KEYS, k.shape[1]), tl.float32)
    dv = tl.zeros((KEYS, k.shape[1]), tl.float32)
    T = head[5]
    seen, end = T, T
    if starts is not None:
        seen = first_after(starts, first, first, T)
    # First the query blocks on the diagonal, then full query blocks after all these keys, then at most one tail, or the
    # blocks where some query does not see every key.
    diagonal = first // QUERIES * QUERIES
    CROSSED: tl.constexpr = (KEYS + QUERIES - 1) // QUERIES
    for crossed in tl.static_range(CROSSED):
        query = diagonal + crossed * QUERIES
        dk, dv = dkdv_step(dk, dv, k, v, head, query, first, D, QUERIES, True, TAIL, mask, KEEP, starts)
    after = diagonal + CROSSED * QUERIES
    full = tl.maximum(seen // QUERIES * QUERIES, after)
    for query in range(after, full, QUERIES):
        dk, dv = dkdv_step(dk, dv, k, v, head, query, first, D, QUERIES, False, False, mask, KEEP, None)
    if starts is not None:
        end = first_after(starts, first, tl.minimum(first + KEYS, T) - 1, T)
    if TAIL or starts is not None:
        for query in range(full, end, QUERIES):
            dk, dv = dkdv_step(dk, dv, k, v, head, query, first, D, QUERIES, False, TAIL, mask, KEEP, starts)
    return dk * (1.0 / D**0.5), dv


@triton.jit
def grouped_dkdv_loop(
    k, v, head, first, D: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, starts=None
):
    """dk and dv of a block of keys that GROUP query heads share; `head`: the first of them. It takes the diagonal blocks of
    all heads, then the full blocks of all heads in one loop, then their tails: nested loops would need more registers than
    there are."""
    KEYS: tl.constexpr = k.shape[0]
    dk = tl.zeros((KEYS, k.shape[1]), tl.float32)
    dv = tl.zeros((KEYS, k.shape[1]), tl.float32)
    T = head[5]
    seen = T
    if starts is not None:
        seen = first_after(starts, first, first, T)
    diagonal = first // QUERIES * QUERIES
    CROSSED: tl.constexpr = (KEYS + QUERIES - 1) // QUERIES
    for h in range(GROUP):
        own = next_head(head, h, D)
        for crossed in tl.static_range(CROSSED):
            query = diagonal + crossed * QUERIES
            dk, dv = dkdv_step(dk, dv, k, v, own, query, first, D, QUERIES, True, TAIL, None, None, starts)
    after = diagonal + CROSSED * QUERIES
    blocks = tl.maximum(seen // QUERIES - after // QUERIES, 0)
    # The last keys have no full block. A division by 0 would let the compiler assume one, and it would start that block's
    # loads ahead of the loop, past the end of the last row.
    per_head = tl.maximum(blocks, 1)
    for step in range(GROUP * blocks):
        own, query = next_head(head, step // per_head, D), after + step % per_head * QUERIES
        dk, dv = dkdv_step(dk, dv, k, v, own, query, first, D, QUERIES, False, False, None, None, None)
    if starts is not None:
        full = tl.maximum(seen // QUERIES * QUERIES, after)
        end = first_after(starts, first, tl.minimum(first + KEYS, T) - 1, T)
        rest = tl.cdiv(tl.maximum(end - full, 0), QUERIES)
        rest_per_head = tl.maximum(rest, 1)
        for step in range(GROUP * rest):
            own, query = next_head(head, step // rest_per_head, D), full + step % rest_per_head * QUERIES
            dk, dv = dkdv_step(dk, dv, k, v, own, query, first, D, QUERIES, False, TAIL, None, None, starts)
    elif TAIL:
        full = tl.maximum(T // QUERIES * QUERIES, after)
        if full < T:
            for h in range(GROUP):
                own = next_head(head, h, D)
                dk, dv = dkdv_step(dk, dv, k, v, own, full, first, D, QUERIES, False, True, None, None, None)
    return dk * (1.0 / D**0.5), dv


@triton.jit
def next_head(head, h, D: tl.constexpr):
    """The query head h heads after this one."""
    q_head, dy_head, sums, C, row_stride, T = head
    return q_head + h * D, dy_head + h * D, sums + 2 * h * T, C, row_stride, T


@triton.jit
def dkdv_step(
    dk, dv, k, v, head, first_query, first_key, D: tl.constexpr, QUERIES: tl.constexpr, DIAGONAL: tl.constexpr,
    TAIL: tl.constexpr, mask, KEEP: tl.constexpr, starts,
):  # fmt: skip
    # Everything is transposed, keys in rows: P^T and dS^T become left operands straight from registers.
    KEYS: tl.constexpr = k.shape[0]
    WIDTH: tl.constexpr = k.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    q_head, dy_head, sums, C, row_stride, T = head
    left = T - first_query
    q = load_tile(q_head + first_query * row_stride, row_stride, left, D, QUERIES, WIDTH, TAIL)
    dy = load_tile(dy_head + first_query * C, C, left, D, QUERIES, WIDTH, TAIL)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
    # One load for both vectors: two loads of fewer elements than threads would become a 4-byte copy per thread and query.
    # A query past the end has zero q, dy and delta, and adds nothing.
    lse2, delta = tl.split(load_tile(sums + 2 * first_query, 2, left, 2, QUERIES, 2, TAIL))
    p = tl.exp2(s * scale2 - lse2[None, :])
    if DIAGONAL:
        p = tl.where(tl.trans(is_later(first_query, first_key, QUERIES, KEYS)), 0.0, p)
    if starts is not None:
        own = load_vector(starts + first_query, left, QUERIES, TAIL)
        p = tl.where(tl.trans(is_before(first_key, KEYS, own)), 0.0, p)
    seen = p
    if mask is not None:
        keep = KEEP(mask, first_query, first_key, QUERIES, KEYS)
        seen = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp, 0.0)
    dv = tl.dot(seen.to(dy.dtype), dy, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv
