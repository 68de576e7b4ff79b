"""Value embeddings. Forward: gate, look-up and sum in one kernel. Backward: one kernel for the gate, then the token
embedding's for the table (`token_embedding_backward`).

A program takes whole token rows, one after another, and keeps the gates' weights in registers.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.rmsnorm import rstd_of

# Bytes per tensor that a warp holds: two tensors in the forward, two and a result in the backward.
BYTES_PER_WARP = 2048
FORWARD_PROGRAMS = 4096
BACKWARD_PROGRAMS = 1024  # each writes a row of partial sums for the gates' weights
MOST_PARTIALS = 1 << 20  # elements of all these rows: 4 MiB, less than the GEMMs' workspace


def tile(num_heads: int, width: int, gate_channels: int, itemsize: int) -> tuple[tuple[int, int, int], int]:
    """((padded heads, width of a head, channels of the gate), warps) of a program."""
    heads, channels = triton.next_power_of_2(num_heads), triton.next_power_of_2(width)
    warps = min(16, max(1, heads * channels * itemsize // BYTES_PER_WARP))
    return (heads, channels, triton.next_power_of_2(gate_channels)), warps


def value_embedding_forward(
    qkv_inout: Tensor, gate: Tensor, norm: Tensor, gate_weight: Tensor, tokens: Tensor, table: Tensor
) -> None:
    forward(qkv_inout, gate, norm, gate_weight, tokens, table)


def value_embedding_decode(qkv_inout: Tensor, stream: Tensor, gate_weight: Tensor, tokens: Tensor, table: Tensor) -> None:
    """Computes the norm of the stream in the same kernel; launches may overlap, as in generation."""
    forward(qkv_inout, None, stream, gate_weight, tokens, table, norms=True)


def forward(
    qkv_inout: Tensor,
    gate: Tensor | None,
    norm: Tensor,
    gate_weight: Tensor,
    tokens: Tensor,
    table: Tensor,
    *,
    norms: bool = False,
) -> None:
    """`norms`: `norm` holds the stream before its norm, and the kernel normalizes it."""
    (N, C), (H, G) = norm.shape, gate_weight.shape
    block, warps = tile(H, C // H, G, norm.element_size())
    tensors, sizes = (qkv_inout, gate, norm, gate_weight, tokens, table), (N, C, H, G, *block)
    row = triton.next_power_of_2(C) if norms else 0
    options: dict[str, Any] = overlapping(norm, warps) if norms else {"OVERLAPS": False, "num_warps": warps}
    launch(_forward, (min(N, FORWARD_PROGRAMS),), *tensors, *sizes, row, **options)


def value_embedding_backward(
    dvalues: Tensor,
    dnorm_inout: Tensor,
    dgate_weight_acc: Tensor,
    dqkv: Tensor,
    gate: Tensor,
    norm: Tensor,
    gate_weight: Tensor,
    tokens: Tensor,
    table: Tensor,
    *,
    scratch: Tensor,
) -> None:
    (N, C), (H, G) = norm.shape, gate_weight.shape
    programs = min(N, BACKWARD_PROGRAMS, max(1, MOST_PARTIALS // (H * G)))
    partials = float32_of(scratch, programs * H * G)
    block, warps = tile(H, C // H, G, norm.element_size())
    tensors = dvalues, dnorm_inout, partials, dqkv, gate, norm, gate_weight, tokens, table
    launch(_backward, (programs,), *tensors, N, C, H, G, *block, num_warps=warps)
    add_partials((dgate_weight_acc.view(-1),), partials, programs)


@triton.jit
def _forward(
    qkv, gate, norm, gate_weight, tokens, table, N, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_C: padded length of a stream's row that the kernel must normalise, or 0."""
    head, channel, inside = places(H, C // H, BLOCK_H, BLOCK_D)
    weight, read, in_gate = gates(gate_weight, H, G, BLOCK_H, BLOCK_G)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * C
        n = tl.load(norm + start + read, mask=in_gate, other=0.0).to(tl.float32)
        if BLOCK_C:
            column = tl.arange(0, BLOCK_C)
            x = tl.load(norm + start + column, mask=column < C, other=0.0).to(tl.float32)
            n = (n * rstd_of(tl.sum(x * x, 0), C)).to(norm.dtype.element_ty).to(tl.float32)
        g = 2.0 / (1.0 + tl.exp(-tl.sum(weight * n, 1, keep_dims=True)))
        if gate is not None:
            tl.store(gate + tl.cast(row, tl.int64) * H + head, g, mask=head < H)
        e = tl.load(table + tl.load(tokens + row) * C + (head * (C // H) + channel), mask=inside, other=0.0).to(tl.float32)
        value = qkv + 3 * start + 2 * C + (head * (C // H) + channel)
        v = tl.load(value, mask=inside, other=0.0).to(tl.float32)
        tl.store(value, (v + g * e).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dvalues, dnorm, partials, dqkv, gate, norm, gate_weight, tokens, table, N, C: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Program p takes the rows p, p + P, p + 2 P, ... and writes row p of partials (P, H G)."""
    head, channel, inside = places(H, C // H, BLOCK_H, BLOCK_D)
    weight, read, in_gate = gates(gate_weight, H, G, BLOCK_H, BLOCK_G)
    dweight = tl.zeros((BLOCK_H, BLOCK_G), tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * C
        offset = head * (C // H) + channel
        dv = tl.load(dqkv + 3 * start + 2 * C + offset, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(table + tl.load(tokens + row) * C + offset, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + tl.cast(row, tl.int64) * H + head, mask=head < H, other=0.0)
        tl.store(dvalues + start + offset, (g * dv).to(dvalues.dtype.element_ty), mask=inside)
        dz = tl.sum(dv * e, 1, keep_dims=True) * g * (1.0 - g / 2)
        n = tl.load(norm + start + read, mask=in_gate, other=0.0).to(tl.float32)
        dn = tl.load(dnorm + start + read, mask=in_gate, other=0.0).to(tl.float32)
        dn += tl.sum(dz * weight, 0, keep_dims=True)
        tl.store(dnorm + start + read, dn.to(dnorm.dtype.element_ty), mask=in_gate)
        dweight += dz * n
    tl.store(partials + tl.program_id(0) * (H * G) + (head * G + read), dweight, mask=(head < H) & in_gate)


@triton.jit
def places(H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """(heads, channels of a head, mask of those in range) of a row of values."""
    head, channel = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    return head, channel, (head < H) & (channel < D)


@triton.jit
def gates(gate_weight, H: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr):
    """(the gates' weights in float32, the channels that they read, mask of those in range)."""
    head, read = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_G)[None, :]
    inside = (head < H) & (read < G)
    return tl.load(gate_weight + head * G + read, mask=inside, other=0.0).to(tl.float32), read, read < G
