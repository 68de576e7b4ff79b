"""GELU and the residual sum, alone and as the end of a product."""

import math

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.linear import linear_backward, linear_forward

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715

# GELU, tanh form (Hendrycks & Gimpel 2016): y = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3).
# dy/dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) sqrt(2/pi) (1 + 3 * 0.044715 x^2).


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    """out, inp (N, F)."""
    x, tanh = gelu_terms(inp)
    out.copy_(x / 2 * (1 + tanh))


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    """Turns the gradient after the GELU into the gradient before it, in place; inp (N, F) is the GELU's input."""
    x, tanh = gelu_terms(inp)
    slope = (1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * ROOT * (1 + 3 * CUBIC * x * x)
    dhidden_inout.copy_(dhidden_inout * slope)


def gelu_terms(inp: Tensor) -> tuple[Tensor, Tensor]:
    """x and tanh u, at least in float32."""
    x = inp.to(accumulation_dtype(inp.dtype))
    return x, torch.tanh(ROOT * (x + CUBIC * x * x * x))


# Linear and GELU in one: h = x W^T + b, y = GELU(h). Backward of the product that reads y (its weight Wp, output gradient
# dz): dh = GELU'(h) (dz Wp),  dWp = dz^T y.


def linear_gelu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor | None = None
) -> None:
    """hidden (N, F) = inp (N, I) weight (F, I)^T + bias (F); out (N, F) = GELU(hidden)."""
    linear_forward(hidden, inp, weight, bias)
    gelu_forward(out, hidden)


def gelu_linear_backward(
    dhidden: Tensor,
    dweight_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """`linear_backward` of a product whose input (N, F) is GELU(hidden): dhidden is the gradient before the GELU. The
    product's bias gradient comes from the layer norm's backward above it."""
    linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
    gelu_backward(dhidden, hidden)


# Residual: out = a + b. Its backward is the identity: both inputs receive the residual stream's gradient.


def residual_forward(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out, a, b (N, C)."""
    torch.add(a, b, out=out)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None
) -> None:
    """out (N, C) = residual (N, C) + inp (N, I) weight (C, I)^T + bias (C), which may be None. `out` is not `residual`."""
    linear_forward(out, inp, weight, bias)
    residual_forward(out, residual, out)
