"""Convolutions by this backend's GEMMs, a sample at a time: its patches stay in cache.

oneDNN has convolutions of its own, but they split sums by threads, so that bits depend on their number.
"""

import torch
from torch import Tensor

from handgrad.ops import compose
from handgrad.ops.cpu.linear import gemm as onednn_gemm, linear_forward, prefers_onednn, weight_backward
from handgrad.ops.reference.convolution import fold, patches, rows, side_of
from handgrad.ops.reference.linear import bias_backward


def conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    side = side_of(weight, inp)
    for y, x in zip(out.split(1), inp.split(1), strict=True):
        linear_forward(rows(y), patches(x, side, stride), weight, bias)


def conv_backward(
    dinp: Tensor | None,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    stride: int = 1,
    scratch: Tensor | None = None,
) -> None:
    side = side_of(weight, inp)
    if dinp is not None:
        transposed_conv_forward(dinp, dout, weight, None, stride=stride)
    if dweight_acc is not None:
        for dy, x in zip(dout.split(1), inp.split(1), strict=True):
            weight_backward(dweight_acc, rows(dy), patches(x, side, stride))
    if dbias_acc is not None:
        bias_backward(dbias_acc, rows(dout))


def transposed_conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    side = side_of(weight, out)
    for y, x in zip(out.split(1), inp.split(1), strict=True):
        product = onednn_gemm(rows(x), weight.t()) if prefers_onednn(x) else torch.mm(rows(x), weight)
        fold(y, product, side, stride)
    if bias is not None:
        out.add_(bias)


transposed_conv_backward = compose.transposed_backward(conv_forward, conv_backward)
