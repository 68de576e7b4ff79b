"""Convolutions by cuDNN, as torch binds it: only algorithms without atomics, and float32 without TF32.

Pictures and kernels lie in memory as cuDNN wants them, channels last. Its workspace and its results come from torch's
allocator, and so from a CUDA graph's own pool.
"""

from functools import partial

import torch
from torch import Tensor

from handgrad.ops import compose
from handgrad.ops.reference.convolution import padding_of, rows, side_of

# The same algorithm each time, by cuDNN's heuristics and not by timing, and the same bits.
reproducible = partial(torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    side = side_of(weight, inp)
    with reproducible():
        y = torch.ops.aten.convolution(planes(inp), kernels(weight, side), None, *layout(side, stride))
    torch.add(y.permute(0, 2, 3, 1), 0 if bias is None else bias, out=out)


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
    if dinp is not None:
        transposed_conv_forward(dinp, dout, weight, None, stride=stride)
    if dweight_acc is not None:
        add_weight_gradient(dweight_acc, dout, inp, weight, stride)
    if dbias_acc is not None:
        dbias_acc.add_(rows(dout).sum(0))


def transposed_conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    y, _, _ = gradients(inp, out, weight, stride, [True, False, False])
    torch.add(y.permute(0, 2, 3, 1), 0 if bias is None else bias, out=out)


transposed_conv_backward = compose.transposed_backward(conv_forward, conv_backward)


def add_weight_gradient(dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, stride: int) -> None:
    """Adds dW (F, J J C) of a convolution of inp (B, Y, X, C) with the output's gradient dout (B, Yo, Xo, F)."""
    _, dweight, _ = gradients(dout, inp, weight, stride, [False, True, False])
    kernels(dweight_acc, side_of(weight, inp)).add_(dweight)


def gradients(dout: Tensor, inp: Tensor, weight: Tensor, stride: int, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """(dx (B, C, Y, X), dW (F, C, J, J), db) of a convolution, those `wanted`. dx needs only the shape of inp."""
    side = side_of(weight, inp)
    tensors = planes(dout), planes(inp), kernels(weight, side)
    with reproducible():
        return torch.ops.aten.convolution_backward(*tensors, None, *layout(side, stride), wanted)


def planes(pictures: Tensor) -> Tensor:
    """(B, Y, X, C) -> (B, C, Y, X), a view in torch's order of dimensions."""
    return pictures.permute(0, 3, 1, 2)


def kernels(weight: Tensor, side: int) -> Tensor:
    """(F, J J C) -> (F, C, J, J), a view."""
    return planes(weight.view(len(weight), side, side, -1))


def layout(side: int, stride: int) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
    """(stride, padding, dilation, transposed, padding of the output, groups)."""
    padding = padding_of(side)
    return [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1
