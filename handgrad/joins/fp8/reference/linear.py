"""GEMMs in fp8 if both operands have the right forms, else in 16 bits."""

from dataclasses import replace

import torch
from torch import Tensor

from handgrad.joins.fp8.formats import Form, Operands, Quantized, fp8_operands, plain, widened
from handgrad.joins.fp8.reference.quantizing import quantize, write_forms
from handgrad.ops import reference
from handgrad.ops.reference import linear


def fp8_gemm(out: Tensor, operands: Operands, *, bias: Tensor | None = None, added: Tensor | None = None) -> None:
    """out (M, N) = left (M, K) right (N, K)^T + bias (N) + added (M, N), summed in float32 and rounded once."""
    left, right, (left_inverse, right_inverse) = operands
    total = torch.mm(widened(left), widened(right).t()).mul_(left_inverse * right_inverse)
    for term in (bias, added):
        if term is not None:
            total += term
    out.copy_(total)


def linear_forward(out: Form, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    """Writes a quantised out (the logits) only in 16 bits. The loss replaces it by its gradient and quantises that."""
    operands = fp8_operands(inp, "rows", weight, "rows")
    if operands is None:
        reference.linear_forward(plain(out), plain(inp), plain(weight), bias)
    else:
        fp8_gemm(plain(out), operands, bias=bias)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Form,
    inp: Form,
    weight: Form,
    *,
    scratch: Tensor | None = None,
) -> None:
    input_backward(dinp, dout, weight)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout)


def input_backward(dinp: Tensor, dout: Form, weight: Form) -> None:
    operands = fp8_operands(dout, "rows", weight, "columns")
    if operands is None:
        linear.input_backward(dinp, plain(dout), plain(weight))
    else:
        fp8_gemm(dinp, operands)


def weight_backward(dweight_acc: Tensor, dout: Form, inp: Form) -> None:
    operands = fp8_operands(dout, "columns", inp, "columns")
    if operands is None:
        linear.weight_backward(dweight_acc, plain(dout), plain(inp))
    else:
        fp8_gemm(dweight_acc, operands, added=dweight_acc)


def bias_backward(dbias_acc: Tensor, dout: Form, *, scratch: Tensor | None = None) -> None:
    """Sums the fp8 numbers if dout has columns."""
    if isinstance(dout, Tensor) or dout.columns is None:
        reference.bias_backward(dbias_acc, plain(dout))
    else:
        dbias_acc.add_(widened(dout.columns).sum(1, dtype=dbias_acc.dtype) * dout.inverse_scale)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor | None = None
) -> None:
    linear_forward(out, inp, weight, bias)
    reference.residual_forward(out, residual, out)


def linear_gelu_forward(
    out: Form, hidden: Tensor, inp: Form, weight: Form, bias: Tensor, *, scratch: Tensor | None = None
) -> None:
    """Writes only the `rows` of a quantised out. The backward makes the `columns`."""
    linear_forward(hidden, inp, weight, bias)
    if isinstance(out, Tensor):
        reference.gelu_forward(out, hidden)
    else:
        result = torch.empty_like(hidden)
        reference.gelu_forward(result, hidden)
        quantize(replace(out, columns=None), result)


def gelu_linear_backward(
    dhidden: Form,
    dweight_acc: Tensor,
    dout: Form,
    inp: Form,
    hidden: Tensor,
    weight: Form,
    *,
    scratch: Tensor | None = None,
) -> None:
    """Writes the gradient after the GELU to the `workspace` of a quantised dhidden, and inp's `columns` from hidden."""
    if isinstance(dhidden, Tensor):
        linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
        reference.gelu_backward(dhidden, hidden)
        return
    dgelu = dhidden.workspace
    assert dgelu is not None and isinstance(inp, Quantized)
    input_backward(dgelu, dout, weight)
    reference.gelu_backward(dgelu, hidden)
    quantize(dhidden, dgelu)
    result = torch.empty_like(hidden)
    reference.gelu_forward(result, hidden)
    write_forms(replace(inp, rows=None), result)
    weight_backward(dweight_acc, dout, inp)


def linear_relu2_forward(out: Form, inp: Form, weight: Form, *, scratch: Tensor | None = None) -> None:
    """Writes `rows` and 16-bit form of a quantised out. The backward makes `columns` from the latter."""
    linear_forward(out, inp, weight, None)
    reference.relu2_forward(plain(out))
    if isinstance(out, Quantized):
        quantize(replace(out, columns=None), plain(out))


def relu2_linear_backward(
    dhidden: Form, dweight_acc: Tensor, dout: Form, inp: Form, weight: Form, *, scratch: Tensor | None = None
) -> None:
    """Writes the gradient after the square to the `workspace` of dhidden, and inp's `columns` from its 16-bit form."""
    if isinstance(dhidden, Tensor):
        linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
        reference.relu2_backward(dhidden, plain(inp))
        return
    dsquare = dhidden.workspace
    assert dsquare is not None and isinstance(inp, Quantized)
    input_backward(dsquare, dout, weight)
    reference.relu2_backward(dsquare, plain(inp))
    quantize(dhidden, dsquare)
    write_forms(replace(inp, rows=None), plain(inp))
    weight_backward(dweight_acc, dout, inp)


def linear_swiglu_forward(out: Form, hidden: Tensor, inp: Form, weight: Form, *, scratch: Tensor | None = None) -> None:
    """Like `linear_gelu_forward`: the backward makes the `columns` of a quantised out."""
    linear_forward(hidden, inp, weight, None)
    result = out if isinstance(out, Tensor) else hidden.new_empty(out.shape)
    reference.swiglu_forward(result, hidden)
    if isinstance(out, Quantized):
        quantize(replace(out, columns=None), result)


def swiglu_linear_backward(
    dhidden: Form,
    dinp: Tensor,
    dweight_acc: Tensor,
    dout: Form,
    inp: Form,
    hidden: Tensor,
    weight: Form,
    *,
    scratch: Tensor | None = None,
) -> None:
    """Recomputes the `columns` of a quantised inp from hidden."""
    input_backward(dinp, dout, weight)
    result = dhidden if isinstance(dhidden, Tensor) else torch.empty_like(hidden)
    reference.swiglu_backward(result, dinp, hidden)
    if isinstance(dhidden, Quantized):
        assert isinstance(inp, Quantized)
        quantize(dhidden, result)
        again = torch.empty_like(dinp)
        reference.swiglu_forward(again, hidden)
        write_forms(replace(inp, rows=None), again)
    weight_backward(dweight_acc, dout, inp)
