"""Causal attention in Triton, straight from and into the packed rows, with bits that repeat.

The method is FlashAttention-2's (Dao 2023): tiles of the scores live in registers only, the softmax runs online over blocks
of keys, and the backward recomputes the probabilities from `lse`. What is different here is order: no atomic anywhere. The
gradients of queries and of keys and values come from two kernels (seven products instead of five), and each element of
every output is written once, by one program, after a loop of fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.dropout.cuda import RANDOM, head_key, kept, kernel_arguments, row_keys, sample_key
from handgrad.dropout.masks import Dropout
from handgrad.fp8.cuda.quantizing import UNALIGNED, limits, quantize, rescale, store_statistics
from handgrad.fp8.formats import Form, Quantized, plain
from handgrad.ops.cuda.attention_configs import CONFIGS, Config, choose_config, rows_of
from handgrad.ops.cuda.attention_tiles import (
    head_of,
    is_later,
    load_tile,
    load_vector,
    mask_of,
    store_quantized,
    store_tile,
    store_vector,
)

# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Online over blocks of keys, m the running maximum, l the running denominator (Dao 2023, algorithm 1):
# m' = max(m, max S),  P~ = exp(S - m'),  l' = l exp(m - m') + sum P~,  y' = y exp(m - m') + P~ v;  at the end y / l, and
# lse = m + log l.
# Backward: delta = rowsum(dy y),  dv = P^T dy,  dP = dy v^T,  dS = P (dP - delta),
# dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).
#
# With dropout, M a mask of zeros and ones and c = 1 / (1 - p):  y = c (M P) v,  dv = c (M P)^T dy,
# dS = P (c M dP - delta) = c P (M dP - delta / c). So c stays out of the loops: they take M and delta / c, and what they
# add up is multiplied by c at the end.
#
# All exponents are to base 2 with log2(e) folded into the scale: exp(S - m) = 2^(q k^T scale2 - m2), one fused
# multiply-add and one exponential instruction per score. P and dS are rounded to the inputs' dtype before their products.

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Of products of float32 inputs, also in a run with TF32: Triton truncates where the hardware's rounding would need an
# instruction more, and the gradients of a block came out five times worse than the reference's in TF32.
PRECISION = tl.constexpr("ieee")


# The tiles that the diagonal crosses are taken apart, so that the loop over the others runs without masks: a second loop
# for queries; unrolled ahead of the loop for keys and values. This is for ptxas, which else runs a loop's tensor-core
# instructions one after another (its warning C7515; tests/kernels looks for such warnings): so it did for keys and values
# with two loops in either order, and for queries with the diagonal first.


@triton.jit
def forward_step(
    y, m, l, q, k_head, mask, C, row_stride, first_query, first_key, T, D: tl.constexpr, KEYS: tl.constexpr,
    DIAGONAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    k_tile = k_head + first_key * row_stride
    k = load_tile(k_tile, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DIAGONAL:
        s = tl.where(is_later(first_query, first_key, QUERIES, KEYS), -float("inf"), s)
    m_new = tl.maximum(m, tl.max(s, 1) * scale2)
    p = tl.exp2(s * scale2 - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    if mask is not None:
        p = tl.where(kept(mask[0][:, None], first_key, tl.arange(0, KEYS)[None, :], mask[1]), p, 0.0)
    v = load_tile(k_tile + C, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None], input_precision=PRECISION)
    return y, m_new, l


@triton.jit(do_not_specialize=RANDOM, do_not_specialize_on_alignment=UNALIGNED)
def forward_kernel(
    out, lse, qkv, rows, columns, scaling, statistics, samples, stream, threshold, dropout_scale, H, T, C, row_stride, N,
    PARTS, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """y and lse of one block of queries of one head. Row n of qkv begins at n row_stride."""
    blocks = tl.cdiv(T, QUERIES)
    block, b, h, vector = head_of(blocks, H, T)
    first = (blocks - 1 - block) * QUERIES  # the last queries see the most keys: longest programs first
    left = T - first
    q_head = qkv + b * T * row_stride + h * D
    k_head = q_head + C
    q = load_tile(q_head + first * row_stride, row_stride, left, D, QUERIES, WIDTH, TAIL)
    y = tl.zeros((QUERIES, WIDTH), tl.float32)
    m = tl.full((QUERIES,), -float("inf"), tl.float32)
    l = tl.zeros((QUERIES,), tl.float32)
    mask = None
    if samples is not None:
        key = head_key(sample_key(samples, b, stream), h)
        mask = row_keys(key, first, tl.arange(0, QUERIES)), threshold
    diagonal = first // KEYS * KEYS
    for key in range(0, diagonal, KEYS):  # before this block's first query: all exist, and every query sees them
        y, m, l = forward_step(y, m, l, q, k_head, mask, C, row_stride, first, key, T, D, KEYS, False, False)
    for key in range(diagonal, first + QUERIES, KEYS):
        y, m, l = forward_step(y, m, l, q, k_head, mask, C, row_stride, first, key, T, D, KEYS, True, TAIL)
    y_tile = out + (b * T + first) * C + h * D
    y = y / l[:, None]
    if samples is not None:
        y *= dropout_scale
    store_tile(y_tile, C, left, y, D, QUERIES, WIDTH, TAIL)
    store_vector(lse + vector + first, left, (m + tl.log2(l)) * LN_2, QUERIES, TAIL)
    if scaling is not None:
        y = y.to(qkv.dtype.element_ty).to(tl.float32)
        if TAIL:
            y = tl.where(mask_of(left, WIDTH, QUERIES, WIDTH, TAIL), y, 0.0)
        store_quantized(rows, columns, scaling, y, b * T + first, h * D, C, N, left, D, QUERIES, WIDTH, TAIL)
        store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)


@triton.jit
def dq_step(
    dq, q, dy, lse2, delta, k_head, mask, C, row_stride, first_query, first_key, T, D: tl.constexpr, KEYS: tl.constexpr,
    DIAGONAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    k_tile = k_head + first_key * row_stride
    k = load_tile(k_tile, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + C, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    p = tl.exp2(s * scale2 - lse2[:, None])
    if DIAGONAL:
        p = tl.where(is_later(first_query, first_key, QUERIES, KEYS), 0.0, p)
    if mask is not None:
        dp = tl.where(kept(mask[0][:, None], first_key, tl.arange(0, KEYS)[None, :], mask[1]), dp, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=RANDOM, do_not_specialize_on_alignment=UNALIGNED)
def dq_kernel(
    dqkv, sums, dout, out, lse, qkv, rows, columns, scaling, statistics, samples, stream, threshold, dropout_scale, H, T, C,
    row_stride, N, PARTS, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of one head, and its rows of (lse log2(e), delta), which `dkdv_kernel` reads after it."""
    blocks = tl.cdiv(T, QUERIES)
    block, b, h, vector = head_of(blocks, H, T)
    first = (blocks - 1 - block) * QUERIES
    left = T - first
    q_head = qkv + b * T * row_stride + h * D
    k_head = q_head + C
    q = load_tile(q_head + first * row_stride, row_stride, left, D, QUERIES, WIDTH, TAIL)
    y_start = (b * T + first) * C + h * D
    dy = load_tile(dout + y_start, C, left, D, QUERIES, WIDTH, TAIL)
    y = load_tile(out + y_start, C, left, D, QUERIES, WIDTH, TAIL)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    mask = None
    if samples is not None:
        key = head_key(sample_key(samples, b, stream), h)
        mask = row_keys(key, first, tl.arange(0, QUERIES)), threshold
        delta /= dropout_scale
    lse2 = load_vector(lse + vector + first, left, QUERIES, TAIL) * LOG2_E
    store_tile(sums + 2 * (vector + first), 2, left, tl.join(lse2, delta), 2, QUERIES, 2, TAIL)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    diagonal = first // KEYS * KEYS
    for key in range(0, diagonal, KEYS):
        dq = dq_step(dq, q, dy, lse2, delta, k_head, mask, C, row_stride, first, key, T, D, KEYS, False, False)
    for key in range(diagonal, first + QUERIES, KEYS):
        dq = dq_step(dq, q, dy, lse2, delta, k_head, mask, C, row_stride, first, key, T, D, KEYS, True, TAIL)
    dq = dq * (1.0 / D**0.5)
    if samples is not None:
        dq *= dropout_scale
    if dqkv is not None:
        store_tile(dqkv + (b * T + first) * row_stride + h * D, row_stride, left, dq, D, QUERIES, WIDTH, TAIL)
    if scaling is not None:
        dq = dq.to(qkv.dtype.element_ty).to(tl.float32)
        store_quantized(rows, columns, scaling, dq, b * T + first, h * D, row_stride, N, left, D, QUERIES, WIDTH, TAIL)
        store_statistics(statistics, PARTS, tl.program_id(0), dq, scaling, LARGEST, VANISHES_AT)


