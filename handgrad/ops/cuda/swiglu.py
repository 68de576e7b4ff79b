"""SwiGLU after the product that makes its input and after the one that makes its gradient: cuBLASLt has no such epilogue.

Gates and what they let through lie side by side in a row, so a program takes one stretch of each.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch

# Two 16-byte loads per lane of each half in bf16. A row's last stretch is masked.
BLOCK, WARPS = 2048, 4


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    N, F = out.shape
    launch(_forward, (N, triton.cdiv(F, BLOCK)), out, hidden, F, BLOCK, num_warps=WARPS)


def swiglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    N, F = dout.shape
    launch(_backward, (N, triton.cdiv(F, BLOCK)), dhidden, dout, hidden, F, BLOCK, num_warps=WARPS)


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
def gated(g, u, dy):
    """(silu(g) u, dg, du) from float32 gates g, the numbers u that they let through, and the output's gradient dy."""
    s = sigmoid(g)
    return g * s * u, dy * u * (s * (1 + g * (1 - s))), dy * (g * s)


@triton.jit
def _forward(out, hidden, F, BLOCK: tl.constexpr):
    row, column, inside = places(F, BLOCK)
    gate = hidden + row * 2 * F + column
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate + F, mask=inside, other=0.0).to(tl.float32)
    y, _, _ = gated(g, u, 0.0)
    tl.store(out + row * F + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dhidden, dout, hidden, F, BLOCK: tl.constexpr):
    row, column, inside = places(F, BLOCK)
    gate = row * 2 * F + column
    g = tl.load(hidden + gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(hidden + gate + F, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dout + row * F + column, mask=inside, other=0.0).to(tl.float32)
    _, dg, du = gated(g, u, dy)
    tl.store(dhidden + gate, dg.to(dhidden.dtype.element_ty), mask=inside)
    tl.store(dhidden + gate + F, du.to(dhidden.dtype.element_ty), mask=inside)
