"""The products that end or begin with a squared ReLU; it has no kernel of torch's."""

from torch import Tensor

from handgrad.ops.cpu.linear import linear_backward, linear_forward
from handgrad.ops.reference.relu2 import relu2_backward, relu2_forward


def linear_relu2_forward(out: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    linear_forward(out, inp, weight, None)
    relu2_forward(out)


def relu2_linear_backward(
    dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
    relu2_backward(dhidden, inp)
