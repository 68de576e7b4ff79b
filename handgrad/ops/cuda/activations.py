"""GELU, squared ReLU, SwiGLU and GEGLU, for GEMMs whose epilogue cuBLASLt lacks."""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch

# Two 16-byte loads per lane in bf16; for gates, two in each half of a row, whose last block is masked.
BLOCK, WARPS = 4096, 8
GATES_BLOCK, GATES_WARPS = 2048, 4


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    launch_flat(_gelu_forward, out, inp)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    launch_flat(_gelu_backward, dhidden_inout, inp)


def relu2_forward(hidden_inout: Tensor) -> None:
    launch_flat(_relu2_forward, hidden_inout)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    launch_flat(_relu2_backward, dhidden_inout, out)


def launch_flat(kernel: Any, *tensors: Tensor) -> None:
    """Launches a kernel over the elements of tensors of equal size."""
    elements = tensors[0].numel()
    launch(kernel, (triton.cdiv(elements, BLOCK),), *tensors, elements, BLOCK, num_warps=WARPS)


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    launch_gates(_gates_forward, out, hidden, is_gelu=False)


def swiglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    launch_gates(_gates_backward, dhidden, dout, hidden, is_gelu=False)


def geglu_forward(out: Tensor, hidden: Tensor) -> None:
    launch_gates(_gates_forward, out, hidden, is_gelu=True)


def geglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    launch_gates(_gates_backward, dhidden, dout, hidden, is_gelu=True)


def launch_gates(kernel: Any, *tensors: Tensor, is_gelu: bool) -> None:
    """Launches a kernel over a hidden layer (N, 2F), the last of the tensors."""
    N, F = tensors[-1].shape[0], tensors[-1].shape[1] // 2
    launch(kernel, (N, triton.cdiv(F, GATES_BLOCK)), *tensors, F, GATES_BLOCK, is_gelu, num_warps=GATES_WARPS)


# GELU, tanh form (Hendrycks & Gimpel 2016): y = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3).
# With 1 + tanh u = 2 s, s = 1 / (1 + exp(-2u)), which cancels nowhere:  y = x s,  dy/dx = s + x s (1 - s) 2 du/dx.

SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi) / math.log(2))  # 2 u = ln 2 * SLOPE (x + 0.044715 x^3)
SLOPE_LN2 = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC, CUBIC3 = tl.constexpr(0.044715), tl.constexpr(3 * 0.044715)
SATURATED = tl.constexpr(1e4)  # from this x^2 on exp(-2|u|) is 0; a larger square could only yield 0 times infinity


@triton.jit
def _gelu_forward(out, inp, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < elements - start
    x = tl.load(inp + start + offset, mask=inside, other=0.0).to(tl.float32)
    y = gelu(x)
    tl.store(out + start + offset, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(dhidden, inp, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < elements - start
    x = tl.load(inp + start + offset, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dhidden + start + offset, mask=inside, other=0.0).to(tl.float32)
    dx = dy * gelu_derivative(x)
    tl.store(dhidden + start + offset, dx.to(dhidden.dtype.element_ty), mask=inside)


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


# Squared ReLU, in place.


@triton.jit
def _relu2_forward(hidden, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < elements - start
    x = tl.load(hidden + start + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + start + offset, relu2(x).to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def relu2(x):
    """max(x, 0)^2 of float32 x; NaN stays NaN."""
    above = tl.where(x < 0, 0.0, x)
    return above * above


@triton.jit
def _relu2_backward(dhidden, out, elements, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < elements - start
    y = tl.load(out + start + offset, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dhidden + start + offset, mask=inside, other=0.0).to(tl.float32)
    dx = dy * (2 * tl.sqrt_rn(y))
    tl.store(dhidden + start + offset, dx.to(dhidden.dtype.element_ty), mask=inside)


# SwiGLU and GEGLU. A row holds the gates g, then the numbers u that they multiply; a program takes one block of each.


@triton.jit
def places(F, BLOCK: tl.constexpr):
    """(row, columns, which of them exist) of this program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), column, column < F


@triton.jit
def sigmoid(x):
    """The sigmoid of float32 x, from e = exp(-|x|) <= 1, which does not overflow."""
    e = tl.exp2(-tl.abs(x) * 1.4426950408889634)
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def gated(g, u, dy, GELU: tl.constexpr = False):
    """(f(g) u, dg, du) from float32 gates g, the numbers u that they multiply, and the output's gradient dy; f: silu or
    GELU."""
    if GELU:
        y = gelu(g)
        return y * u, dy * u * gelu_derivative(g), dy * y
    else:
        s = sigmoid(g)
        return g * s * u, dy * u * (s * (1 + g * (1 - s))), dy * (g * s)


@triton.jit
def _gates_forward(out, hidden, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, column, inside = places(F, BLOCK)
    gate = hidden + row * 2 * F + column
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate + F, mask=inside, other=0.0).to(tl.float32)
    y, _, _ = gated(g, u, 0.0, GELU)
    tl.store(out + row * F + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gates_backward(dhidden, dout, hidden, F, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, column, inside = places(F, BLOCK)
    gate = row * 2 * F + column
    g = tl.load(hidden + gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(hidden + gate + F, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dout + row * F + column, mask=inside, other=0.0).to(tl.float32)
    _, dg, du = gated(g, u, dy, GELU)
    tl.store(dhidden + gate, dg.to(dhidden.dtype.element_ty), mask=inside)
    tl.store(dhidden + gate + F, du.to(dhidden.dtype.element_ty), mask=inside)
