"""GELU, SiLU, squared ReLU, SwiGLU and GEGLU, alone and as GEMM epilogues; and the residual sum."""

import math

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose
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
    slope = gelu_slope(*gelu_terms(inp))
    dhidden_inout.copy_(dhidden_inout * slope)


def gelu_slope(x: Tensor, tanh: Tensor) -> Tensor:
    """dy/dx from x and tanh u."""
    return (1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * ROOT * (1 + 3 * CUBIC * x * x)


def gelu_terms(inp: Tensor) -> tuple[Tensor, Tensor]:
    """x and tanh u, in float32 or wider."""
    x = inp.to(accumulation_dtype(inp.dtype))
    return x, torch.tanh(ROOT * (x + CUBIC * x * x * x))


linear_gelu_forward, gelu_linear_backward = compose.with_gelu(linear_forward, linear_backward, gelu_forward, gelu_backward)

# SiLU (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415): y = x s,  s = 1 / (1 + exp(-x)).
# dy/dx = s (1 + x (1 - s)).


def silu_forward(out: Tensor, inp: Tensor) -> None:
    """out, inp: any shape."""
    out.copy_(inp * torch.sigmoid(inp))


def silu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    """Turns the gradient after the SiLU into the gradient before it, in place; inp is the SiLU's input."""
    s = torch.sigmoid(inp)
    dhidden_inout.mul_(s * (1 + inp * (1 - s)))


# Squared ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668): y = max(x, 0)^2,  dy/dx = 2 max(x, 0) = 2 sqrt(y).
# So the backward needs only the output, which the next GEMM keeps anyway.


def relu2_forward(hidden_inout: Tensor) -> None:
    """hidden_inout (N, F), in place; the arithmetic is float32 or wider."""
    x = hidden_inout.to(accumulation_dtype(hidden_inout.dtype)).clamp(min=0)
    hidden_inout.copy_(x * x)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    """Turns the gradient after the square into the gradient before the ReLU, in place; out (N, F) is the output."""
    y = out.to(accumulation_dtype(out.dtype))
    dhidden_inout.copy_(dhidden_inout * (2 * y.sqrt()))


linear_relu2_forward, relu2_linear_backward = compose.with_relu2(
    linear_forward, linear_backward, relu2_forward, relu2_backward
)

# SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202): [g u] = x [Wg Wu]^T in one GEMM,  y = silu(g) u,
# silu(g) = g s,  s = 1 / (1 + exp(-g)).  Backward: du = dy g s,  dg = dy u s (1 + g (1 - s)).


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    """out (N, F) from hidden (N, 2F): g in the first F columns, u in the rest."""
    g, u = gates(hidden)
    out.copy_(g * torch.sigmoid(g) * u)


def swiglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    """dhidden (N, 2F) from dout (N, F) and hidden (N, 2F)."""
    g, u = gates(hidden)
    dy, s = dout.to(g.dtype), torch.sigmoid(g)
    dg, du = dhidden.chunk(2, dim=1)
    dg.copy_(dy * u * (s * (1 + g * (1 - s))))
    du.copy_(dy * (g * s))


def gates(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """g and u, (N, F) each, in float32 or wider."""
    g, u = hidden.to(accumulation_dtype(hidden.dtype)).chunk(2, dim=1)
    return g, u


linear_swiglu_forward, swiglu_linear_backward = compose.with_swiglu(
    linear_forward, linear_backward, swiglu_forward, swiglu_backward
)

# GEGLU (Shazeer 2020): the same with GELU for silu,  y = gelu(g) u.  Backward: du = dy gelu(g),  dg = dy u gelu'(g).


def geglu_forward(out: Tensor, hidden: Tensor) -> None:
    """out (N, F) from hidden (N, 2F): g in the first F columns, u in the rest."""
    g, u = gates(hidden)
    _, tanh = gelu_terms(g)
    out.copy_(g / 2 * (1 + tanh) * u)


def geglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    """dhidden (N, 2F) from dout (N, F) and hidden (N, 2F)."""
    g, u = gates(hidden)
    dy, (_, tanh) = dout.to(g.dtype), gelu_terms(g)
    dg, du = dhidden.chunk(2, dim=1)
    dg.copy_(dy * u * gelu_slope(g, tanh))
    du.copy_(dy * (g / 2 * (1 + tanh)))


# Residual: out = a + b. Its backward is the identity: both inputs receive the residual stream's gradient.


def residual_forward(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out, a, b (N, C)."""
    torch.add(a, b, out=out)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None
) -> None:
    """out (N, C) = residual (N, C) + inp (N, I) weight (C, I)^T + bias (C) or None. `out` must not be `residual`."""
    linear_forward(out, inp, weight, bias)
    residual_forward(out, residual, out)
