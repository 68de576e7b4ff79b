"""GELU by torch's kernels, and the products that end or begin with it."""

import torch
from torch import Tensor

from handgrad.ops.cpu.linear import linear_backward, linear_forward
from handgrad.ops.cpu.whole_vectors import by_whole_vectors
from handgrad.ops.reference import residual_forward

aten = torch.ops.aten


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    by_whole_vectors(lambda y, x: aten.gelu.out(x, approximate="tanh", out=y), out, inp)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    def backward(dy: Tensor, x: Tensor) -> None:
        aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy)

    by_whole_vectors(backward, dhidden_inout, inp)


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
