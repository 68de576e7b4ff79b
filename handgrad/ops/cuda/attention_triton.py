"""Causal attention in Triton, directly on the packed rows, deterministic to the bit.

The method is FlashAttention-2 (Dao 2023): score tiles live only in registers, the softmax runs online over blocks of keys,
and the backward recomputes the probabilities from `lse`. Unlike the original, these kernels use no atomics. One kernel
computes the gradient of the queries, another the gradients of keys and values (seven products instead of five). One program
writes each output element once, after a loop of fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.attention_loops import (
    LN_2,
    LOG2_E,
    dkdv_loop,
    dq_loop,
    forward_loop,
    grouped_dkdv_loop,
    load_dy_delta,
)
from handgrad.ops.cuda.attention_tiles import (
    choose_config,
    head_of,
    key_block,
    load_tile,
    load_vector,
    query_block,
    store_tile,
    store_vector,
)
from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.attention import CAUSAL, Mask
from handgrad.ops.sizes import WIDEST_HEAD, attention_scratch_bytes, rows_of


@triton.jit
def forward_kernel(
    out, lse, qkv, starts, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr = 1,
):  # fmt: skip
    """y and lse for one block of queries of one head. Row n of qkv begins at n row_stride. `starts`: document_starts or
    None."""
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL, GROUP)
    b, _, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    y, m, l = forward_loop(q, head, first, D, KEYS, TAIL, starts=starts)
    store_tile(out + row * C + column, C, left, y / l[:, None], D, QUERIES, WIDTH, TAIL)
    store_vector(lse + vector, left, (m + tl.log2(l)) * LN_2, QUERIES, TAIL)


@triton.jit
def dq_kernel(
    dqkv, sums, dout, out, lse, qkv, starts, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr = 1,
):  # fmt: skip
    """dq for one block of queries of one head, and its rows of (lse log2(e), delta), which `dkdv_kernel` reads later."""
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL, GROUP)
    b, _, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    dy, delta = load_dy_delta(dout, out, row * C + column, C, left, D, QUERIES, WIDTH, TAIL)
    lse2 = load_vector(lse + vector, left, QUERIES, TAIL) * LOG2_E
    store_tile(sums + 2 * vector, 2, left, tl.join(lse2, delta), 2, QUERIES, 2, TAIL)
    dq = dq_loop(q, dy, lse2, delta, head, first, D, KEYS, TAIL, starts=starts)
    store_tile(dqkv + row * row_stride + column, row_stride, left, dq, D, QUERIES, WIDTH, TAIL)


@triton.jit
def dkdv_kernel(
    dqkv, sums, dout, qkv, starts, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dk and dv for one block of keys of one head."""
    k, v, head, block = key_block(qkv, sums, dout, H, T, C, row_stride, D, WIDTH, KEYS, TAIL)
    b, _, row, column, _, first, left = block
    if starts is not None:
        starts += b * T
    dk, dv = dkdv_loop(k, v, head, first, D, QUERIES, TAIL, starts=starts)
    dk_tile = dqkv + row * row_stride + column
    store_tile(dk_tile, row_stride, left, dk, D, KEYS, WIDTH, TAIL)
    store_tile(dk_tile + C, row_stride, left, dv, D, KEYS, WIDTH, TAIL)


