"""RMS norm in few passes over memory; torch has no kernel of it for a CPU."""

import torch
from torch import Tensor

from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON


def rmsnorm_forward(
    out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor | None = None, *, epsilon: float = RMSNORM_EPSILON
) -> None:
    torch.linalg.vector_norm(inp, dim=1, dtype=rstd.dtype, out=rstd)
    rstd.square_().div_(inp.shape[1]).add_(epsilon).rsqrt_()
    if gain is None:
        torch.mul(inp, rstd.unsqueeze(1), out=out)
    else:
        out.copy_((inp * rstd.unsqueeze(1)).mul_(gain))


def rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor | None,
    *,
    scratch: Tensor | None = None,
) -> None:
    dy, r = dout.to(rstd.dtype), rstd.unsqueeze(1)
    if gain is None:
        x = inp.to(rstd.dtype)
        dx = dy * x
        along = dx.mean(1, keepdim=True).mul_(r).mul_(r)  # mean(dy y) rstd
        torch.addcmul(dy, x, along, value=-1, out=dx)
    else:
        assert dgain_acc is not None
        normalized = inp * r
        terms = dy * normalized
        dgain_acc.add_(terms.sum(0))
        along = terms.mul_(gain).mean(1, keepdim=True)
        dx = torch.addcmul(dy * gain, normalized, along, value=-1)
    dresidual_inout.add_(dx.mul_(r))
