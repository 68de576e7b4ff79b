"""The square of ReLU, as the end of a product."""

from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.linear import linear_backward, linear_forward

# Squared ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668): y = max(x, 0)^2,  dy/dx = 2 max(x, 0) = 2 sqrt(y).
# So the backward needs the output alone, which the next product keeps anyway.


def relu2_forward(hidden_inout: Tensor) -> None:
    """hidden_inout (N, F), in place, at least in float32."""
    x = hidden_inout.to(accumulation_dtype(hidden_inout.dtype)).clamp(min=0)
    hidden_inout.copy_(x * x)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    """Turns the gradient after the square into the gradient before the ReLU, in place; out (N, F) is the output."""
    y = out.to(accumulation_dtype(out.dtype))
    dhidden_inout.copy_(dhidden_inout * (2 * y.sqrt()))


def linear_relu2_forward(out: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    """out (N, F) = max(inp (N, I) weight (F, I)^T, 0)^2."""
    linear_forward(out, inp, weight, None)
    relu2_forward(out)


def relu2_linear_backward(
    dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    """`linear_backward` of a product whose input (N, F) is a squared ReLU: dhidden is the gradient before the ReLU."""
    linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
    relu2_backward(dhidden, inp)
