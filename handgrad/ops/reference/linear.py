"""GEMMs with weights: forward, and the gradients of input, weight and bias."""

import torch
from torch import Tensor

# Linear: y = x W^T + b, W (out, in).  dx = dy W,  dW = dy^T x,  db = sum over tokens of dy.


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    """out (N, O) = inp (N, I) weight (O, I)^T + bias (O)."""
    if bias is None:
        torch.mm(inp, weight.t(), out=out)
    else:
        torch.addmm(bias, inp, weight.t(), out=out)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """dinp (N, I) = dout (N, O) weight; dweight_acc (O, I) += dout^T inp; dbias_acc (O) += column sums of dout. Skips a
    parameter gradient whose accumulator is None."""
    input_backward(dinp, dout, weight)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout)


def input_backward(dinp: Tensor, dout: Tensor, weight: Tensor) -> None:
    torch.mm(dout, weight, out=dinp)


def weight_backward(dweight_acc: Tensor, dout: Tensor, inp: Tensor) -> None:
    if dweight_acc.dtype == inp.dtype:
        dweight_acc.addmm_(dout.t(), inp)
    else:  # the library stores a 16-bit GEMM in 16 bits, so it rounds the sum over this call's tokens once
        dweight_acc.add_(torch.mm(dout.t(), inp))


def bias_backward(dbias_acc: Tensor, dout: Tensor, *, scratch: Tensor | None = None) -> None:
    """dbias_acc (O) += column sums of dout (N, O)."""
    dbias_acc.add_(dout.sum(0, dtype=dbias_acc.dtype))
