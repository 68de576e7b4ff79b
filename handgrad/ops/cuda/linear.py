"""GEMMs with weights on the tensor cores, with bias, GELU and residual sum in their epilogues.

docs/operations/linear.md has the measurements of what pays in an epilogue. `ops.cuda.tf32` binds `tf32`.
"""

from typing import Any

import torch
from torch import Tensor

from handgrad.ops.cuda.activations import (
    gelu_backward,
    gelu_forward,
    relu2_backward,
    relu2_forward,
    swiglu_backward,
    swiglu_forward,
)
from handgrad.ops.cuda.column_sums import bias_backward
from handgrad.ops.cuda.cublaslt import BIAS, DGELU, GELU_AUX_BIAS, PLAIN, multiply


def has_gelu_epilogue(tensor: Tensor) -> bool:
    """True for 16-bit types: the library has no GELU epilogue for float32."""
    return tensor.dtype != torch.float32


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor, **sums: Any) -> None:
    """`sums`: `tf32` and `whole_sums` of `multiply`, as in the other forwards."""
    epilogue = PLAIN if bias is None else BIAS
    multiply(out, weight, inp, transpose_a=True, epilogue=epilogue, bias=bias, scratch=scratch, **sums)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
    tf32: bool = False,
) -> None:
    input_backward(dinp, dout, weight, scratch=scratch, tf32=tf32)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp, scratch=scratch, tf32=tf32)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout, scratch=scratch)


def input_backward(dinp: Tensor, dout: Tensor, weight: Tensor, *, scratch: Tensor, tf32: bool = False) -> None:
    multiply(dinp, weight, dout, tf32=tf32, scratch=scratch)


def weight_backward(dweight_acc: Tensor, dout: Tensor, inp: Tensor, *, scratch: Tensor, tf32: bool = False) -> None:
    multiply(dweight_acc, inp, dout, transpose_b=True, added=dweight_acc, tf32=tf32, scratch=scratch)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor, **sums: Any
) -> None:
    """The epilogue adds in float32 and rounds once."""
    options = {"transpose_a": True, "epilogue": PLAIN if bias is None else BIAS, "bias": bias, "added": residual}
    multiply(out, weight, inp, **options, **sums, scratch=scratch)


def linear_gelu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor, **sums: Any
) -> None:
    """As an epilogue, GELU reads hidden before it is rounded."""
    if has_gelu_epilogue(hidden):
        options = {"transpose_a": True, "epilogue": GELU_AUX_BIAS, "bias": bias, "aux": hidden}
        multiply(out, weight, inp, **options, scratch=scratch, **sums)
    else:
        linear_forward(hidden, inp, weight, bias, scratch=scratch, **sums)
        gelu_forward(out, hidden)


def gelu_linear_backward(
    dhidden: Tensor,
    dweight_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
    tf32: bool = False,
) -> None:
    if has_gelu_epilogue(hidden):
        multiply(dhidden, weight, dout, epilogue=DGELU, aux=hidden, scratch=scratch)
    else:
        input_backward(dhidden, dout, weight, scratch=scratch, tf32=tf32)
        gelu_backward(dhidden, hidden)
    weight_backward(dweight_acc, dout, inp, scratch=scratch, tf32=tf32)


def linear_relu2_forward(out: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor, **sums: Any) -> None:
    """The squared ReLU reads the rounded output of the GEMM."""
    linear_forward(out, inp, weight, None, scratch=scratch, **sums)
    relu2_forward(out)


def relu2_linear_backward(
    dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor, tf32: bool = False
) -> None:
    input_backward(dhidden, dout, weight, scratch=scratch, tf32=tf32)
    relu2_backward(dhidden, inp)
    weight_backward(dweight_acc, dout, inp, scratch=scratch, tf32=tf32)


def linear_swiglu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor, **sums: Any
) -> None:
    """SwiGLU reads the rounded output of the GEMM."""
    linear_forward(hidden, inp, weight, None, scratch=scratch, **sums)
    swiglu_forward(out, hidden)


def swiglu_linear_backward(
    dhidden: Tensor,
    dinp: Tensor,
    dweight_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
    tf32: bool = False,
) -> None:
    input_backward(dinp, dout, weight, scratch=scratch, tf32=tf32)
    weight_backward(dweight_acc, dout, inp, scratch=scratch, tf32=tf32)
    swiglu_backward(dhidden, dinp, hidden)