@triton.jit
def grouped_dkdv_kernel(
    dqkv, sums, dout, qkv, starts, H, T, C, row_stride, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dk and dv for one block of keys of one head that GROUP query heads share."""
    block, b, kv_head, _ = head_of(tl.cdiv(T, KEYS), H // GROUP, T)
    first, distance = block * KEYS, H // GROUP * D
    row = b * T + first
    k_tile = qkv + row * row_stride + C + kv_head * D
    k = load_tile(k_tile, row_stride, T - first, D, KEYS, WIDTH, TAIL)
    v = load_tile(k_tile + distance, row_stride, T - first, D, KEYS, WIDTH, TAIL)
    q_head, dy_head = qkv + b * T * row_stride + kv_head * GROUP * D, dout + b * T * C + kv_head * GROUP * D
    head = q_head, dy_head, sums + 2 * (b * H + kv_head * GROUP) * T, C, row_stride, T
    if starts is not None:
        starts += b * T
    dk, dv = grouped_dkdv_loop(k, v, head, first, D, QUERIES, TAIL, GROUP, starts)
    dk_tile = dqkv + row * row_stride + C + kv_head * D
    store_tile(dk_tile, row_stride, T - first, dk, D, KEYS, WIDTH, TAIL)
    store_tile(dk_tile + distance, row_stride, T - first, dv, D, KEYS, WIDTH, TAIL)


Sizes = tuple[int, int, int, int]


def blocks(
    name: str, lse: Tensor, *tensors: Tensor | None, width: int = 0, documents: bool = False, tile: Any = None
) -> tuple[int, Sizes, dict[str, Any]]:
    """(programs, (H, T, C, row stride), tile sizes and options) of a kernel over all blocks of all heads. The last of its
    tensors is qkv. Heads have `width` channels; without it, there are as many key heads as query heads. `tile`: another
    than the shipped one. Offsets within a batch entry have 32 bits: T 3C < 2^31."""
    B, H, T = lse.shape
    qkv = tensors[-1]
    assert qkv is not None
    N, columns = qkv.shape
    D = width or columns // (3 * H)
    kv_heads = (columns // D - H) // 2
    packed = N == B * T and columns == (H + 2 * kv_heads) * D and kv_heads > 0 and H % kv_heads == 0
    assert packed and D <= WIDEST_HEAD, f"{tuple(qkv.shape)} does not pack {tuple(lse.shape)}"
    assert all(t is None or t.is_contiguous() for t in (*tensors, lse)) and lse.dtype == torch.float32
    config = tile or choose_config(name, qkv, D, kv_heads < H, documents)
    tiles = {"D": D, "WIDTH": max(16, triton.next_power_of_2(D)), "QUERIES": config.queries, "KEYS": config.keys}
    tail = T % config.queries != 0 or T % config.keys != 0
    options = {"num_warps": config.warps, "num_stages": config.stages}
    options |= {"maxnreg": config.registers} if config.registers else {}
    options |= {"GROUP": H // kv_heads} if kv_heads < H else {}
    heads = kv_heads if name == "dkdv" else H
    programs = triton.cdiv(T, rows_of(name, config)) * B * heads
    return programs, (H, T, H * D, columns), {**tiles, "TAIL": tail, **options}


def launch_blocks(
    name: str, kernel: Any, lse: Tensor, *tensors: Tensor, mask: Mask, more: tuple[Any, ...] = (), width: int = 0
) -> None:
    """Launches a kernel over all blocks of all heads. `more`: arguments between the mask and the sizes."""
    starts = mask.starts_like(lse)
    programs, sizes, options = blocks(name, lse, *tensors, width=width, documents=starts is not None)
    launch(kernel, (programs,), *tensors, starts, *more, *sizes, **options)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, mask: Mask = CAUSAL) -> None:
    launch_blocks("forward", forward_kernel, lse, out, lse, qkv, width=out.shape[1] // lse.shape[1], mask=mask)


def sums_in(scratch: Tensor, lse: Tensor) -> Tensor:
    """The part of `scratch` where the backward's first kernel stores lse log2(e) and delta."""
    B, H, T = lse.shape
    needed = attention_scratch_bytes(batch=B, length=T, num_heads=H)
    assert scratch.dtype == torch.uint8 and scratch.numel() >= needed, f"scratch holds {scratch.numel()} of {needed} bytes"
    return scratch[:needed].view(torch.float32)


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL
) -> None:
    sums, (_, H, _), C = sums_in(scratch, lse), lse.shape, out.shape[1]
    dkdv = dkdv_kernel if qkv.shape[1] == 3 * C else grouped_dkdv_kernel
    launch_blocks("dq", dq_kernel, lse, dqkv, sums, dout, out, lse, qkv, mask=mask, width=C // H)
    launch_blocks("dkdv", dkdv, lse, dqkv, sums, dout, qkv, mask=mask, width=C // H)
