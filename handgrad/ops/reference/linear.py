"""Products with weights: forward, and the gradients of input, weight and bias."""

import torch
from torch import Tensor

from handgrad.ops.reference import device

# Rows of a weight gradient that are multiplied before they are added to the accumulator, where the product itself cannot
# accumulate: the temporary of 1024 rows stays in the last-level cache, and the product runs as fast as in one piece.
ACCUMULATE_ROWS = 1024

# Linear: y = x W^T + b, W (out, in).  dx = dy W,  dW = dy^T x,  db = sum over tokens of dy.


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K) right (N, K)^T + bias (N), by oneDNN. In float32 it runs at 293 to 440 GFLOP/s on two AVX-512 cores of
    AMD's, where the BLAS behind `torch.mm` runs at 190; it has no accumulating and no out= form."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prefers_onednn(tensor: Tensor) -> bool:
    """Float32 on a CPU whose torch has oneDNN. In bf16 `torch.mm` calls oneDNN itself; it has no float64."""
    return tensor.dtype == torch.float32 and device.uses_cpu_kernels(tensor) and torch.backends.mkldnn.is_available()


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    """out (N, O) = inp (N, I) weight (O, I)^T + bias (O)."""
    if prefers_onednn(inp):
        out.copy_(product(inp, weight, bias))
    elif bias is None:
        torch.mm(inp, weight.t(), out=out)
    else:
        torch.addmm(bias, inp, weight.t(), out=out)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """dinp (N, I) = dout (N, O) weight; dweight_acc (O, I) += dout^T inp; dbias_acc (O) += column sums of dout, unless it
    is None."""
    input_backward(dinp, dout, weight)
    weight_backward(dweight_acc, dout, inp)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout)


def input_backward(dinp: Tensor, dout: Tensor, weight: Tensor) -> None:
    if prefers_onednn(dout):
        dinp.copy_(product(dout, weight.t()))
    else:
        torch.mm(dout, weight, out=dinp)


def weight_backward(dweight_acc: Tensor, dout: Tensor, inp: Tensor) -> None:
    onednn = prefers_onednn(inp)
    if dweight_acc.dtype == inp.dtype and not onednn:
        dweight_acc.addmm_(dout.t(), inp)  # accumulates inside the product
    else:
        # By blocks of rows, whose temporary stays in cache. The library writes a bf16 product in bf16: there the sum over
        # this call's tokens is rounded once, then added in float32.
        step = ACCUMULATE_ROWS if device.uses_cpu_kernels(inp) else dweight_acc.shape[0]
        for row in range(0, dweight_acc.shape[0], step):
            rows = slice(row, row + step)
            left = dout[:, rows].t()
            dweight_acc[rows].add_(product(left, inp.t()) if onednn else torch.mm(left, inp))


def bias_backward(dbias_acc: Tensor, dout: Tensor, *, scratch: Tensor | None = None) -> None:
    """dbias_acc (O) += column sums of dout (N, O)."""
    dbias_acc.add_(dout.sum(0, dtype=dbias_acc.dtype))
