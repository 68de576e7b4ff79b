"""Products with weights on the tensor cores, with bias, GELU and residual sum in their epilogues; in fp8 where both of a
product's operands are quantised.

y = x W^T + b.  dx = dy W,  dW += dy^T x (accumulated in float32 inside the product),  db += column sums of dy.

What pays in an epilogue and what does not was measured: docs/operations/linear.md, and for fp8 docs/operations/fp8.md.
"""

import torch
from torch import Tensor

from handgrad.fp8.cuda.gelu import gelu_backward_fp8, gelu_forward_fp8
from handgrad.fp8.formats import Form, Operands, Quantized, fp8_operands, plain
from handgrad.ops.cuda.column_sums import bias_backward
from handgrad.ops.cuda.cublaslt import BIAS, DGELU, GELU_AUX_BIAS, PLAIN, multiply
from handgrad.ops.cuda.gelu import gelu_backward, gelu_forward

# Hopper's fp8 tensor cores add up in fewer than 24 bits, unless told to hand over to float32 every 128 terms, which takes 4
# to 30 % longer. A 16-bit result hides the difference in sums as short as a block's (2.7e-3 off at worst, against 1.7e-3),
# not in the head's over the vocabulary (6.7e-3), nor does a float32 one over the tokens (5e-3 against 2e-4).
LONGEST_FAST_SUM = 8192


def has_fast_sums(out: Tensor, terms: int) -> bool:
    return out.dtype != torch.float32 and terms <= LONGEST_FAST_SUM


def has_gelu_epilogue(tensor: Tensor) -> bool:
    """The library has the GELU epilogues for 16-bit types."""
    return tensor.dtype != torch.float32


def fp8_product(
    out: Tensor,
    operands: Operands,
    *,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    fast_sums: bool | None = None,
    scratch: Tensor,
) -> None:
    """out (M, N) = left (M, K) right (N, K)^T + bias (N) + added (M, N): both lie along K, as Hopper wants them."""
    left, right, (left_inverse, right_inverse) = operands
    multiply(
        out,
        right,
        left,
        transpose_a=True,
        epilogue=PLAIN if bias is None else BIAS,
        bias=bias,
        added=added,
        inverse_scales=(right_inverse, left_inverse),
        fast_sums=has_fast_sums(out, left.shape[1]) if fast_sums is None else fast_sums,
        scratch=scratch,
    )


def linear_forward(out: Tensor, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor) -> None:
    """out (N, O) = inp (N, I) weight (O, I)^T + bias (O)."""
    operands = fp8_operands(inp, "rows", weight, "rows")
    if operands is not None:
        fp8_product(out, operands, bias=bias, scratch=scratch)
        return
    epilogue = PLAIN if bias is None else BIAS
    multiply(out, plain(weight), plain(inp), transpose_a=True, epilogue=epilogue, bias=bias, scratch=scratch)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor | None,
    dout: Form,
    inp: Form,
    weight: Form,
    *,
    scratch: Tensor,
) -> None:
    """dinp (N, I) = dout (N, O) weight; dweight_acc (O, I) += dout^T inp; dbias_acc (O) += column sums of dout."""
    input_backward(dinp, dout, weight, scratch)
    weight_backward(dweight_acc, dbias_acc, dout, inp, scratch)


def input_backward(dinp: Tensor, dout: Form, weight: Form, scratch: Tensor) -> None:
    operands = fp8_operands(dout, "rows", weight, "columns")
    if operands is not None:
        fp8_product(dinp, operands, scratch=scratch)
    else:
        multiply(dinp, plain(weight), plain(dout), scratch=scratch)


def weight_backward(dweight_acc: Tensor, dbias_acc: Tensor | None, dout: Form, inp: Form, scratch: Tensor) -> None:
    operands = fp8_operands(dout, "columns", inp, "columns")
    if operands is not None:
        fp8_product(dweight_acc, operands, added=dweight_acc, scratch=scratch)
    else:
        multiply(dweight_acc, plain(inp), plain(dout), transpose_b=True, added=dweight_acc, scratch=scratch)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout, scratch=scratch)


def linear_residual_forward(
    out: Tensor,
    residual: Tensor,
    inp: Form,
    weight: Form,
    bias: Tensor,
    *,
    scratch: Tensor,
) -> None:
    """out (N, C) = residual (N, C) + inp (N, I) weight (C, I)^T + bias (C), summed in float32 and rounded once."""
    operands = fp8_operands(inp, "rows", weight, "rows")
    if operands is not None:
        fp8_product(out, operands, bias=bias, added=residual, scratch=scratch)
    else:
        options = {"transpose_a": True, "epilogue": BIAS, "bias": bias, "added": residual}
        multiply(out, plain(weight), plain(inp), **options, scratch=scratch)


def linear_gelu_forward(out: Form, hidden: Tensor, inp: Form, weight: Form, bias: Tensor, *, scratch: Tensor) -> None:
    """hidden (N, F) = inp (N, I) weight (F, I)^T + bias (F); out (N, F) = GELU(hidden). Of a quantised out this writes
    `rows`; its `columns` come in the backward, where they are needed.

    In the 16-bit product's epilogue GELU sees hidden before its rounding. For fp8 the library has no such epilogue.
    """
    if isinstance(out, Quantized):
        linear_forward(hidden, inp, weight, bias, scratch=scratch)
        gelu_forward_fp8(out, hidden)
    elif has_gelu_epilogue(hidden):
        options = {"transpose_a": True, "epilogue": GELU_AUX_BIAS, "bias": bias, "aux": hidden}
        multiply(out, plain(weight), plain(inp), **options, scratch=scratch)
    else:
        linear_forward(hidden, inp, weight, bias, scratch=scratch)
        gelu_forward(out, hidden)


def gelu_linear_backward(
    dhidden: Form,
    dweight_acc: Tensor,
    dout: Form,
    inp: Form,
    hidden: Tensor,
    weight: Form,
    *,
    dgelu: Tensor | None = None,
    scratch: Tensor,
) -> None:
    """`linear_backward` of a product whose input (N, F) is GELU(hidden): dhidden is the gradient before the GELU.

    Where dhidden is quantised, the gradient after the GELU passes through dgelu (N, F), and the `columns` of inp are made
    from hidden. (The library's fp8 product with the GELU's derivative in its epilogue takes 1.5 ms where the plain one
    takes 0.32.)
    """
    if isinstance(dhidden, Quantized):
        assert dgelu is not None and isinstance(inp, Quantized)
        input_backward(dgelu, dout, weight, scratch)
        gelu_backward_fp8(dhidden, inp, dgelu, hidden)
    elif has_gelu_epilogue(hidden):
        multiply(dhidden, plain(weight), plain(dout), epilogue=DGELU, aux=hidden, scratch=scratch)
    else:
        multiply(dhidden, plain(weight), plain(dout), scratch=scratch)
        gelu_backward(dhidden, hidden)
    weight_backward(dweight_acc, None, dout, inp, scratch)
