"""Products with weights, in float32 by the faster library of the two in torch: MKL on an Intel CPU, else oneDNN."""

import torch
from torch import Tensor

from handgrad.machine import processor
from handgrad.ops import reference

# Rows of a weight gradient that are multiplied before they are added to the accumulator, where the GEMM itself cannot
# accumulate: the temporary of 1024 rows stays in the last-level cache, and the GEMM runs as fast as in one piece.
ACCUMULATE_ROWS = 1024

# On Intel's CPUs torch's own GEMMs, which MKL makes, are as fast as oneDNN's, and they write and add in place.
MKL_IS_AS_FAST = torch.backends.mkl.is_available() and processor.is_intel()
# But for the few rows of generated text, which cost a pass over the weight: in the mode whose sums depend on no thread, MKL
# takes longer for them (benchmarks/results/cpu-intel-few-rows.json).
FEW_ROWS, LARGE_WEIGHT_ELEMENTS = 8 if torch.backends.mkldnn.is_available() else 0, 1 << 20


def gemm(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K) right (N, K)^T + bias (N), by oneDNN. In float32 it runs at 293 to 440 GFLOP/s on two AVX-512 cores of
    AMD's, where the BLAS behind `torch.mm` runs at 190; it has no accumulating and no out= form."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prefers_onednn(tensor: Tensor) -> bool:
    """Float32, if this torch has oneDNN. In bf16 `torch.mm` calls oneDNN itself; it has no float64."""
    return not MKL_IS_AS_FAST and tensor.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def is_pass_over_weight(inp: Tensor, weight: Tensor) -> bool:
    """True for few rows of a large weight in float32, if this torch has oneDNN."""
    return inp.shape[0] <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT_ELEMENTS and inp.dtype == torch.float32


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    if prefers_onednn(inp) or is_pass_over_weight(inp, weight):
        out.copy_(gemm(inp, weight, bias))
    else:
        reference.linear_forward(out, inp, weight, bias)


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
    if prefers_onednn(dout):
        dinp.copy_(gemm(dout, weight.t()))
    else:
        torch.mm(dout, weight, out=dinp)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp)
    if dbias_acc is not None:
        reference.bias_backward(dbias_acc, dout)


def weight_backward(dweight_acc: Tensor, dout: Tensor, inp: Tensor) -> None:
    """By blocks of rows, whose temporary stays in cache, where the GEMM cannot accumulate."""
    onednn = prefers_onednn(inp)
    if dweight_acc.dtype == inp.dtype and not onednn:
        dweight_acc.addmm_(dout.t(), inp)
        return
    for row in range(0, dweight_acc.shape[0], ACCUMULATE_ROWS):
        rows = slice(row, row + ACCUMULATE_ROWS)
        left = dout[:, rows].t()
        dweight_acc[rows].add_(gemm(left, inp.t()) if onednn else torch.mm(left, inp))
