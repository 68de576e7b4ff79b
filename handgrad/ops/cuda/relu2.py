"""Squared ReLU in place, after the product that makes its input and after the one that makes its gradient: cuBLASLt has no
such epilogue."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.gelu import BLOCK, WARPS
from handgrad.ops.cuda.launch import launch


def relu2_forward(hidden_inout: Tensor) -> None:
    elements = hidden_inout.numel()
    launch(_forward, (triton.cdiv(elements, BLOCK),), hidden_inout, elements, BLOCK, num_warps=WARPS)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    elements = out.numel()
    launch(_backward, (triton.cdiv(elements, BLOCK),), dhidden_inout, out, elements, BLOCK, num_warps=WARPS)


@triton.jit
def _forward(hidden, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < elements - start
    x = tl.load(hidden + start + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + start + place, relu2(x).to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def relu2(x):
    """max(x, 0)^2 of float32 x; a NaN stays one."""
    above = tl.where(x < 0, 0.0, x)
    return above * above


@triton.jit
def _backward(dhidden, out, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < elements - start
    y = tl.load(out + start + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dhidden + start + place, mask=inside, other=0.0).to(tl.float32)
    dx = dy * (2 * tl.sqrt_rn(y))
    tl.store(dhidden + start + place, dx.to(dhidden.dtype.element_ty), mask=inside)
