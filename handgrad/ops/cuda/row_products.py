"""Products of one row with a weight, for generation: as fast as the weight is read.

A program holds a tile of rows of the weight in registers, and has the next one on its way: its first two it requests
before it waits for the kernel before (programmatic dependent launch, from Hopper on). No more programs run than a GPU holds
beside those of the next kernel, so that the next kernel's first tiles come while this one computes, and a program prepares
x once for all its tiles: its norm, or the sum of attention's parts. Every output is one program's sum, in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.cuda.gelu import gelu
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.layernorm import EPSILON
from handgrad.ops.cuda.relu2 import relu2
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.cuda.swiglu import sigmoid
from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON

# A program's tile of the weight, 64 numbers a thread: with two tiles of a few programs on each multiprocessor as many bytes
# are on their way as the memory's latency asks for (4.8 TB/s times about 800 ns are 29 KB a multiprocessor).
TILE_ELEMENTS = 8192
ELEMENTS_PER_WARP = 2048
LONGEST_ROW = 1 << 15  # of a tile of one row
FEWEST_PROGRAMS = 264  # two on each of 132 multiprocessors, while a program still has rows to give
# If programs take several tiles: up to twice as many, of 8-bit numbers four times. None: one tile each, which an H200 was
# quicker with (docs/sampling.md).
MOST_PROGRAMS: int | None = None
REGISTERS = (
    160  # of a thread, after a norm: where the assembler aims at 128 by itself it spills for compute capability 10.0
)

NOTHING = tl.constexpr(-1e30)  # a score below all scores


class ScaledRows(NamedTuple):
    """A weight (O, K) = rows * scales[:, None], as a product of one row reads it."""

    rows: Tensor  # (O, K) e4m3
    scales: Tensor  # (O) float32

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape


class AttentionParts(NamedTuple):
    """Attention of one row in S parts a head (`attention_decode`): sums not yet divided, relative to the largest score."""

    sums: Tensor  # (H, S, D) float32
    tops: Tensor  # (H, S) float32, the largest score of each part
    totals: Tensor  # (H, S) float32, the sum of its weights


def takes(x: Tensor, weight: Tensor | ScaledRows) -> bool:
    """True for the product of one row that fits a program."""
    return x.shape[0] == 1 and weight.shape[1] <= LONGEST_ROW


def product_tile(O: int, K: int) -> tuple[int, int, int]:
    """(rows, padded row length, warps) of a program's tile."""
    block = triton.next_power_of_2(K)
    rows = max(1, TILE_ELEMENTS // block)
    while rows > 1 and triton.cdiv(O, rows) < FEWEST_PROGRAMS:
        rows //= 2
    return rows, block, min(16, max(1, rows * block // ELEMENTS_PER_WARP))


def programs_of(tiles: int, *, narrow: bool) -> int:
    """Programs with equally many tiles, but the last ones; more where tiles are of 8-bit numbers (`narrow`)."""
    if MOST_PROGRAMS is None:
        return tiles
    return triton.cdiv(tiles, max(1, tiles // (MOST_PROGRAMS * (2 if narrow else 1))))


def row_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor | ScaledRows,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor | None, Tensor | None] = (None, None),
    rms_norm: bool = False,
    epsilon: float = LAYERNORM_EPSILON,
    residual: Tensor | None = None,
    activation: str = "",
    parts: AttentionParts | None = None,
) -> None:
    """out (1, O) = f(norm(x) weight^T + bias (O) + residual (1, O)), of one row x (1, K). f is "gelu", "relu2", "swiglu"
    (weight (2 O, K)) or nothing, weight (O, K) otherwise; the norm a layer norm with its weight and bias, an RMS norm with
    its gain or without, or nothing. `parts`: x is their sum instead, which nothing else has made."""
    rows, scales = weight if isinstance(weight, ScaledRows) else (weight, None)
    O, K = out.shape[1], weight.shape[1]
    *tile, warps = product_tile(weight.shape[0], K)
    if activation == "swiglu" and tile[0] > 1:  # a program takes as many rows of the other half
        tile[0] //= 2
    programs = programs_of(triton.cdiv(O, tile[0]), narrow=scales is not None)
    sums, tops, totals = parts or (None, None, None)
    split = (0, 0) if sums is None else (sums.shape[1], sums.shape[2])
    tensors = out, x, *norm, rows, scales, bias, residual, sums, tops, totals
    constants = O, K, epsilon, *tile, *split, activation, rms_norm
    options = overlapping(out, warps) | ({"maxnreg": REGISTERS} if norm[0] is not None else {})
    launch(_row_product, (programs,), *tensors, *constants, **options)


@triton.jit
def weight_tile(weight, tile, offset, O, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    place = (row.to(tl.int64) + offset)[:, None] * K + column[None, :]
    inside = (row < O)[:, None] & (column < K)[None, :]
    return tl.load(weight + place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(w, v, scales, row, here):
    """(ROWS) float32: a tile of the weight times the row v."""
    y = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if scales is not None:
        y *= tl.load(scales + row, mask=here, other=0.0)
    return y


@triton.jit
def attended(sums, tops, totals, H, SPLITS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK) float32: the heads' results, of the parts in their order."""
    head, channel = tl.arange(0, BLOCK // HEAD), tl.arange(0, HEAD)
    present = head < H
    top = tl.full([BLOCK // HEAD], NOTHING, tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(tops + head * SPLITS + s, mask=present, other=NOTHING))
    total = tl.where(present, 0.0, 1.0)
    y = tl.zeros([BLOCK // HEAD, HEAD], tl.float32)
    for s in tl.static_range(SPLITS):
        part = head * SPLITS + s
        share = tl.exp2(tl.load(tops + part, mask=present, other=NOTHING) - top)
        total += share * tl.load(totals + part, mask=present, other=0.0)
        y += share[:, None] * tl.load(sums + part[:, None] * HEAD + channel[None, :], mask=present[:, None], other=0.0)
    return tl.reshape(y / total[:, None], [BLOCK])


@triton.jit
def _row_product(
    out, x, norm_weight, norm_bias, weight, scales, bias, residual, sums, tops, totals, O, K, epsilon,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HEAD: tl.constexpr, ACTIVATION: tl.constexpr,
    RMS_NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < K
    # Everything that no kernel of this step writes, before waiting for the one before.
    w = weight_tile(weight, first, 0, O, K, ROWS, BLOCK)
    w_next = weight_tile(weight, first + step, 0, O, K, ROWS, BLOCK)
    u, u_next = w, w_next
    if ACTIVATION == "swiglu":
        u = weight_tile(weight, first, O, O, K, ROWS, BLOCK)
        u_next = weight_tile(weight, first + step, O, O, K, ROWS, BLOCK)
    scale, shift = 1.0, 0.0
    if norm_weight is not None:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if norm_bias is not None:
        shift = tl.load(norm_bias + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if SPLITS:
        v = attended(sums, tops, totals, K // HEAD, SPLITS, HEAD, BLOCK)
        v = tl.where(inside, v, 0.0).to(x.dtype.element_ty).to(tl.float32)
    else:
        v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if RMS_NORM:
        v = (v * rstd_of(tl.sum(v * v, 0), K, epsilon) * scale).to(x.dtype.element_ty).to(tl.float32)
    elif norm_weight is not None:
        # The mean first: squares / K - mean^2 in one pass loses the variance of a row far from zero.
        centred = tl.where(inside, v - tl.sum(v, 0) / K, 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 0) / K + EPSILON))
        v = (centred * rstd * scale + shift).to(x.dtype.element_ty).to(tl.float32)
    for tile in range(first, tl.cdiv(O, ROWS), step):
        row = tile * ROWS + tl.arange(0, ROWS)
        here = row < O
        added = tl.zeros([ROWS], tl.float32)
        if bias is not None:
            added += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)
        if residual is not None:
            added += tl.load(residual + row, mask=here, other=0.0).to(tl.float32)
        # The assembler puts these loads behind the products, into whose registers they go: therefore two tiles ahead.
        w_later, u_later = weight_tile(weight, tile + 2 * step, 0, O, K, ROWS, BLOCK), u_next
        if ACTIVATION == "swiglu":
            u_later = weight_tile(weight, tile + 2 * step, O, O, K, ROWS, BLOCK)
        y = product(w, v, scales, row, here) + added
        if ACTIVATION == "gelu":
            y = gelu(y)
        if ACTIVATION == "relu2":
            y = relu2(y)
        if ACTIVATION == "swiglu":
            y = y * sigmoid(y) * product(u, v, scales, row + O, here)
        tl.store(out + row, y.to(out.dtype.element_ty), mask=here)
        w, w_next, u, u_next = w_next, w_later, u_next, u_later
