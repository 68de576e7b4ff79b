"""Attention that also quantises its results, in the Triton loops for heads of any width."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.cuda.quantizing import UNALIGNED, at_own_scale, limits, quantize, rounded, store_statistics
from handgrad.joins.fp8.formats import Form, Quantized, plain
from handgrad.ops.cuda import attention, attention_triton
from handgrad.ops.cuda.attention_loops import LN_2, LOG2_E, dkdv_loop, dq_loop, forward_loop, load_dy_delta
from handgrad.ops.cuda.attention_tiles import (
    capability,
    is_data_centre,
    key_block,
    load_vector,
    mask_of,
    pointers_of,
    query_block,
    store_tile,
    store_vector,
)
from handgrad.ops.cuda.attention_triton import blocks, sums_in
from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.attention import CAUSAL, Mask
from handgrad.ops.sizes import AttentionTile

SCALE = tl.constexpr(formats.SCALE)
# On a data-centre GPU one more program fits a multiprocessor, and computes while another one stores. dkdv spills a few
# words, and takes longer without (benchmarks/results/h200-attention-choices-fp8.json).
TILES = {("dq", 64): AttentionTile(64, 32, 4, 3), ("dkdv", 64): AttentionTile(64, 64, 4, 2, 168)}


@triton.jit
def store_quantized(forms, x, row, column, left, D: tl.constexpr, TAIL: tl.constexpr):
    """Stores a tile x of 16-bit numbers at (row, column) of a tensor (N, C). `forms`: (its rows (N, C) or None, its columns
    (C, N) or None, scaling, C, N)."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    rows, columns, scaling, C, N = forms
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


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def forward_kernel(
    out, lse, qkv, starts, rows, columns, scaling, statistics, H, T, C, row_stride, N, PARTS, D: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr, GROUP: tl.constexpr = 1,
):  # fmt: skip
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL, GROUP)
    b, _, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    y, m, l = forward_loop(q, head, first, D, KEYS, TAIL, starts=starts)
    y = y / l[:, None]
    store_tile(out + row * C + column, C, left, y, D, QUERIES, WIDTH, TAIL)
    store_vector(lse + vector, left, (m + tl.log2(l)) * LN_2, QUERIES, TAIL)
    y = y.to(qkv.dtype.element_ty).to(tl.float32)
    if TAIL:
        y = tl.where(mask_of(left, WIDTH, QUERIES, WIDTH, TAIL), y, 0.0)
    store_quantized((rows, columns, scaling, C, N), y, row, column, left, D, TAIL)
    store_statistics(statistics, PARTS, tl.program_id(0), y, scaling, LARGEST, VANISHES_AT)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def dq_kernel(
    dqkv, sums, dout, out, lse, qkv, starts, rows, columns, scaling, statistics, H, T, C, row_stride, N, PARTS,
    D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    LARGEST: tl.constexpr, VANISHES_AT: tl.constexpr,
):  # fmt: skip
    q, head, block = query_block(qkv, H, T, C, row_stride, D, WIDTH, QUERIES, TAIL)
    b, _, row, column, vector, first, left = block
    if starts is not None:
        starts += b * T
    dy, delta = load_dy_delta(dout, out, row * C + column, C, left, D, QUERIES, WIDTH, TAIL)
    lse2 = load_vector(lse + vector, left, QUERIES, TAIL) * LOG2_E
    store_tile(sums + 2 * vector, 2, left, tl.join(lse2, delta), 2, QUERIES, 2, TAIL)
    dq = dq_loop(q, dy, lse2, delta, head, first, D, KEYS, TAIL, starts=starts)
    if dqkv is not None:
        store_tile(dqkv + row * row_stride + column, row_stride, left, dq, D, QUERIES, WIDTH, TAIL)
    dq = dq.to(qkv.dtype.element_ty).to(tl.float32)
    store_quantized((rows, columns, scaling, row_stride, N), dq, row, column, left, D, TAIL)
    store_statistics(statistics, PARTS, tl.program_id(0), dq, scaling, LARGEST, VANISHES_AT)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def dkdv_kernel(
    dqkv, sums, dout, qkv, starts, rows, columns, scaling, statistics, H, T, C, row_stride, N, PARTS, D: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, LARGEST: tl.constexpr,
    VANISHES_AT: tl.constexpr,
):  # fmt: skip
    k, v, head, block = key_block(qkv, sums, dout, H, T, C, row_stride, D, WIDTH, KEYS, TAIL)
    b, _, row, column, _, first, left = block
    if starts is not None:
        starts += b * T
    dk, dv = dkdv_loop(k, v, head, first, D, QUERIES, TAIL, starts=starts)
    if dqkv is not None:
        dk_tile = dqkv + row * row_stride + column
        store_tile(dk_tile, row_stride, left, dk, D, KEYS, WIDTH, TAIL)
        store_tile(dk_tile + C, row_stride, left, dv, D, KEYS, WIDTH, TAIL)
    # Join in 16 bits and before the stores; otherwise ptxas (CUDA 12.8) serializes the loops' instructions.
    dk = dk.to(qkv.dtype.element_ty)
    dv = dv.to(qkv.dtype.element_ty)
    both = tl.reshape(tl.join(dk, dv), (KEYS, 2 * WIDTH)).to(tl.float32)
    store_statistics(statistics, PARTS, tl.program_id(0), both, scaling, LARGEST, VANISHES_AT)
    forms = rows, columns, scaling, row_stride, N
    store_quantized(forms, dk, row, column, left, D, TAIL)
    store_quantized(forms, dv, row, column + C, left, D, TAIL)


