"""GELU by torch's kernels, and the products that end or begin with it."""

import torch
from torch import Tensor

from handgrad.ops.cpu.linear import linear_backward, linear_forward
from handgrad.ops.reference import residual_forward

aten = torch.ops.aten


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    aten.gelu.out(inp, approximate="tanh", out=out)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    aten.gelu_backward.grad_input(dhidden_inout, inp, approximate="tanh", grad_input=dhidden_inout)


def linear_gelu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor | None = None
) -> None:
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
    linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
    gelu_backward(dhidden, hidden)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None
) -> None:
    linear_forward(out, inp, weight, bias)
    residual_forward(out, residual, out)
