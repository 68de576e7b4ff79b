"""Squared ReLU in place, and the products that end or begin with it; it has no kernel of torch's."""

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.cpu.linear import linear_backward, linear_forward


def relu2_forward(hidden_inout: Tensor) -> None:
    """In 16 bits the largest of x and 0 is exact, and the square is rounded once."""
    hidden_inout.clamp_(min=0)
    hidden_inout.mul_(hidden_inout)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    """2 sqrt(y) = y / sqrt(y / 4): torch's square root is slow at zeros, of which there are many; the reciprocal root is
    not. The smallest normal number takes the place of zero, lest 0 / 0 be formed."""
    y = out.to(accumulation_dtype(out.dtype))
    slope = (y * 0.25).clamp_(min=torch.finfo(y.dtype).tiny).rsqrt_().mul_(y)
    dhidden_inout.mul_(slope)


def linear_relu2_forward(out: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    linear_forward(out, inp, weight, None)
    relu2_forward(out)


def relu2_linear_backward(
    dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
    relu2_backward(dhidden, inp)
