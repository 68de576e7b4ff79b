"""Convolution of pictures, and the transposed convolution, its adjoint. A picture is (Y, X, C): rows, columns, channels."""

import math
from collections.abc import Iterator

from torch import Tensor

from handgrad.ops.reference.linear import bias_backward, linear_backward, linear_forward

# Convolution with a J x J kernel, stride s, padding p = (J - 1) // 2 (Dumoulin & Visin 2016,
# https://arxiv.org/abs/1603.07285, relationship 6); x is 0 outside of the picture:
#
#   y[i, j, f] = b[f] + sum over u, v, c of W[f, u, v, c] x[s i + u - p, s j + v - p, c]
#
# As a matrix: row (i, j) of P are the J J C numbers that y[i, j] reads, its patch, and y = P W^T + b.
# Backward: dP = dy W, and each number of a patch's gradient goes back to where it was read, x[s i + u - p, s j + v - p, c];
# dW = dy^T P,  db = sum over samples and places of dy.
#
# The transposed convolution is the map from dy to dx, plus a bias. So its forward is a convolution's input gradient, its
# input gradient a convolution, and its weight gradient dW with x and dy exchanged (their section 4).


def conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    """out (B, Yo, Xo, F) from inp (B, Y, X, C), weight (F, J J C) and bias (F). Yo = (Y + 2 p - J) // stride + 1."""
    linear_forward(rows(out), patches(inp, side_of(weight, inp), stride), weight, bias)


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
    """dinp (B, Y, X, C) from dout (B, Yo, Xo, F). Adds the gradients of weight (F, J J C) and bias (F) to their
    accumulators. dinp None: the input is the picture."""
    side = side_of(weight, inp)
    read = patches(inp, side, stride)
    dpatches = read.new_empty(read.shape)
    linear_backward(dpatches, dweight_acc, dbias_acc, rows(dout), read, weight)
    if dinp is not None:
        fold(dinp, dpatches, side, stride)


def transposed_conv_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, scratch: Tensor | None = None
) -> None:
    """out (B, Y, X, C) from inp (B, Yo, Xo, F), weight (F, J J C) and bias (C): `conv_backward`'s dinp, plus bias."""
    fold(out, rows(inp) @ weight, side_of(weight, out), stride)
    if bias is not None:
        out.add_(bias)


def transposed_conv_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    stride: int = 1,
    scratch: Tensor | None = None,
) -> None:
    """dinp (B, Yo, Xo, F) from dout (B, Y, X, C): `conv_forward`. Adds the gradients of weight (F, J J C) and bias (C)."""
    read = patches(dout, side_of(weight, dout), stride)
    linear_forward(rows(dinp), read, weight, None)
    if dweight_acc is not None:
        dweight_acc.add_(rows(inp).t() @ read)
    if dbias_acc is not None:
        bias_backward(dbias_acc, rows(dout))


def rows(pictures: Tensor) -> Tensor:
    """(B, Y, X, C) -> (B Y X, C), a view."""
    return pictures.view(-1, pictures.shape[3])


def side_of(weight: Tensor, pictures: Tensor) -> int:
    """J of a kernel (F, J J C) on pictures (B, Y, X, C)."""
    return math.isqrt(weight.shape[1] // pictures.shape[3])


def padding_of(side: int) -> int:
    """p: 1 for 3 x 3 and 4 x 4. A stride of 1 then keeps a 3 x 3 kernel's picture, a stride of 2 halves a 4 x 4 one's."""
    return (side - 1) // 2


def patches(inp: Tensor, side: int, stride: int) -> Tensor:
    """P (B Yo Xo, J J C) of inp (B, Y, X, C), J = `side`."""
    padded = padded_like(inp, side)
    inside(padded, inp, side).copy_(inp)
    windows = padded.unfold(1, side, stride).unfold(2, side, stride)  # (B, Yo, Xo, C, J, J), a view
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, side * side * inp.shape[3])


def fold(out: Tensor, dpatches: Tensor, side: int, stride: int) -> None:
    """out (B, Y, X, C) = the sums of what dpatches (B Yo Xo, J J C) have for each place; the adjoint of `patches`."""
    B, Y, X, C = out.shape
    padded, padding = padded_like(out, side), padding_of(side)
    Yo, Xo = ((length + 2 * padding - side) // stride + 1 for length in (Y, X))
    terms = dpatches.view(B, Yo, Xo, side, side, C)
    for u, v, window in offsets(padded, side, stride, Yo, Xo):
        window += terms[:, :, :, u, v]
    out.copy_(inside(padded, out, side))


def offsets(padded: Tensor, side: int, stride: int, rows: int, columns: int) -> Iterator[tuple[int, int, Tensor]]:
    """(u, v, the places that element (u, v) of the kernel reads: (B, `rows`, `columns`, C), a view of padded)."""
    for u in range(side):
        for v in range(side):
            last_row, last_column = u + stride * (rows - 1) + 1, v + stride * (columns - 1) + 1
            yield u, v, padded[:, u:last_row:stride, v:last_column:stride]


def padded_like(pictures: Tensor, side: int) -> Tensor:
    """Zeros (B, Y + 2 p, X + 2 p, C)."""
    (B, Y, X, C), padding = pictures.shape, padding_of(side)
    return pictures.new_zeros(B, Y + 2 * padding, X + 2 * padding, C)


def inside(padded: Tensor, pictures: Tensor, side: int) -> Tensor:
    """The part (B, Y, X, C) of `padded` without its border, a view."""
    (_, Y, X, _), padding = pictures.shape, padding_of(side)
    return padded[:, padding : padding + Y, padding : padding + X]
