"""An operation of gemma_model.py that handgrad lacks: h = gelu(g) u, by the tanh (Shazeer 2020, arXiv:2002.05202)."""

import math

import torch
from torch import Tensor

SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715


def geglu_forward(out: Tensor, hidden: Tensor) -> None:
    """out (N, F), hidden (N, 2F): the gates g, then the numbers u."""
    g, u = hidden.chunk(2, dim=1)
    out.copy_(0.5 * g * (1 + torch.tanh(SLOPE * (g + CUBE * g**3))) * u)


def geglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    """dhidden (N, 2F) from dout (N, F) and hidden (N, 2F)."""
    g, u = hidden.chunk(2, dim=1)
    dg, du = dhidden.chunk(2, dim=1)
    t = torch.tanh(SLOPE * (g + CUBE * g**3))
    dg.copy_(dout * u * (0.5 * (1 + t) + 0.5 * g * (1 - t * t) * SLOPE * (1 + 3 * CUBE * g * g)))
    du.copy_(dout * 0.5 * g * (1 + t))
