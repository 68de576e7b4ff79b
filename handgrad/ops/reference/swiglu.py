"""SwiGLU, alone and at the end of a product."""

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.linear import linear_backward, linear_forward

# SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202): [g u] = x [Wg Wu]^T in one product,  y = silu(g) u,
# silu(g) = g s,  s = 1 / (1 + exp(-g)).  Backward: du = dy g s,  dg = dy u s (1 + g (1 - s)).


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    """out (N, F), hidden (N, 2F): the gates g, then the numbers u."""
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
    """g and u, (N, F) each, at least in float32."""
    g, u = hidden.to(accumulation_dtype(hidden.dtype)).chunk(2, dim=1)
    return g, u


def linear_swiglu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    """hidden (N, 2F) = inp (N, I) weight (2F, I)^T; out (N, F) = silu(g) u, with hidden = (g, u)."""
    linear_forward(hidden, inp, weight, None)
    swiglu_forward(out, hidden)


def swiglu_linear_backward(
    dhidden: Tensor,
    dinp: Tensor,
    dweight_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """`linear_backward` of a product whose input (N, F) is the SwiGLU of hidden (N, 2F), and on through it to dhidden."""
    linear_backward(dinp, dweight_acc, None, dout, inp, weight)
    swiglu_backward(dhidden, dinp, hidden)
