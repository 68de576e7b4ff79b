"""Group norm: a program takes a group of one sample, and walks over its places."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch
from handgrad.ops.reference.groupnorm import GROUPNORM_EPSILON

EPSILON = tl.constexpr(GROUPNORM_EPSILON)
ELEMENTS, WARPS = 4096, 8  # of a tile: 16 elements per lane


def groupnorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    launch_groups(_forward, mean, inp, out, mean, rstd, inp, weight, bias)


def groupnorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    sums = torch.empty(2, len(inp), inp.shape[3], dtype=torch.float32, device=inp.device)  # of a sample's pixels
    launch_groups(_backward, mean, inp, dresidual_inout, *sums, dout, inp, mean, rstd, weight)
    dweight_acc.add_(sums[0].sum(0))
    dbias_acc.add_(sums[1].sum(0))


def launch_groups(kernel: Any, mean: Tensor, inp: Tensor, *tensors: Tensor) -> None:
    """Launches a kernel over the groups, mean (B, Q), of inp (B, Y, X, C)."""
    (B, Q), (_, Y, X, C) = mean.shape, inp.shape
    block = triton.next_power_of_2(C // Q)
    launch(kernel, (Q, B), *tensors, Y * X, C, Q, block, max(1, ELEMENTS // block), num_warps=WARPS)


@triton.jit
def _forward(
    out, mean, rstd, inp, weight, bias, pixels, C: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr
):
    sample, channel, in_group = group_here(pixels, C, Q, BLOCK)
    sums = tl.zeros((PIXELS, BLOCK), tl.float32)  # per lane; reduced across lanes and warps once, at the end
    for first in range(0, pixels, PIXELS):
        at, inside = tile(sample, channel, in_group, first, pixels, C, PIXELS)
        sums += tl.load(inp + at, mask=inside, other=0.0).to(tl.float32)
    group_mean = tl.sum(sums) / (pixels * (C // Q))
    squares = tl.zeros((PIXELS, BLOCK), tl.float32)
    for first in range(0, pixels, PIXELS):
        at, inside = tile(sample, channel, in_group, first, pixels, C, PIXELS)
        centred = tl.where(inside, tl.load(inp + at, mask=inside, other=0.0).to(tl.float32) - group_mean, 0.0)
        squares += centred * centred
    group_rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares) / (pixels * (C // Q)) + EPSILON))
    w = tl.load(weight + channel, mask=in_group, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=in_group, other=0.0).to(tl.float32)
    for first in range(0, pixels, PIXELS):
        at, inside = tile(sample, channel, in_group, first, pixels, C, PIXELS)
        x = tl.load(inp + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, ((x - group_mean) * group_rstd * w + b).to(out.dtype.element_ty), mask=inside)
    group = tl.program_id(1) * Q + tl.program_id(0)
    tl.store(mean + group, group_mean)
    tl.store(rstd + group, group_rstd)


@triton.jit
def _backward(
    dresidual, dweights, dbiases, dout, inp, mean, rstd, weight, pixels, C: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """dweights, dbiases (B, C): the parameter gradients of each sample."""
    sample, channel, in_group = group_here(pixels, C, Q, BLOCK)
    group = tl.program_id(1) * Q + tl.program_id(0)
    group_mean, group_rstd = tl.load(mean + group), tl.load(rstd + group)
    along, sums = tl.zeros((PIXELS, BLOCK), tl.float32), tl.zeros((PIXELS, BLOCK), tl.float32)
    for first in range(0, pixels, PIXELS):
        at, inside = tile(sample, channel, in_group, first, pixels, C, PIXELS)
        dy = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        along += dy * (tl.load(inp + at, mask=inside, other=0.0).to(tl.float32) - group_mean) * group_rstd
        sums += dy
    dw, db = tl.sum(along, 0, keep_dims=True), tl.sum(sums, 0, keep_dims=True)
    tl.store(dweights + tl.program_id(1) * C + channel, dw, mask=in_group)
    tl.store(dbiases + tl.program_id(1) * C + channel, db, mask=in_group)
    w = tl.load(weight + channel, mask=in_group, other=0.0).to(tl.float32)
    g_mean, gx_mean = tl.sum(db * w) / (pixels * (C // Q)), tl.sum(dw * w) / (pixels * (C // Q))
    for first in range(0, pixels, PIXELS):
        at, inside = tile(sample, channel, in_group, first, pixels, C, PIXELS)
        dy = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(inp + at, mask=inside, other=0.0).to(tl.float32) - group_mean) * group_rstd
        stream = tl.load(dresidual + at, mask=inside, other=0.0).to(tl.float32)
        updated = stream + group_rstd * (dy * w - g_mean - normal * gx_mean)
        tl.store(dresidual + at, updated.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit
def group_here(pixels, C: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """(offset of this program's sample, its group's channels, which of them exist)."""
    index = tl.arange(0, BLOCK)[None, :]
    return tl.program_id(1).to(tl.int64) * pixels * C, tl.program_id(0) * (C // Q) + index, index < C // Q


@triton.jit
def tile(sample, channel, in_group, first, pixels, C: tl.constexpr, PIXELS: tl.constexpr):
    """(offsets of the group's channels of PIXELS pixels from `first` on, which of them exist)."""
    pixel = first + tl.arange(0, PIXELS)[:, None]
    return sample + pixel.to(tl.int64) * C + channel, (pixel < pixels) & in_group
