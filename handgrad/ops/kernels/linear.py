"""Products with weights on the tensor cores, with bias, GELU and residual sum in their epilogues.

y = x W^T + b.  dx = dy W,  dW += dy^T x (accumulated in float32 inside the product),  db += column sums of dy.

What pays in an epilogue and what does not was measured: docs/operations/linear.md.
"""

import torch
from torch import Tensor

from handgrad.ops.kernels.column_sums import bias_backward
from handgrad.ops.kernels.cublaslt import BIAS, DGELU, GELU_AUX_BIAS, PLAIN, multiply
from handgrad.ops.kernels.gelu import gelu_backward, gelu_forward


def has_gelu_epilogue(tensor: Tensor) -> bool:
    """The library has the GELU epilogues for 16-bit types."""
    return tensor.dtype != torch.float32


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor) -> None:
    """out (N, O) = inp (N, I) weight (O, I)^T + bias (O)."""
    epilogue = PLAIN if bias is None else BIAS
    multiply(out, weight, inp, transpose_a=True, epilogue=epilogue, bias=bias, scratch=scratch)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
) -> None:
    """dinp (N, I) = dout (N, O) weight; dweight_acc (O, I) += dout^T inp; dbias_acc (O) += column sums of dout."""
    multiply(dinp, weight, dout, scratch=scratch)
    weight_backward(dweight_acc, dbias_acc, dout, inp, scratch)


def weight_backward(dweight_acc: Tensor, dbias_acc: Tensor | None, dout: Tensor, inp: Tensor, scratch: Tensor) -> None:
    multiply(dweight_acc, inp, dout, transpose_b=True, added=dweight_acc, scratch=scratch)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout, scratch=scratch)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor
) -> None:
    """out (N, C) = residual (N, C) + inp (N, I) weight (C, I)^T + bias (C), summed in float32 and rounded once."""
    multiply(out, weight, inp, transpose_a=True, epilogue=BIAS, bias=bias, added=residual, scratch=scratch)


def linear_gelu_forward(out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor) -> None:
    """hidden (N, F) = inp (N, I) weight (F, I)^T + bias (F); out (N, F) = GELU(hidden), of hidden before its rounding."""
    if has_gelu_epilogue(inp):
        multiply(out, weight, inp, transpose_a=True, epilogue=GELU_AUX_BIAS, bias=bias, aux=hidden, scratch=scratch)
    else:
        linear_forward(hidden, inp, weight, bias, scratch=scratch)
        gelu_forward(out, hidden)


def gelu_linear_backward(
    dhidden: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
) -> None:
    """`linear_backward` of a product whose input (N, F) is GELU(hidden): dhidden is the gradient before the GELU."""
    if has_gelu_epilogue(inp):
        multiply(dhidden, weight, dout, epilogue=DGELU, aux=hidden, scratch=scratch)
    else:
        multiply(dhidden, weight, dout, scratch=scratch)
        gelu_backward(dhidden, hidden)
    weight_backward(dweight_acc, dbias_acc, dout, inp, scratch)
