"""GELU alone; as the end of a product it belongs to the product."""

import math

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch

# GELU, tanh form (Hendrycks & Gimpel 2016): y = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3).
# With 1 + tanh u = 2 s, s = 1 / (1 + exp(-2u)), which cancels nowhere:  y = x s,  dy/dx = s + x s (1 - s) 2 du/dx.

SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi) / math.log(2))  # 2 u = ln 2 * SLOPE (x + 0.044715 x^3)
SLOPE_LN2 = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC, CUBIC3 = tl.constexpr(0.044715), tl.constexpr(3 * 0.044715)
SATURATED = tl.constexpr(1e4)  # x^2 from which exp(-2|u|) is 0; a larger square could only make 0 times infinity

# Two 16-byte loads per lane in bf16.
BLOCK, WARPS = 4096, 8


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    elements = inp.numel()
    launch(_forward, (triton.cdiv(elements, BLOCK),), out, inp, elements, BLOCK, num_warps=WARPS)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    elements = inp.numel()
    launch(_backward, (triton.cdiv(elements, BLOCK),), dhidden_inout, inp, elements, BLOCK, num_warps=WARPS)


@triton.jit
def _forward(out, inp, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < elements - start
    x = tl.load(inp + start + place, mask=inside, other=0.0).to(tl.float32)
    y = gelu(x)
    tl.store(out + start + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dhidden, inp, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < elements - start
    x = tl.load(inp + start + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dhidden + start + place, mask=inside, other=0.0).to(tl.float32)
    dx = dy * gelu_derivative(x)
    tl.store(dhidden + start + place, dx.to(dhidden.dtype.element_ty), mask=inside)


@triton.jit
def gelu(x):
    """y of float32 x, from e = exp(-2|u|) <= 1, which does not overflow: s = 1 / (1 + e), or e / (1 + e) for negative x."""
    e = tl.exp2(-tl.abs(x * SLOPE * (tl.minimum(x * x, SATURATED) * CUBIC + 1)))
    return x * tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def gelu_derivative(x):
    """dy/dx of float32 x, from e = exp(-2|u|) as in `gelu`; s (1 - s) = e / (1 + e)^2."""
    square = tl.minimum(x * x, SATURATED)
    e = tl.exp2(-tl.abs(x * SLOPE * (square * CUBIC + 1)))
    larger = 1.0 / (1 + e)
    s = tl.where(x >= 0, larger, e * larger)
    return s + x * (e * larger * larger) * (square * CUBIC3 + 1) * SLOPE_LN2
