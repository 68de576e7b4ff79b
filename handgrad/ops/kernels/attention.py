"""Causal attention in Triton, straight from and into the packed rows, with bits that repeat.

The method is FlashAttention-2's (Dao 2023): tiles of the scores live in registers only, the softmax runs online over blocks
of keys, and the backward recomputes the probabilities from `lse`. What is different here is order: no atomic anywhere. The
gradients of queries and of keys and values come from two kernels (seven products instead of five), and each element of
every output is written once, by one program, after a loop of fixed order.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Online over blocks of keys, m the running maximum, l the running denominator (Dao 2023, algorithm 1):
# m' = max(m, max S),  P~ = exp(S - m'),  l' = l exp(m - m') + sum P~,  y' = y exp(m - m') + P~ v;  at the end y / l, and
# lse = m + log l.
# Backward: delta = rowsum(dy y),  dv = P^T dy,  dP = dy v^T,  dS = P (dP - delta),
# dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).
#
# All exponents are to base 2 with log2(e) folded into the scale: exp(S - m) = 2^(q k^T scale2 - m2), one fused
# multiply-add and one exponential instruction per score. P and dS are rounded to the inputs' dtype before their products.

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Of products of float32 inputs, also in a run with TF32: Triton truncates where the hardware's rounding would need an
# instruction more, and the gradients of a block came out five times worse than the reference's in TF32.
PRECISION = tl.constexpr("ieee")


class Config(NamedTuple):
    """How one kernel is cut: queries and keys per tile, warps per program, depth of the load pipeline (3 loads one tile
    ahead of the products), and a cap on the registers of a thread where it lets one more program run beside."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Frozen: choosing at run time would change the order of the sums, and so the bits. The key is (kernel, head width up to,
# inputs of 16 bits, a data-centre GPU with the shared memory and the tensor cores of Hopper or Blackwell). The rows for
# the others fit in the 99 KB of shared memory of sm_86, sm_89 and sm_120.
CONFIGS: dict[tuple[str, int, bool, bool], Config] = {
    ("forward", 64, True, True): Config(64, 64, 4, 3, 128),
    ("forward", 128, True, True): Config(64, 64, 4, 3),
    ("forward", 64, True, False): Config(128, 64, 8, 2),
    ("forward", 128, True, False): Config(128, 32, 8, 2),
    ("forward", 64, False, True): Config(32, 32, 8, 2),
    ("forward", 128, False, True): Config(32, 16, 8, 2),
    ("forward", 64, False, False): Config(32, 32, 8, 2),
    ("forward", 128, False, False): Config(32, 16, 8, 2),
    ("dq", 64, True, True): Config(64, 64, 4, 2, 128),
    ("dq", 128, True, True): Config(128, 64, 8, 3),
    ("dq", 64, True, False): Config(64, 64, 4, 2),
    ("dq", 128, True, False): Config(64, 32, 4, 2),
    ("dq", 64, False, True): Config(32, 32, 8, 2),
    ("dq", 128, False, True): Config(32, 16, 8, 2),
    ("dq", 64, False, False): Config(32, 32, 8, 2),
    ("dq", 128, False, False): Config(32, 16, 8, 2),
    ("dkdv", 64, True, True): Config(64, 64, 4, 3),
    ("dkdv", 128, True, True): Config(64, 64, 8, 3),
    ("dkdv", 64, True, False): Config(32, 64, 8, 2),
    ("dkdv", 128, True, False): Config(32, 32, 4, 2),
    ("dkdv", 64, False, True): Config(32, 32, 8, 2),
    ("dkdv", 128, False, True): Config(16, 16, 4, 2),
    ("dkdv", 64, False, False): Config(32, 32, 8, 2),
    ("dkdv", 128, False, False): Config(16, 16, 4, 2),
}


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