def launch_blocks(
    name: str, kernel: Any, tensors: tuple[Any, ...], mask: Mask, quantized: Quantized, part: int, lse: Tensor, width: int
) -> int:
    """Launches a kernel over all blocks of all heads; returns the number of programs. Each writes one part of the
    statistics of `quantized`, from `part` on. `width`: channels per head."""
    starts = mask.starts_like(lse)
    statistics, parts = quantized.statistics, quantized.statistics.shape[1]
    forms = quantized.rows, quantized.columns, quantized.scaling
    tile = TILES.get((name, width)) if is_data_centre(capability(lse.device)) else None
    kind = {"width": width, "documents": starts is not None, "tile": tile}
    programs, sizes, options = blocks(name, lse, *forms, statistics, *tensors, **kind)
    assert part + programs <= parts, f"{parts} parts, {part + programs} needed"
    first, N = statistics.view(-1)[part:], quantized.shape[0]
    options |= dict(zip(("LARGEST", "VANISHES_AT"), limits(quantized), strict=True))
    launch(kernel, (programs,), *tensors, starts, *forms, first, *sizes, N, parts, **options)
    return programs


def attention_forward(out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL) -> None:
    """cuDNN's kernel and a pass behind it take less time than the Triton kernel that quantises."""
    if isinstance(out, Tensor) or out.current or attention.forward_in_cudnn(plain(out), lse, mask):
        attention.attention_forward(plain(out), lse, qkv, scratch=scratch, mask=mask)
        if isinstance(out, Quantized):
            quantize(out, plain(out))
    else:
        width = out.shape[1] // lse.shape[1]
        launch_blocks("forward", forward_kernel, (plain(out), lse, qkv), mask, out, 0, lse, width)


def attention_backward(
    dqkv: Form, dout: Tensor, out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL
) -> None:
    """A quantised dqkv needs no 16-bit form: with a current scale, the kernels compute it twice. If it has a `workspace`
    (heads that share keys always do), the faster of cuDNN and Triton fills that, and an operation between attention and the
    GEMM quantises it."""
    inputs = dout, plain(out), lse, qkv
    into = dqkv if isinstance(dqkv, Tensor) else dqkv.workspace
    if into is not None:
        either = attention_triton if into is dqkv and isinstance(out, Quantized) else attention
        either.attention_backward(into, *inputs, scratch=scratch, mask=mask)
        return
    assert isinstance(dqkv, Quantized) and qkv.shape[1] == 3 * dout.shape[1], "shared keys are quantised behind attention"
    sums, width = sums_in(scratch, lse), dout.shape[1] // lse.shape[1]

    def run() -> None:
        parts = launch_blocks("dq", dq_kernel, (dqkv.plain, sums, *inputs), mask, dqkv, 0, lse, width)
        launch_blocks("dkdv", dkdv_kernel, (dqkv.plain, sums, dout, qkv), mask, dqkv, parts, lse, width)

    at_own_scale(dqkv, run)
