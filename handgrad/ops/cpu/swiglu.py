"""SwiGLU in few passes over memory, and the products that end or begin with it."""

import torch
from torch import Tensor

from handgrad.ops.cpu.linear import linear_backward, linear_forward
from handgrad.ops.cpu.whole_vectors import by_whole_vectors
from handgrad.ops.reference.swiglu import gates


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    y = sigmoid(g).mul_(g)
    torch.mul(y, u, out=y if out.dtype != y.dtype else out)
    if out.dtype != y.dtype:
        out.copy_(y)


def swiglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    dy, s = dout.to(g.dtype), sigmoid(g)
    dg, du = dhidden.chunk(2, dim=1)
    silu = g * s
    slope = torch.addcmul(s, silu, s, value=-1).add_(silu)  # s (1 + g (1 - s)) = s - g s s + g s
    dg.copy_(slope.mul_(u).mul_(dy))
    du.copy_(silu.mul_(dy))


def sigmoid(gates: Tensor) -> Tensor:
    """The sigmoid of a view of the hidden layer, in a new tensor."""
    s = gates.clone(memory_format=torch.contiguous_format)
    by_whole_vectors(torch.sigmoid_, s)
    return s


def linear_swiglu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
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
    linear_backward(dinp, dweight_acc, None, dout, inp, weight)
    swiglu_backward(dhidden, dinp, hidden)