# The tiles that the diagonal crosses are taken apart, so that the loop over the others runs without masks: a second loop
# for queries; unrolled ahead of the loop for keys and values. This is for ptxas, which else runs a loop's tensor-core
# instructions one after another (its warning C7515; tests/kernels looks for such warnings): so it did for keys and values
# with two loops in either order, and for queries with the diagonal first.


@triton.jit
def forward_step(
    y, m, l, q, k_head, C, row_stride, first_query, first_key, T, D: tl.constexpr, KEYS: tl.constexpr,
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
    v = load_tile(k_tile + C, row_stride, T - first_key, D, KEYS, WIDTH, TAIL)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None], input_precision=PRECISION)
    return y, m_new, l


@triton.jit
def forward_kernel(
    out, lse, qkv, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr,
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
    diagonal = first // KEYS * KEYS
    for key in range(0, diagonal, KEYS):  # before this block's first query: all exist, and every query sees them
        y, m, l = forward_step(y, m, l, q, k_head, C, row_stride, first, key, T, D, KEYS, False, False)
    for key in range(diagonal, first + QUERIES, KEYS):
        y, m, l = forward_step(y, m, l, q, k_head, C, row_stride, first, key, T, D, KEYS, True, TAIL)
    store_tile(out + (b * T + first) * C + h * D, C, left, y / l[:, None], D, QUERIES, WIDTH, TAIL)
    store_vector(lse + vector + first, left, (m + tl.log2(l)) * LN_2, QUERIES, TAIL)


@triton.jit
def dq_step(
    dq, q, dy, lse2, delta, k_head, C, row_stride, first_query, first_key, T, D: tl.constexpr, KEYS: tl.constexpr,
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
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    dqkv, rows, dout, out, lse, qkv, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr,
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
    lse2 = load_vector(lse + vector + first, left, QUERIES, TAIL) * LOG2_E
    store_tile(rows + 2 * (vector + first), 2, left, tl.join(lse2, delta), 2, QUERIES, 2, TAIL)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    diagonal = first // KEYS * KEYS
    for key in range(0, diagonal, KEYS):
        dq = dq_step(dq, q, dy, lse2, delta, k_head, C, row_stride, first, key, T, D, KEYS, False, False)
    for key in range(diagonal, first + QUERIES, KEYS):
        dq = dq_step(dq, q, dy, lse2, delta, k_head, C, row_stride, first, key, T, D, KEYS, True, TAIL)
    dq_tile = dqkv + (b * T + first) * row_stride + h * D
    store_tile(dq_tile, row_stride, left, dq * (1.0 / D**0.5), D, QUERIES, WIDTH, TAIL)


@triton.jit
def dkdv_step(
    dk, dv, k, v, q_head, dy_head, rows, C, row_stride, first_query, first_key, T, D: tl.constexpr, QUERIES: tl.constexpr,
    DIAGONAL: tl.constexpr, TAIL: tl.constexpr,
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
    lse2, delta = tl.split(load_tile(rows + 2 * first_query, 2, left, 2, QUERIES, 2, TAIL))
    p = tl.exp2(s * scale2 - lse2[None, :])
    if DIAGONAL:
        p = tl.where(tl.trans(is_later(first_query, first_key, QUERIES, KEYS)), 0.0, p)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    dqkv, rows, dout, qkv, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys of one head. The first keys are seen by the most queries: longest programs first."""
    block, b, h, vector = head_of(tl.cdiv(T, KEYS), H, T)
    first = block * KEYS
    left = T - first
    q_head = qkv + b * T * row_stride + h * D
    dy_head = dout + b * T * C + h * D
    rows += 2 * vector
    k_tile = q_head + C + first * row_stride
    k = load_tile(k_tile, row_stride, left, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + C, row_stride, left, D, KEYS, WIDTH, TAIL)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    # Blocks of queries that the diagonal crosses, full blocks of queries after all these keys, and at most one tail.
    diagonal = first // QUERIES * QUERIES
    CROSSED: tl.constexpr = (KEYS + QUERIES - 1) // QUERIES
    for crossed in tl.static_range(CROSSED):
        query = diagonal + crossed * QUERIES
        dk, dv = dkdv_step(dk, dv, k, v, q_head, dy_head, rows, C, row_stride, query, first, T, D, QUERIES, True, TAIL)
    after = diagonal + CROSSED * QUERIES
    full = tl.maximum(T // QUERIES * QUERIES, after)
    for query in range(after, full, QUERIES):
        dk, dv = dkdv_step(dk, dv, k, v, q_head, dy_head, rows, C, row_stride, query, first, T, D, QUERIES, False, False)
    if TAIL:
        for query in range(full, T, QUERIES):
            dk, dv = dkdv_step(dk, dv, k, v, q_head, dy_head, rows, C, row_stride, query, first, T, D, QUERIES, False, True)
    dk_tile = dqkv + (b * T + first) * row_stride + C + h * D
    store_tile(dk_tile, row_stride, left, dk * (1.0 / D**0.5), D, KEYS, WIDTH, TAIL)
    store_tile(dk_tile + C, row_stride, left, dv, D, KEYS, WIDTH, TAIL)


@functools.cache
def is_hopper_or_newer(device: torch.device) -> bool:
    """Whether the rows for data-centre GPUs apply. sm_120 has Blackwell's name, but not its shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def choose_config(kernel: str, qkv: Tensor, D: int) -> Config:
    return CONFIGS[kernel, 64 if D <= 64 else 128, qkv.element_size() == 2, is_hopper_or_newer(qkv.device)]


def launch(name: str, kernel: triton.JITFunction, tensors: tuple[Tensor, ...], lse: Tensor, config: Config | None) -> None:
    """Runs a kernel whose last tensor is qkv, over all blocks of all heads. Offsets within one batch entry are 32 bits
    wide: T 3C < 2^31."""
    B, H, T = lse.shape
    N, C3 = tensors[-1].shape
    D = C3 // (3 * H)
    assert N == B * T and C3 == 3 * H * D and D <= 128, f"{tuple(tensors[-1].shape)} does not pack {tuple(lse.shape)}"
    assert all(t.is_contiguous() for t in (*tensors, lse)) and lse.dtype == torch.float32
    config = config or choose_config(name, tensors[-1], D)
    rows = config.keys if name == "dkdv" else config.queries
    options = {"maxnreg": config.registers} if config.registers else {}
    kernel[(triton.cdiv(T, rows) * B * H,)](
        *tensors,
        H,
        T,
        C3 // 3,
        C3,
        D=D,
        WIDTH=max(16, triton.next_power_of_2(D)),
        QUERIES=config.queries,
        KEYS=config.keys,
        TAIL=T % config.queries != 0 or T % config.keys != 0,
        num_warps=config.warps,
        num_stages=config.stages,
        **options,
    )


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, config: Config | None = None) -> None:
    """out (N, C), lse (B, H, T) = log of the softmax's denominator, from qkv (N, 3C)."""
    launch("forward", forward_kernel, (out, lse, qkv), lse, config)


def attention_scratch_bytes(batch: int, num_heads: int, length: int) -> int:
    """What `attention_backward` needs: lse log2(e) and delta, side by side, for (B, H, T) in float32."""
    return 8 * batch * num_heads * length


def attention_backward(
    dqkv: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    *,
    scratch: Tensor,
    dq_config: Config | None = None,
    dkdv_config: Config | None = None,
) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C)."""
    needed = attention_scratch_bytes(*lse.shape)
    assert scratch.dtype == torch.uint8 and scratch.numel() >= needed, f"scratch holds {scratch.numel()} of {needed} bytes"
    rows = scratch[:needed].view(torch.float32)
    launch("dq", dq_kernel, (dqkv, rows, dout, out, lse, qkv), lse, dq_config)
    launch("dkdv", dkdv_kernel, (dqkv, rows, dout, qkv), lse, dkdv_config)
