"""Layer norm by torch's kernels; RMS norm, which has no CPU kernel in torch, in few passes over memory."""

import torch
from torch import Tensor

from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON
from handgrad.ops.reference.linear import bias_backward
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON, gain_of

aten = torch.ops.aten


def layernorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    N, C = inp.shape
    # Weights in the statistics' dtype make the library keep the statistics in that dtype, even for bf16 inputs.
    weight, bias = weight.to(mean.dtype), bias.to(mean.dtype)
    results = {"out0": out, "out1": mean.view(N, 1), "out2": rstd.view(N, 1)}
    aten.native_layer_norm.out(inp, (C,), weight, bias, LAYERNORM_EPSILON, **results)


def layernorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dbias_below_acc: Tensor | None,
    *,
    scratch: Tensor | None = None,
) -> None:
    N, C = inp.shape
    weight, mean, rstd = weight.to(mean.dtype), mean.view(N, 1), rstd.view(N, 1)
    dinp, _, _ = aten.native_layer_norm_backward(dout, inp, (C,), mean, rstd, weight, weight, [True, False, False])
    dresidual_inout.add_(dinp)
    # The library would split these two sums by threads, so their bits would depend on the machine.
    dy = dout.to(mean.dtype)
    dweight_acc.add_(torch.sub(inp, mean).mul_(rstd).mul_(dy).sum(0))
    dbias_acc.add_(dy.sum(0))
    if dbias_below_acc is not None:
        bias_backward(dbias_below_acc, dresidual_inout)


def rmsnorm_forward(
    out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor | None = None, *, epsilon: float = RMSNORM_EPSILON, plus: float = 0
) -> None:
    torch.linalg.vector_norm(inp, dim=1, dtype=rstd.dtype, out=rstd)
    rstd.square_().div_(inp.shape[1]).add_(epsilon).rsqrt_()
    if gain is None:
        torch.mul(inp, rstd.unsqueeze(1), out=out)
    else:
        out.copy_((inp * rstd.unsqueeze(1)).mul_(gain_of(gain, plus, rstd.dtype)))


def rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor | None,
    *,
    plus: float = 0,
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
        normalized, gain = inp * r, gain_of(gain, plus, rstd.dtype)
        terms = dy * normalized
        dgain_acc.add_(terms.sum(0))
        along = terms.mul_(gain).mean(1, keepdim=True)
        dx = torch.addcmul(dy * gain, normalized, along, value=-1)
    dresidual_inout.add_(dx.mul_(r))
