"""GELU and the residual sum, alone and as the end of a product."""

from dataclasses import replace

import torch
from torch import Tensor

from handgrad.fp8.formats import Form, Quantized
from handgrad.fp8.reference import quantize, write_forms
from handgrad.ops.reference.linear import input_backward, linear_backward, linear_forward, weight_backward

aten = torch.ops.aten

# GELU, tanh form (Hendrycks & Gimpel 2016): y = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3).
# dy/dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) sqrt(2/pi) (1 + 3 * 0.044715 x^2).


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    """out, inp (N, F)."""
    aten.gelu.out(inp, approximate="tanh", out=out)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    """Turns the gradient after the GELU into the gradient before it, in place; inp (N, F) is the GELU's input."""
    aten.gelu_backward.grad_input(dhidden_inout, inp, approximate="tanh", grad_input=dhidden_inout)


# Linear and GELU in one: h = x W^T + b, y = GELU(h). Backward of the product that reads y (its weight Wp, output gradient
# dz): dh = GELU'(h) (dz Wp),  dWp = dz^T y.


def linear_gelu_forward(
    out: Form, hidden: Tensor, inp: Form, weight: Form, bias: Tensor, *, scratch: Tensor | None = None
) -> None:
    """hidden (N, F) = inp (N, I) weight (F, I)^T + bias (F); out (N, F) = GELU(hidden). Of a quantised out this writes
    `rows`; its `columns` come in the backward, where they are needed."""
    linear_forward(hidden, inp, weight, bias)
    if isinstance(out, Tensor):
        gelu_forward(out, hidden)
    else:
        result = torch.empty_like(hidden)
        gelu_forward(result, hidden)
        quantize(replace(out, columns=None), result)


def gelu_linear_backward(
    dhidden: Form,
    dweight_acc: Tensor,
    dout: Form,
    inp: Form,
    hidden: Tensor,
    weight: Form,
    *,
    dgelu: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """`linear_backward` of a product whose input (N, F) is GELU(hidden): dhidden is the gradient before the GELU.

    Where dhidden is quantised, the gradient after the GELU passes through dgelu (N, F), and the `columns` of inp are made
    from hidden.
    """
    if isinstance(dhidden, Tensor):
        linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
        gelu_backward(dhidden, hidden)
        return
    assert dgelu is not None and isinstance(inp, Quantized)
    input_backward(dgelu, dout, weight)
    gelu_backward(dgelu, hidden)
    quantize(dhidden, dgelu)
    result = torch.empty_like(hidden)
    gelu_forward(result, hidden)
    write_forms(replace(inp, rows=None), result)
    weight_backward(dweight_acc, None, dout, inp)


# Residual: out = a + b. Its backward is the identity: both inputs receive the residual stream's gradient.


def residual_forward(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out, a, b (N, C)."""
    torch.add(a, b, out=out)


def linear_residual_forward(
    out: Tensor,
    residual: Tensor,
    inp: Form,
    weight: Form,
    bias: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """out (N, C) = residual (N, C) + inp (N, I) weight (C, I)^T + bias (C). `out` is not `residual`."""
    linear_forward(out, inp, weight, bias)
    residual_forward(out, residual, out)