@triton.jit
def dkdv_step(
    dk, dv, k, v, q_head, dy_head, sums, mask, C, row_stride, first_query, first_key, T, D: tl.constexpr,
    QUERIES: tl.constexpr, DIAGONAL: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    # Everything transposed, keys in rows: so P^T and dS^T are left operands straight from the registers.
    KEYS: tl.constexpr = k.shape[0]
    WIDTH: tl.constexpr = k.shape[1]
    scale2: tl.constexpr = LOG2_E / D**0.5
    left = T - first_query
    q = load_tile(q_head + first_query * row_stride, row_stride, left, D, QUERIES, WIDTH, TAIL)
    dy = load_tile(dy_head + first_query * C, C, left, D, QUERIES, WIDTH, TAIL)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
    # Both vectors in one load: two loads of fewer elements than threads would become a 4-byte copy per thread and query.
    # A query past the end has a q, dy and delta of zero, which add nothing.
    lse2, delta = tl.split(load_tile(sums + 2 * first_query, 2, left, 2, QUERIES, 2, TAIL))
    p = tl.exp2(s * scale2 - lse2[None, :])
    if DIAGONAL:
        p = tl.where(tl.trans(is_later(first_query, first_key, QUERIES, KEYS)), 0.0, p)
    seen = p
    if mask is not None:
        queries = row_keys(mask[0], first_query, tl.arange(0, QUERIES))
        keep = kept(queries[None, :], first_key, tl.arange(0, KEYS)[:, None], mask[1])
        seen = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp, 0.0)
    dv = tl.dot(seen.to(dy.dtype), dy, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RANDOM, do_not_specialize_on_alignment=UNALIGNED)
