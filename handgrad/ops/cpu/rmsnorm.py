"""RMS norm in few passes over memory; torch has no kernel of it for a CPU."""

import torch
from torch import Tensor

from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON


def rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor) -> None:
    torch.linalg.vector_norm(inp, dim=1, dtype=rstd.dtype, out=rstd)
    rstd.square_().div_(inp.shape[1]).add_(RMSNORM_EPSILON).rsqrt_()
    torch.mul(inp, rstd.unsqueeze(1), out=out)


def rmsnorm_backward(dresidual_inout: Tensor, dout: Tensor, inp: Tensor, rstd: Tensor) -> None:
    x, dy, r = inp.to(rstd.dtype), dout.to(rstd.dtype), rstd.unsqueeze(1)
    dx = dy * x
    along = dx.mean(1, keepdim=True).mul_(r).mul_(r)  # mean(dy y) rstd
    torch.addcmul(dy, x, along, value=-1, out=dx)
    dresidual_inout.add_(dx.mul_(r))


def gained_rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor, *, epsilon: float) -> None:
    torch.linalg.vector_norm(inp, dim=1, dtype=rstd.dtype, out=rstd)
    rstd.square_().div_(inp.shape[1]).add_(epsilon).rsqrt_()
    y = inp * rstd.unsqueeze(1)
    out.copy_(y.mul_(gain))


def gained_rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    dy, r = dout.to(rstd.dtype), rstd.unsqueeze(1)
    normalized = inp * r
    products = dy * normalized
    dgain_acc.add_(products.sum(0))
    along = products.mul_(gain).mean(1, keepdim=True)
    dx = torch.addcmul(dy * gain, normalized, along, value=-1)
    dresidual_inout.add_(dx.mul_(r))
