"""The products of an adapter that are added to others, in plain torch."""

from torch import Tensor

from handgrad.ops.reference.linear import weight_backward

# With u = x A^T: y += u B^T.  Backward: du = dy B,  dB = dy^T u,  dx += du A,  dA = du^T x.


def add_linear_forward(out_inout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    """out_inout (N, O) += inp (N, I) weight (O, I)^T."""
    out_inout.addmm_(inp, weight.t())


def add_linear_backward(
    dinp_inout: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    """dinp_inout (N, I) += dout (N, O) weight (O, I); dweight_acc (O, I) += dout^T inp."""
    dinp_inout.addmm_(dout, weight)
    weight_backward(dweight_acc, dout, inp)