def dkdv_kernel(
    dqkv, sums, dout, qkv, rows, columns, scaling, statistics, samples, stream, threshold, dropout_scale, H, T, C,
    row_stride, N, PARTS, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys of one head. The first keys are seen by the most queries: longest programs first."""
    block, b, h, vector = head_of(tl.cdiv(T, KEYS), H, T)
    first = block * KEYS
    left = T - first
    q_head = qkv + b * T * row_stride + h * D
    dy_head = dout + b * T * C + h * D
    sums += 2 * vector
    k_tile = q_head + C + first * row_stride
    k = load_tile(k_tile, row_stride, left, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + C, row_stride, left, D, KEYS, WIDTH, TAIL)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    mask = None
    if samples is not None:
        mask = head_key(sample_key(samples, b, stream), h), threshold
    # Blocks of queries that the diagonal crosses, full blocks of queries after all these keys, and at most one tail.
    diagonal = first // QUERIES * QUERIES
    CROSSED: tl.constexpr = (KEYS + QUERIES - 1) // QUERIES
    for crossed in tl.static_range(CROSSED):
        query = diagonal + crossed * QUERIES
        dk, dv = dkdv_step(
            dk, dv, k, v, q_head, dy_head, sums, mask, C, row_stride, query, first, T, D, QUERIES, True, TAIL
        )
    after = diagonal + CROSSED * QUERIES
    full = tl.maximum(T // QUERIES * QUERIES, after)
    for query in range(after, full, QUERIES):
        dk, dv = dkdv_step(
            dk, dv, k, v, q_head, dy_head, sums, mask, C, row_stride, query, first, T, D, QUERIES, False, False
        )
    if TAIL:
        for query in range(full, T, QUERIES):
            dk, dv = dkdv_step(
                dk, dv, k, v, q_head, dy_head, sums, mask, C, row_stride, query, first, T, D, QUERIES, False, True
            )
    dk = dk * (1.0 / D**0.5)
    if samples is not None:
        dk *= dropout_scale
        dv *= dropout_scale
    if dqkv is not None:
        dk_tile = dqkv + (b * T + first) * row_stride + C + h * D
        store_tile(dk_tile, row_stride, left, dk, D, KEYS, WIDTH, TAIL)
        store_tile(dk_tile + C, row_stride, left, dv, D, KEYS, WIDTH, TAIL)
    if scaling is not None:
        # Joined in 16 bits, and before the stores: else ptxas (CUDA 12.8) serializes the loops' instructions.
        dk = dk.to(qkv.dtype.element_ty)
        dv = dv.to(qkv.dtype.element_ty)
        both = tl.reshape(tl.join(dk, dv), (KEYS, 2 * WIDTH)).to(tl.float32)
        store_statistics(statistics, PARTS, tl.program_id(0), both, scaling, LARGEST, VANISHES_AT)
        row, column = b * T + first, C + h * D
        store_quantized(rows, columns, scaling, dk, row, column, row_stride, N, left, D, KEYS, WIDTH, TAIL)
        store_quantized(rows, columns, scaling, dv, row, column + C, row_stride, N, left, D, KEYS, WIDTH, TAIL)


def forward_parts(batch: int, num_heads: int, length: int, width: int) -> int:
    """Parts of the statistics that `attention_forward` may write for heads of `width` channels in 16 bits."""
    return batch * num_heads * most_blocks("forward", length, width)


def backward_parts(batch: int, num_heads: int, length: int, width: int) -> int:
    """Parts of the statistics that `attention_backward` may write: first those of dq, behind them those of dk and dv."""
    return batch * num_heads * (most_blocks("dq", length, width) + most_blocks("dkdv", length, width))


def most_blocks(kernel: str, length: int, width: int) -> int:
    """Programs per head, with the smallest tiles that any GPU gets."""
    sizes = (rows_of(kernel, CONFIGS[kernel, 64 if width <= 64 else 128, True, newer]) for newer in (True, False))
    return triton.cdiv(length, min(sizes))


def launch(
    name: str,
    kernel: triton.JITFunction,
    tensors: tuple[Tensor | None, ...],
    quantized: Quantized | None,
    first_part: int,
    lse: Tensor,
    config: Config | None,
    dropout: Dropout | None = None,
) -> int:
    """Runs a kernel whose last tensor is qkv, over all blocks of all heads, and returns the number of its programs; each
    writes a part of the statistics of `quantized`, from `first_part` on. Offsets within one batch entry are 32 bits wide:
    T 3C < 2^31."""
    B, H, T = lse.shape
    qkv = tensors[-1]
    assert qkv is not None
    N, C3 = qkv.shape
    D = C3 // (3 * H)
    assert N == B * T and C3 == 3 * H * D and D <= 128, f"{tuple(qkv.shape)} does not pack {tuple(lse.shape)}"
    config = config or choose_config(name, qkv, D)
    programs = triton.cdiv(T, rows_of(name, config)) * B * H
    forms: tuple[Tensor | None, ...] = (None, None, None, None)
    parts = largest = vanishes_at = None
    if quantized is not None:
        parts = quantized.statistics.shape[1]
        assert first_part + programs <= parts, f"{parts} parts, {first_part + programs} needed"
        assert quantized.statistics.is_contiguous()
        forms = (quantized.rows, quantized.columns, quantized.scaling, quantized.statistics.view(-1)[first_part:])
        largest, vanishes_at = limits(quantized)
    assert all(t is None or t.is_contiguous() for t in (*tensors, *forms, lse)) and lse.dtype == torch.float32
    options = {"maxnreg": config.registers} if config.registers else {}
    kernel[(programs,)](
        *tensors,
        *forms,
        *kernel_arguments(dropout),
        H,
        T,
        C3 // 3,
        C3,
        None if quantized is None else N,
        parts,
        D=D,
        WIDTH=max(16, triton.next_power_of_2(D)),
        QUERIES=config.queries,
        KEYS=config.keys,
        TAIL=T % config.queries != 0 or T % config.keys != 0,
        LARGEST=largest,
        VANISHES_AT=vanishes_at,
        num_warps=config.warps,
        num_stages=config.stages,
        **options,
    )
    return programs


def attention_forward(
    out: Form, lse: Tensor, qkv: Tensor, *, dropout: Dropout | None = None, config: Config | None = None
) -> None:
    """out (N, C), lse (B, H, T) = log of the softmax's denominator, from qkv (N, 3C)."""
    assert dropout is None or isinstance(out, Tensor), "fp8 has no dropout"
    tensors = (plain(out), lse, qkv)
    if isinstance(out, Quantized) and not out.current:
        launch("forward", forward_kernel, tensors, out, 0, lse, config)
        return
    launch("forward", forward_kernel, tensors, None, 0, lse, config, dropout)
    if isinstance(out, Quantized):
        quantize(out, plain(out))


def attention_scratch_bytes(batch: int, num_heads: int, length: int) -> int:
    """What `attention_backward` needs: lse log2(e) and delta, side by side, for (B, H, T) in float32."""
    return 8 * batch * num_heads * length


def attention_backward(
    dqkv: Form,
    dout: Tensor,
    out: Form,
    lse: Tensor,
    qkv: Tensor,
    *,
    dropout: Dropout | None = None,
    scratch: Tensor,
    dq_config: Config | None = None,
    dkdv_config: Config | None = None,
) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C). Of a quantised dqkv there need not be a 16-bit
    form: where its scale is made from dqkv itself, all is computed twice."""
    assert dropout is None or isinstance(dqkv, Tensor), "fp8 has no dropout"
    needed = attention_scratch_bytes(*lse.shape)
    assert scratch.dtype == torch.uint8 and scratch.numel() >= needed, f"scratch holds {scratch.numel()} of {needed} bytes"
    sums = scratch[:needed].view(torch.float32)
    quantized = dqkv if isinstance(dqkv, Quantized) else None
    written = dqkv.plain if isinstance(dqkv, Quantized) else dqkv

    def run() -> None:
        dq_tensors = (written, sums, dout, plain(out), lse, qkv)
        parts = launch("dq", dq_kernel, dq_tensors, quantized, 0, lse, dq_config, dropout)
        launch("dkdv", dkdv_kernel, (written, sums, dout, qkv), quantized, parts, lse, dkdv_config, dropout)

    run()
    if quantized is not None and quantized.current:
        rescale(quantized)
        run()
