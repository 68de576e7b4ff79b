"""RMS norm, with or without a gain."""

import torch
from torch import Tensor

RMSNORM_EPSILON = 1e-6

# RMS norm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467): y = g n, n = x rstd, rstd = 1 / sqrt(mean(x^2) + eps),
# over the last axis, statistics in float32. Without a gain, g is 1. `plus`: the gain is stored as w = g - plus, as Gemma
# stores g - 1; g = plus + w in float32, dw = dg.
# Backward: with u = g dy,  dx = rstd (u - n mean(u n)),  dg = sum over rows of dy n.


def gain_of(weight: Tensor, plus: float, dtype: torch.dtype) -> Tensor:
    """The gain in `dtype` of a norm's weight."""
    return weight.to(dtype) + plus if plus else weight.to(dtype)


def rmsnorm_forward(
    out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor | None = None, *, epsilon: float = RMSNORM_EPSILON, plus: float = 0
) -> None:
    """out, inp (N, C); rstd (N); gain (C)."""
    x = inp.to(rstd.dtype)
    rstd.copy_((x * x).mean(1).add_(epsilon).rsqrt_())
    normalized = x * rstd.unsqueeze(1)
    out.copy_(normalized if gain is None else normalized * gain_of(gain, plus, rstd.dtype))


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
    """Adds dL/dinp to the residual stream's gradient (N, C), and dL/dgain (C) to its accumulator. Both gain and accumulator
    may be None."""
    dy, normalized = dout.to(rstd.dtype), inp.to(rstd.dtype) * rstd.unsqueeze(1)
    u = dy
    if gain is not None:
        assert dgain_acc is not None
        dgain_acc.add_((dy * normalized).sum(0))
        u = dy * gain_of(gain, plus, rstd.dtype)
    along = (u * normalized).mean(1, keepdim=True)
    dresidual_inout.add_((u - normalized * along) * rstd.unsqueeze(1))
