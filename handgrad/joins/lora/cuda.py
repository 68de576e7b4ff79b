"""An adapter's accumulating GEMMs in cuBLASLt, which reads and writes the same matrix."""

from torch import Tensor

from handgrad.ops.cuda.cublaslt import multiply
from handgrad.ops.cuda.linear import weight_backward


def add_linear_forward(out_inout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor, tf32: bool = False) -> None:
    multiply(out_inout, weight, inp, transpose_a=True, added=out_inout, tf32=tf32, scratch=scratch)


def add_linear_backward(
    dinp_inout: Tensor,
    dweight_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor,
    tf32: bool = False,
) -> None:
    multiply(dinp_inout, weight, dout, added=dinp_inout, tf32=tf32, scratch=scratch)
    weight_backward(dweight_acc, dout, inp, scratch=scratch, tf32=tf32)
